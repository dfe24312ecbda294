"""Work beside other work: on a GPU, on a stream of its own."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A stream beside the current one, which has to be followed before it is joined, and joined in
    the end. On a CPU all is done in the order in which it is told."""

    def __init__(self, device: torch.device):
        self.streams = None
        if device.type == "cuda":
            here = torch.cuda.current_stream(device)
            self.streams = here, companion(device, here.cuda_stream)

    def follow(self) -> None:
        """What is done here from now on comes after all that was launched there."""
        if self.streams is not None:
            here, there = self.streams
            there.wait_stream(here)

    def join(self) -> None:
        """What is launched there from now on comes after all that was done here."""
        if self.streams is not None:
            here, there = self.streams
            here.wait_stream(there)

    @contextmanager
    def work(self) -> Iterator[None]:
        if self.streams is None:
            yield
        else:
            with torch.cuda.stream(self.streams[1]):
                yield


@functools.cache
def companion(device: torch.device, stream: int) -> torch.cuda.Stream:  # noqa: ARG001
    """Each stream has one of its own: a stream that is being recorded draws in those that wait for
    it, and others would be recorded with it."""
    return torch.cuda.Stream(device)
