"""Means that wait for the device only when someone asks."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Means:
    """Means of named numbers, summed up on the device until someone asks."""

    def __init__(self, names: tuple[str, ...], device: torch.device):
        self.names = names
        self.sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, values: Mapping[str, Tensor], where: Tensor | None = None) -> None:
        """A number for each name, or [N] of them, of which those `where` [N] bool count."""
        rows = torch.stack([values[name].detach() for name in self.names])
        if where is None:
            self.sums += rows
            self.count += 1
        else:
            self.sums += rows.masked_fill(~where, 0).sum(1)
            self.count += where.sum()

    def glance(self, name: str) -> Tensor:
        """A mean so far, on the device; nan, if there was nothing"""
        return self.sums[self.names.index(name)] / self.count

    def read(self) -> dict[str, float]:
        """Waits for the device, and starts anew. Nothing, if there was nothing."""
        count = self.count.item()
        if count == 0:
            return {}
        means = (self.sums / count).tolist()
        self.sums.zero_()
        self.count.zero_()
        return dict(zip(self.names, means, strict=True))
