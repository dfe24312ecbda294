"""From pictures to maps and from vectors to pictures: the networks on both sides of a video model.

Sizes of layers are those of R-NEM (van Steenkiste et al., 2018). M is a number of pictures.
"""

import math
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scoff.nn.checks import autocast_dtype
from scoff.ops.map_norm import map_norm_elu

PainterName = Literal["patches", "broadcast", "deconvolution"]

TRUNK = (16, 32, 64)  # channels of the convolutions
WIDE = 512  # the wider of R-NEM's layers without convolution
HALVINGS = len(TRUNK)
PATCH = 4  # pixels on a side
FEW = 4  # channels; patches of more are far larger than what the first convolution makes of them


class MapNorm(nn.GroupNorm):
    """Over the whole map, as R-NEM's layer norm, with a gain and a bias for each channel; then ELU,
    as one kernel on a GPU."""

    def __init__(self, channels: int):
        super().__init__(1, channels)

    def forward(self, input: Tensor) -> Tensor:
        """[M, C, H, W] -> the same"""
        x = input.permute(0, 2, 3, 1)
        return map_norm_elu(x, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class FirstConv2d(nn.Conv2d):
    """A convolution of few channels, as one product of matrices on a GPU: there its gradients take
    cuDNN longer than copies of all patches do."""

    def forward(self, input: Tensor) -> Tensor:
        """[M, C, H, W] -> [M, out, h, w]"""
        return self.by_patches(input) if input.is_cuda else super().forward(input)

    def by_patches(self, input: Tensor) -> Tensor:
        # cast before there are copies; the product would be after
        x = input.to(autocast_dtype(input) or input.dtype).permute(0, 2, 3, 1)
        down, across = cast(tuple[int, int], self.padding)
        rows, columns = self.kernel_size
        x = F.pad(x, (0, 0, across, across, down, down))
        patches = x.unfold(1, rows, self.stride[0]).unfold(2, columns, self.stride[1])
        # [M, h, w, C, rows, columns]; as a matrix, to whose product the bias is added at once
        kernels = self.weight.flatten(1)
        y = F.linear(patches.reshape(-1, kernels.shape[1]), kernels, self.bias)
        return y.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2)


class Trunk(nn.Module):
    """R-NEM's convolutions without the layer that flattens them: a map, a vector at each position.

    The mean over the positions is taken off. Most of a picture is background, which then is near 0:
    without this, what little differs from clip to clip is lost in what never does, and a model may
    predict the mean picture for hundreds of steps before it begins to see.

    Args:
        channels: of the picture.
        halvings: how many of the three convolutions halve width and height.
    """

    def __init__(self, channels: int, halvings: int):
        super().__init__()
        layers: list[nn.Module] = []
        for number, width in enumerate(TRUNK):
            # both pad a kernel of four so that the result is a half, or all, of the picture's size
            if number < halvings:
                # the place of padding stays taken, for places are names of saved weights
                kind = FirstConv2d if channels <= FEW else nn.Conv2d
                layers += [nn.Identity(), kind(channels, width, 4, stride=2, padding=1)]
            else:
                layers += [nn.ZeroPad2d((1, 2, 1, 2)), nn.Conv2d(channels, width, 4)]
            layers += [MapNorm(width), nn.Identity()]  # ELU's place, likewise
            channels = width
        self.layers = nn.Sequential(*layers)

    def forward(self, pictures: Tensor) -> Tensor:
        """[M, C, H, W] -> [M, 64, h, w]"""
        # a copy: of one channel both layouts are the same, and layers would take it for the other
        features = self.layers(pictures.clone(memory_format=torch.channels_last))
        # in half precision features are rounded, but not their mean: what is the same at all
        # positions is to be gone
        exact = torch.promote_types(features.dtype, torch.float32)
        mean = features.mean((-2, -1), keepdim=True, dtype=exact)
        return (features - mean).to(pictures.dtype)


class PositionEncoder(nn.Module):
    """A map of positions, each of which tells what is there and, by a learned code, where that is.

    What and where go through a small network together, the same at all positions. Were they only
    added, an object file that attends to all positions alike would read the sum of all that is
    there and the sum of all places: nothing of what is where. What the network makes of the place
    alone is taken off, so that a position where there is nothing tells nothing.
    """

    def __init__(self, channels: int, frame_size: int, halvings: int, output_size: int):
        super().__init__()
        self.trunk = Trunk(channels, halvings)
        cells = frame_size >> halvings
        self.code = position_code(TRUNK[-1], cells)
        self.join = nn.Sequential(
            nn.Linear(TRUNK[-1], 2 * output_size),
            nn.ReLU(),
            nn.Linear(2 * output_size, output_size),
        )
        keep_scale(self.join)
        # what is read is a mean over positions, which shrinks as the root of their number; with all
        # of that made up for, attention is too sharp from the start
        self.scale = cells / 4
        self.output_size = output_size

    def forward(self, pictures: Tensor) -> Tensor:
        """[M, C, H, W] -> [M, P, output_size]"""
        where = self.code.flatten(1).T  # [P, 64]
        what = self.trunk(pictures).flatten(2).mT  # [M, P, 64]
        return self.scale * (self.join(what + where) - self.join(where))


class VectorEncoder(nn.Module):
    """The same trunk, flattened, for layers that read one vector."""

    def __init__(self, channels: int, frame_size: int, halvings: int, output_size: int):
        super().__init__()
        self.trunk = Trunk(channels, halvings)
        cells = (frame_size >> halvings) ** 2
        self.flat = nn.Sequential(
            nn.Flatten(),
            nn.Linear(TRUNK[-1] * cells, output_size),
            nn.LayerNorm(output_size),
            nn.ELU(),
        )
        self.output_size = output_size

    def forward(self, pictures: Tensor) -> Tensor:
        """[M, C, H, W] -> [M, output_size]"""
        return self.flat(self.trunk(pictures))


