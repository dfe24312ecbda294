"""The adding task: a sequence of numbers, some of them marked; the target is the sum of those.

Numbers are uniform on [0, 1]. With n operands, the sequence is cut into n segments of equal length
and one number in each is marked, so that for n = 2 there is one in either half.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Additions(NamedTuple):
    x: Tensor  # [N, L, 2]: number, marker
    target: Tensor  # [N]
    num_operands: Tensor  # [N] int64

    @property
    def is_operand(self) -> Tensor:
        """[N, L] bool"""
        return self.x[..., 1] > 0


def draw_additions(
    num_sequences: int,
    length: int,
    operands: tuple[int, ...] = (2, 4),
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Additions:
    """Sequences whose number of operands is drawn from `operands`, each as likely as the other."""
    if not operands or min(operands) < 1 or max(operands) > length:
        raise ValueError(f"operands: got {operands}, wants numbers from 1 to length = {length}")
    values = torch.rand(num_sequences, length, generator=generator, device=device)
    choice = torch.randint(len(operands), (num_sequences,), generator=generator, device=device)
    count = torch.tensor(operands, device=device)[choice]
    segment = torch.arange(max(operands), device=device)  # [n]
    start = segment * length // count[:, None]
    stop = (segment + 1) * length // count[:, None]
    offset = torch.rand(start.shape, generator=generator, device=device) * (stop - start)
    where = start + offset.long()  # [N, n]
    marked = segment < count[:, None]
    # the slots beyond a sequence's own count all point at a column that is cut off
    where = torch.where(marked, where, length)
    marker = torch.zeros(num_sequences, length + 1, device=device).scatter_(1, where, 1.0)[:, :-1]
    return Additions(torch.stack([values, marker], -1), (values * marker).sum(1), count)
