"""Work beside other work: on a GPU, on a stream of its own."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

Work = Callable[[int], object]


def pipeline(device: torch.device, parts: int, prepare: Work, run: Work, finish: Work) -> None:
    """Prepares, runs and finishes parts of the work, by their numbers, in turn. While one is run,
    the one before it is finished and then the one after it prepared, on a second stream: these may
    share memory with each other, and not with what is run."""
    beside, here, there = nullcontext(), None, None
    if device.type == "cuda":
        here = torch.cuda.current_stream(device)
        there = companion(device, here.cuda_stream)
        beside = torch.cuda.stream(there)
    prepare(0)
    try:
        for n in range(parts):
            # in this order: only a stream that has waited for it is part of what `here` records
            wait(there, here)
            wait(here, there)
            run(n)
            with beside:
                if n > 0:
                    finish(n - 1)
                if n + 1 < parts:
                    prepare(n + 1)
    finally:  # or a recording could not be ended, and memory would be free that is in use
        wait(here, there)
    finish(parts - 1)


def wait(one: Any, other: Any) -> None:
    """What comes next on one stream comes after all that there is on the other so far."""
    if one is not None:
        one.wait_stream(other)


@functools.cache
def companion(device: torch.device, stream: int) -> torch.cuda.Stream:  # noqa: ARG001
    """Not one for all: a stream that is being recorded draws in those that wait for it, and what
    others do on it would be recorded too."""
    return torch.cuda.Stream(device)
