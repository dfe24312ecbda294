"""Which samples are in a batch, as a function of the step: a run resumes at any step alike."""

import hashlib
import json
from functools import lru_cache

import torch
from torch import Tensor

from scoff.nn.checks import check_divides, check_size
from scoff.worlds.random import words


def seed_for(*parts: int | str) -> int:
    """A seed of 63 bits that depends on all parts and on nothing else (`hash` would: it is salted).

    Different purposes get unrelated numbers: `seed_for(seed, "data")`, `seed_for(seed, "weights")`.
    """
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def batch_indices(
    seed: int,
    step: int,
    batch_size: int,
    size: int | None,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Tensor:
    """The samples of one step, on the CPU  [batch_size / world_size] int64

    Each epoch visits all `size` samples once, in an order of its own. Epochs follow each other
    without a gap, so a batch may end one and start the next. `size=None` never repeats a sample.
    The ranks hold consecutive slices of the batch: together they have what one process would.
    """
    check_size("step", step, least=0)
    check_size("batch_size", batch_size)
    check_size("world_size", world_size)
    check_divides("batch_size", batch_size, "world_size", world_size)
    check_size("rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(f"rank: got {rank}, wants less than world_size = {world_size}")
    share = batch_size // world_size
    position = step * batch_size + rank * share
    stop = position + share
    if size is None:
        return torch.arange(position, stop)
    check_size("size", size)
    parts = []
    while position < stop:
        epoch, place = divmod(position, size)
        parts.append(_order(seed, epoch, size)[place : place + stop - position])
        position += len(parts[-1])
    return torch.cat(parts)  # a copy: the caller may write into it


# a batch may need two epochs, and a second sampler (of another size, say) two of its own
@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> Tensor:
    """The samples in the order of one epoch  [size] int64"""
    # Sorting by numbers of our own: torch promises no torch.randperm that outlasts its release.
    high, low = words(seed_for(seed, "epoch", epoch), 0, torch.arange(size), 2).unbind(1)
    # 63 bits that all but never tie; where they do, `stable` says who goes first
    return (high << 31 | low >> 1).argsort(stable=True)
