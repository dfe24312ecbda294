"""Numbers for what object files and schemata have to do with what happens in the world."""

import math
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def exactly(
    measure: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """A function of tensors that autocast does not touch: what a model computes may be rounded to
    eight bits, a place in a picture may not."""

    @wraps(measure)
    def with_all_bits(first: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(first.device.type, enabled=False):
            return measure(first, *args, **kwargs)

    return with_all_bits


def entropy(counts: Tensor) -> float:
    """In bits, of the distribution with these counts"""
    shares = counts.double() / counts.sum()
    return float(0 - (shares * shares.clamp(min=1e-300).log2()).sum())  # not -0.0


def mutual_information(counts: Tensor) -> float:
    """In bits, between the row and the column of a table of counts  [A, B]"""
    counts = counts.double()
    total, apart = counts.sum(), counts.sum(1, keepdim=True) * counts.sum(0)
    ratio = torch.where(counts > 0, counts * total / apart, 1.0)  # exactly 1 of a single row
    return max(float((counts / total * ratio.log2()).sum()), 0.0)


def or_none(value: float) -> float | None:
    """As JSON, which has no NaN: None where there was nothing to measure."""
    return None if math.isnan(value) else value


def joint_counts(a: Tensor, b: Tensor, num_a: int, num_b: int) -> Tensor:
    """How often each pair of values occurs  [num_a, num_b]"""
    return torch.bincount((a * num_b + b).flatten(), minlength=num_a * num_b).view(num_a, num_b)
