"""From object files to frames. Axis letters as in `scoff.models.video`."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from scoff.models.likelihoods import Likelihood
from scoff.models.pictures import PAINTERS, keep_scale
from scoff.models.video_options import READOUT_HEADS, VideoOptions
from scoff.nn.checks import check_divides
from scoff.nn.readout import Readout
from scoff.ops.mixture import mix, mix_classes


class Decoded(NamedTuple):
    logits: Tensor
    """[N, T, C, H, W]"""
    masks: Tensor | None
    """[N, T, F, H, W], whose picture is seen where; sum to 1. None without masks."""
    pictures: Tensor | None
    """[N, T, F, C, H, W], what each object file paints, from 0 to 1."""


class Painted(NamedTuple):
    """What a decoder makes: `Decoded`, but its pictures, large and seldom looked at, as logits."""

    logits: Tensor
    """[N, T, C, H, W]"""
    masks: Tensor | None
    """[N, T, F, H, W]"""
    picture_logits: Tensor | None
    """[N, T, F, C, H, W] of what each object file paints"""

    def decoded(self, likelihood: Likelihood) -> Decoded:
        logits, masks, pictures = self
        return Decoded(logits, masks, None if pictures is None else likelihood.frames(pictures))


class MaskedDecoder(nn.Module):
    """Each object file paints a picture and says where it is to be seen."""

    def __init__(self, options: VideoOptions):
        super().__init__()
        o = options
        check_divides("hidden_size", o.hidden_size, "object_files", o.slots)
        self.slots, self.has_classes = o.slots, o.classes > 0
        self.siamese = nn.Sequential(
            nn.Linear(o.hidden_size // o.slots, o.features),
            nn.ReLU(),
            nn.Linear(o.features, o.features),
        )
        self.paint = PAINTERS[o.painter](o.features, o.channels + 1, o.frame_size)
        keep_scale(self)

    def forward(self, output: Tensor) -> Painted:
        """[N, T, hidden_size]"""
        files = self.siamese(output.unflatten(-1, (self.slots, -1)))  # [N, T, F, features]
        painted = self.paint(files.flatten(0, 2)).unflatten(0, files.shape[:3])
        # split, for its gradient is one tensor at once
        pictures, mask_logits = at_least_single(painted).split([painted.shape[-3] - 1, 1], -3)
        mixture = mix_classes if self.has_classes else mix
        logits, masks = mixture(pictures, mask_logits.squeeze(-3))
        return Painted(logits, masks, pictures)


class PooledDecoder(nn.Module):
    """Attention over the object files gives one vector, which is painted."""

    def __init__(self, options: VideoOptions):
        super().__init__()
        o = options
        self.pool = Readout(
            o.hidden_size, o.features, o.slots, features=o.features, num_heads=READOUT_HEADS
        )
        self.paint = PAINTERS[o.painter](o.features, o.channels, o.frame_size)
        keep_scale(self)

    def forward(self, output: Tensor) -> Painted:
        """[N, T, hidden_size]"""
        pooled = self.pool(output)
        painted = self.paint(pooled.flatten(0, 1)).unflatten(0, pooled.shape[:2])
        return Painted(at_least_single(painted), None, None)


def at_least_single(x: Tensor) -> Tensor:
    """Half precision has too few numbers for logarithms of small probabilities."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
