"""Time and memory of a layer.

A layer takes turns with nn.GRU, so that whatever else the machine does falls on both alike. Times
are medians, and the ratio is the median of the ratios of neighbours.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scoff.ops.scoff.replay import forget

WARM_UP = 3  # rounds that do not count


@dataclass(frozen=True)
class Timing:
    ms: float
    ratio: float  # to nn.GRU
    gru_ms: float  # of nn.GRU in the same turns


class Job:
    """A layer and what it is run on."""

    def __init__(self, layer: nn.Module, x: Tensor):
        self.layer, self.x = layer, x.detach().requires_grad_()
        with torch.no_grad():
            self.d_output = torch.randn_like(layer(x)[0])

    def forward(self) -> None:
        with torch.no_grad():
            self.layer(self.x)

    def both(self) -> None:
        """Forward and backward, the gradients made anew."""
        self.clear()
        self.layer(self.x)[0].backward(self.d_output)

    def clear(self) -> None:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def in_turns(
    ours: Callable[[], object], gru: Callable[[], object], device: torch.device, rounds: int
) -> Timing:
    pairs = [
        (milliseconds(gru, device), milliseconds(ours, device)) for _ in range(rounds + WARM_UP)
    ][WARM_UP:]
    return Timing(
        statistics.median(own for _, own in pairs),
        statistics.median(own / other for other, own in pairs),
        statistics.median(other for other, _ in pairs),
    )


def capture(job: Job) -> torch.cuda.CUDAGraph:
    """Forward and backward as a CUDA graph. It uses the job's tensors: keep the job."""
    # memory from outside is not to be freed inside the capture
    return captured(job.both, before=job.clear)


def captured(
    work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> torch.cuda.CUDAGraph:
    """Any work as a CUDA graph; `before` it is captured, after its warm-up"""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    before()
    graph = torch.cuda.CUDAGraph()
    # a capture that fails may leave its own stream as the current one
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        work()
    return graph


def peak_memory(job: Job) -> float:
    """MiB during forward and backward, beyond what there was before; gradients count."""
    job.both()  # whatever is allocated once
    job.clear()
    if not job.x.is_cuda:
        return peak_on_cpu(job.both)
    forget()  # what is kept from call to call counts too

    def again_and_again() -> None:
        for _ in range(WARM_UP + 2):
            job.both()

    return peak_on_cuda(again_and_again)


def peak_on_cuda(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_on_cpu(work: Callable[[], object]) -> float:
    events = profiled(work, profile_memory=True)
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak / 2**20


def profiled(work: Callable[[], object], **options: Any) -> list[Any]:
    """The profiler's events, as it has them"""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells when it starts and stops
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # CUDA graphs may not outlive it
    # all events are of one cycle; without saying so, it warns that others were dropped
    with torch.profiler.profile(acc_events=True, **options) as profile:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    results: Any = profile.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    return list(results.events())
