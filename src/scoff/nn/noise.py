"""Gumbel noise, by which one of several is drawn as the largest of noisy logits."""

import torch
from torch import Tensor


def gumbel_(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fills x with Gumbel(0, 1) noise: minus the log of an exponential variable,
    kept from 0.

    x should be of single precision at least: half precision has too few numbers for it.
    """
    waits = x.exponential_(generator=generator)
    if not x.is_cuda:  # CUDA draws no 0, and a launch takes a part of a short layer's time
        waits = waits.clamp_(min=torch.finfo(x.dtype).tiny)
    return waits.log_().neg_()
