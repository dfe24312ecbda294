"""Where object files start: at places of the first frame that stand out from the rest of it.

Object files that start almost alike must first grow apart, and what they come to divide is the
frame and not the objects. Here each starts from what is seen at a place of its own. All weights are
shared: which object file gets which place is a matter of the order in which places are found.

N clips, C channels, H and W pixels, F object files, P positions of the encoder's map.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scoff.models.pictures import wave_frequencies, waves
from scoff.nn.types import State

CODE = 64  # numbers that tell a place
REACH = 8  # around a place, an eighth of the frame is taken
# nothing that stands out less than this, as a share of what stands out most, is worth a place: not
# the rim of a ball whose middle is taken
LEAST = 0.2
STATE = 0.6  # of states before tanh, at first


@torch.no_grad()
def find_places(frames: Tensor, count: int) -> Tensor:
    """[N, C, H, W] -> [N, count, 2], row and column of pixels, those that stand out most first

    A pixel stands out by how far its colour is from the frame's median colour. Once all that stands
    out is taken, the places that are farthest from those taken follow. Shapes are fixed and nothing
    is read back from the device, so that a CUDA graph can hold it.
    """
    frames = frames.to(torch.promote_types(frames.dtype, torch.float32))
    height, width = frames.shape[-2:]
    median = frames.flatten(2).median(-1).values[..., None, None]
    salience = (frames - median).abs().mean(1)  # [N, H, W]
    # twice, for the mean over a square is the same at several pixels of a large ball
    side = (min(height, width) // REACH - 1) | 1
    for _ in range(2):
        salience = F.avg_pool2d(salience, side, stride=1, padding=side // 2)
    most = salience.amax((-2, -1), keepdim=True)
    # above 0, or in an empty frame all places would be the same
    salience = salience.maximum(LEAST * most) + torch.finfo(salience.dtype).eps

    rows = torch.arange(height, device=frames.device)[:, None]
    columns = torch.arange(width, device=frames.device)
    reach = min(height, width) / REACH
    places = []
    for _ in range(count):
        best = salience.flatten(1).argmax(1)[:, None, None]  # [N, 1, 1]
        row, column = best // width, best % width
        places.append(torch.cat([row, column], -1))
        squared = (rows - row).square() + (columns - column).square()
        salience = salience * -torch.expm1(squared / (-2 * reach**2))
    return torch.cat(places, 1)


class StartAtPlaces(nn.Module):
    """The state of each object file, from what the encoder sees at its place and where that is.

    Args:
        frame_size: pixels on a side.
        map_size: positions on a side of the encoder's map.
        position_size: of what is told at each position.
        scale: how large that is, about.
        object_files: how many, in a state of `hidden_size`.
        num_states: 2 for an LSTM, whose h and c start alike.
    """

    frequencies: Tensor

    def __init__(
        self,
        frame_size: int,
        map_size: int,
        position_size: int,
        scale: float,
        object_files: int,
        hidden_size: int,
        num_states: int,
    ):
        super().__init__()
        self.frame_size, self.map_size, self.scale = frame_size, map_size, scale
        self.object_files, self.num_states = object_files, num_states
        # waves of 16 pixels and more
        frequencies = wave_frequencies(CODE, frame_size // 4)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.widen = nn.Linear(position_size + CODE, hidden_size // object_files)
        nn.init.normal_(self.widen.weight, std=STATE / math.sqrt(self.widen.in_features))
        nn.init.zeros_(self.widen.bias)

    def forward(self, frames: Tensor, seen: Tensor) -> State:
        """[N, C, H, W], [N, P, position_size] -> [1, N, hidden_size], or a pair"""
        at = self.where(frames, seen.dtype)
        what = self.look(seen, at) / self.scale
        code = waves(at, self.frequencies.to(at.dtype)).movedim(0, 2).flatten(2)  # [N, F, CODE]
        code = (math.sqrt(2) * code).to(what.dtype)  # as large as what is seen, about
        h = self.widen(torch.cat([what, code], -1)).tanh().flatten(1)[None]
        return h if self.num_states == 1 else (h, h)

    def where(self, frames: Tensor, dtype: torch.dtype) -> Tensor:
        """Places as shares of the frame, down and across  [N, F, 2]"""
        dtype = torch.promote_types(dtype, torch.float32)
        return (find_places(frames, self.object_files).to(dtype) + 0.5) / self.frame_size

    def look(self, seen: Tensor, at: Tensor) -> Tensor:
        """What is seen there: the four positions around it, the nearer the more  [N, F, C]

        As a product with weights, for gradients of F.grid_sample on a GPU differ from run to run.
        """
        cells = torch.arange(self.map_size, device=at.device)
        inside = (at * self.map_size - 0.5).clamp(0, self.map_size - 1)
        near = (1 - (inside[..., None] - cells).abs()).clamp(min=0)  # [N, F, 2, map_size]
        down, across = near.unbind(2)
        weights = (down[..., :, None] * across[..., None, :]).flatten(2)  # [N, F, P]
        return weights.to(seen.dtype) @ seen