class Broadcast(nn.Module):
    """A vector is put at every position of a small map, with a code of where that is, and the map
    is grown to a picture (spatial broadcast decoder, Watters et al., 2019)."""

    def __init__(self, size: int, channels: int, frame_size: int):
        super().__init__()
        first, *rest = reversed(TRUNK)
        self.widen = nn.Linear(size, first)
        self.code = position_code(first, frame_size >> HALVINGS)
        layers: list[nn.Module] = [nn.ReLU(), nn.Conv2d(first, first, 3, padding=1)]
        before = first
        for width in (*rest, channels):
            layers += [nn.ReLU(), nn.ConvTranspose2d(before, width, 4, stride=2, padding=1)]
            before = width
        self.grow = nn.Sequential(*layers)

    def forward(self, vectors: Tensor) -> Tensor:
        """[M, size] -> [M, channels, H, W]"""
        return self.grow(self.widen(vectors)[:, :, None, None] + self.code)


class Patches(nn.Module):
    """As `Broadcast` until the map is a quarter of the picture's size. There each position tells
    all pixels of its patch at once (Shi et al., 2016): GPUs are slow at large maps of few channels.

    Channels are neighbours in memory, as tensor cores want them. Layers keep to what their input
    has, so that weights are laid out as everywhere else.
    """

    def __init__(self, size: int, channels: int, frame_size: int):
        super().__init__()
        first, second, *_ = reversed(TRUNK)
        self.widen = nn.Linear(size, first)
        self.code = position_code(first, frame_size >> HALVINGS)
        self.grow = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(first, first, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(first, second, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(second, channels * PATCH * PATCH, 3, padding=1),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """[M, size] -> [M, channels, H, W]"""
        where = self.code.permute(1, 2, 0).contiguous()
        cells = self.widen(vectors)[:, None, None] + where  # [M, h, w, 64]
        patches = self.grow(cells.permute(0, 3, 1, 2)).unflatten(1, (-1, PATCH, PATCH))
        # as F.pixel_shuffle, whose result on a CPU has its channels as neighbours
        pixels = patches.permute(0, 1, 4, 2, 5, 3)  # [M, channels, H / 4, 4, W / 4, 4]
        return pixels.flatten(4).flatten(2, 3)


class Deconvolution(nn.Module):
    """R-NEM's decoder: two wide layers, then the convolutions of its encoder in reverse."""

    def __init__(self, size: int, channels: int, frame_size: int):
        super().__init__()
        first, *rest = reversed(TRUNK)
        cells = frame_size >> HALVINGS
        self.widen = nn.Sequential(
            nn.Linear(size, WIDE),
            nn.LayerNorm(WIDE),
            nn.ReLU(),
            nn.Linear(WIDE, first * cells * cells),
            nn.LayerNorm(first * cells * cells),
            nn.ReLU(),
            nn.Unflatten(1, (first, cells, cells)),
        )
        layers: list[nn.Module] = []
        before = first
        for width in (*rest, channels):
            layers += [
                nn.UpsamplingNearest2d(scale_factor=2),
                nn.ZeroPad2d((1, 2, 1, 2)),
                nn.Conv2d(before, width, 4),
                nn.GroupNorm(1, width),
                nn.ReLU(),
            ]
            before = width
        self.grow = nn.Sequential(*layers[:-2])  # the last are logits

    def forward(self, vectors: Tensor) -> Tensor:
        """[M, size] -> [M, channels, H, W]"""
        return self.grow(self.widen(vectors))


PAINTERS: dict[PainterName, type[Patches] | type[Broadcast] | type[Deconvolution]] = {
    "patches": Patches,
    "broadcast": Broadcast,
    "deconvolution": Deconvolution,
}


def position_code(channels: int, cells: int) -> nn.Parameter:
    """To be learned; at first sines and cosines, so that what is near is alike  [C, cells, cells]

    Waves are from four maps to four cells long.
    """
    at = (torch.arange(cells) + 0.5) / cells
    wave = waves(at, wave_frequencies(channels, cells))  # [C / 2, cells]
    across = wave[:, None, :].expand(-1, cells, -1)
    down = wave[:, :, None].expand(-1, -1, cells)
    return nn.Parameter(torch.cat([across, down]).contiguous())


def wave_frequencies(channels: int, cells: int) -> Tensor:
    """Of a code of so many channels for two coordinates  [C / 4]"""
    return torch.logspace(math.log2(0.25), math.log2(max(cells, 1) / 4), channels // 4, 2)


def waves(at: Tensor, frequencies: Tensor) -> Tensor:
    """Sines and cosines of coordinates from 0 to 1, [...] -> [2 * frequencies, ...]"""
    angle = 2 * math.pi * frequencies.view(-1, *[1] * at.ndim) * at
    return torch.cat([angle.sin(), angle.cos()])


def keep_scale(network: nn.Module) -> None:
    """Draws weights so that signals pass ReLUs without shrinking (He et al., 2015).

    With torch's own they shrink more than twofold at each layer, so that at first a picture hardly
    depends on what object files hold.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            fan_in = layer.weight[0].numel()
            if isinstance(layer, nn.ConvTranspose2d):
                # inputs come first, and each pixel is made by a part of the kernel
                fan_in = layer.weight[:, 0].numel() / math.prod(layer.stride)
            nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_in))
            nn.init.zeros_(cast(Tensor, layer.bias))
