"""Who goes with whom: the best one-to-one match, of many small tables at once."""

import torch
from torch import Tensor

LARGEST = 12  # the smaller side of a table: there are 2**12 sets of so many


def assign(value: Tensor) -> Tensor:
    """For each row the column that makes the sum largest, no column twice  [..., A, B] -> [..., A]

    With more rows than columns some rows get none: -1. It goes through the larger side and keeps
    the best sum for each set of the smaller side's members that are taken. That is exact, and on a
    GPU it waits for nothing.
    """
    rows, columns = value.shape[-2:]
    if min(rows, columns) > LARGEST:
        raise ValueError(f"value: got {rows} by {columns}, wants at most {LARGEST} on one side")
    if rows > columns:
        return _invert(assign(value.mT), rows)
    value = value.double()
    row = torch.arange(rows, device=value.device)
    taken = torch.arange(1 << rows, device=value.device)  # sets of rows, as bits
    without = taken ^ (1 << row)[:, None]  # [rows, sets]
    has = (taken >> row[:, None] & 1).bool()
    best = value.new_full((*value.shape[:-2], len(taken)), -torch.inf)
    best[..., 0] = 0
    choices = []
    for column in value.unbind(-1):
        given = torch.where(has, best[..., without] + column[..., None], -torch.inf)
        # of the rows, or, last, to nobody
        best, choice = torch.cat([given, best[..., None, :]], -2).max(-2)
        choices.append(choice)

    left = torch.full_like(choices[0][..., 0], len(taken) - 1)
    match = torch.full_like(value[..., 0], -1, dtype=torch.int64)
    for column in range(columns - 1, -1, -1):
        to = choices[column].gather(-1, left[..., None])  # [..., 1]
        match = torch.where(row == to, column, match)
        left = torch.where(to[..., 0] < rows, left & ~(1 << to[..., 0]), left)
    return match


def _invert(match: Tensor, size: int) -> Tensor:
    """From the rows of columns to the columns of rows  [..., B] -> [..., size]"""
    row = torch.arange(size, device=match.device)
    is_pair = match[..., None, :] == row[:, None]  # [..., size, B]
    column = torch.arange(match.shape[-1], device=match.device)
    return torch.where(is_pair, column, -1).amax(-1)
