"""Rollouts that are no surer than they should be.

A rollout tells one course of events of many. After some ten frames balls are seldom where it has
them, and then its cross-entropy tells how sure of that it is. Hedged, a predicted frame is mixed
with the mean picture. How much of it is taken, its trust, depends on how far ahead it is and on
nothing else, and is found on validation clips, for each model its own. The error that is left tells
how much a rollout knows beyond the mean picture, which it cannot be much worse than.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.experiments.rollouts import roll_out
from scoff.models.video import VideoModel

# from 0.002 to 0.9999, finer towards both ends
TRUSTS = torch.linspace(-6, 9, 31).sigmoid().tolist()


class Hedge(NamedTuple):
    mean: Tensor  # [1, height, width], how often each pixel is lit
    trust: Tensor  # [H], at each horizon

    def errors(self, told: Tensor, true: Tensor) -> Tensor:
        """Mean over pixels, in nats  [N, H, 1, height, width] both -> [N, H]"""
        trust = self.trust[:, None, None, None]
        # each by itself, for 1 less a small number is 1
        lit, dark = torch.lerp(self.mean, told, trust), torch.lerp(1 - self.mean, 1 - told, trust)
        return -(true * lit.log() + (1 - true) * dark.log()).mean((2, 3, 4))


@torch.no_grad()
def fit_hedge(model: VideoModel, parts: Sequence[Tensor], context: int) -> Hedge:
    """`parts`: validation clips, as many at a time as fit into memory  [N, T, 1, height, width]"""
    lit = torch.stack([frames[:, context:].mean((0, 1)) * len(frames) for frames in parts])
    clips, horizons = sum(map(len, parts)), parts[0].shape[1] - context
    least = 1 / (clips * horizons)  # of a pixel that was never seen lit
    mean = (lit.sum(0) / clips).clamp(least, 1 - least)
    candidates = [Hedge(mean, mean.new_full((horizons,), trust)) for trust in TRUSTS]
    errors = mean.new_zeros(len(candidates), horizons, dtype=torch.float64)
    for frames in parts:
        told = roll_out(model, frames, context).frames
        for total, hedge in zip(errors, candidates, strict=True):
            total += hedge.errors(told, frames[:, context:]).sum(0)
    return Hedge(mean, mean.new_tensor(TRUSTS)[errors.argmin(0)])
