"""The adding task: a sequence of numbers, some of them marked; the target is the sum of those.

Numbers are uniform on [0, 1). With n operands, the sequence is cut into n segments of equal length
and one number in each is marked, so that for n = 2 there is one in either half.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scoff.worlds.random import STREAMS, Split, uniform


class Additions(NamedTuple):
    x: Tensor  # [N, L, 2]: number, marker
    target: Tensor  # [N]
    num_operands: Tensor  # [N] int64

    @property
    def is_operand(self) -> Tensor:
        """[N, L] bool"""
        return self.x[..., 1] > 0


def additions(
    seed: int,
    index: Tensor,
    length: int,
    operands: tuple[int, ...] = (2, 4),
    split: Split = "train",
) -> Additions:
    """The sequences number `index` [N] int64 of the split, on the device of `index`.

    Sequence i has `operands[i % len(operands)]` operands, so that a set holds as many of each.
    """
    if length < 1:
        raise ValueError(f"length: got {length}, wants an integer of at least 1")
    if not operands or min(operands) < 1 or max(operands) > length:
        raise ValueError(f"operands: got {operands}, wants numbers from 1 to length = {length}")
    if split not in STREAMS:
        raise ValueError(f"split: got {split!r}, wants one of {', '.join(map(repr, STREAMS))}")
    most = max(operands)
    draws = uniform(seed, STREAMS[split], index, length + most)
    values, chance = draws.split([length, most], 1)

    num_operands = torch.full_like(index, operands[0])
    for place, n in enumerate(operands[1:], start=1):
        num_operands.masked_fill_(index % len(operands) == place, n)
    segment = torch.arange(most + 1, device=index.device)
    bounds = segment * length // num_operands[:, None]  # [N, n + 1]
    start, width = bounds[:, :-1], bounds.diff()
    # 24 bits times a width never round up to the width itself
    where = start + (chance * width).long()  # [N, n]
    # segments beyond a sequence's own count start at its end: they all mark a column that is cut
    marker = values.new_zeros(len(index), length + 1)
    marker = marker.scatter_(1, where.clamp_(max=length), 1.0)[:, :-1]
    # exact in double precision, and so the same in whatever order a device adds
    target = (values * marker).sum(1, dtype=torch.float64).float()
    return Additions(torch.stack([values, marker], -1), target, num_operands)
