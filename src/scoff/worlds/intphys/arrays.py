"""The few operations that NumPy and PyTorch name differently.

The ray caster is written once, for arrays of either. It uses only + - * / and roots, comparisons
and integers: IEEE 754 and two's complement define these to the last bit, so that both libraries, on
every device, give the same pixels. Two things of PyTorch must be kept out for that: dividing by a
Python number, which on a GPU multiplies by the inverse, and sums over an axis, whose order is free.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # np.ndarray or Tensor; functions take all of one kind, and give that kind


def namespace(array: Array) -> Any:
    return torch if isinstance(array, Tensor) else np


def nonzero(flags: Array) -> Array:
    """Where a vector is true  [N] bool -> [M] int64"""
    return flags.nonzero()[:, 0] if isinstance(flags, Tensor) else np.flatnonzero(flags)


def whole(values: Array) -> Array:
    """Rounded down, as int32"""
    if isinstance(values, Tensor):
        return values.floor().to(torch.int32)
    return np.floor(values).astype(np.int32)


def real(values: Array) -> Array:
    """As float32"""
    return values.float() if isinstance(values, Tensor) else values.astype(np.float32)


def byte(values: Array) -> Array:
    """Cut to uint8"""
    return values.to(torch.uint8) if isinstance(values, Tensor) else values.astype(np.uint8)


def full(like: Array, shape: tuple[int, ...], value: float, kind: str = "float32") -> Array:
    if isinstance(like, Tensor):
        return torch.full(shape, value, dtype=getattr(torch, kind), device=like.device)
    return np.full(shape, value, kind)


def count(like: Array, size: int) -> Array:
    """0, 1, ... size - 1, beside another array"""
    if isinstance(like, Tensor):
        return torch.arange(size, device=like.device)
    return np.arange(size)


def as_numpy(values: Array) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, Tensor) else values
