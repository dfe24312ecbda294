"""Where forward and backward go on a GPU: its time and its launches by stage, and the host's time.

One call is profiled; each kernel and each copy that the GPU ran in it belongs to a stage.
"""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from scoff.bench.timing import WARM_UP, Job, profiled

FORWARD, AGAIN, BACK = "forward", "computing again", "running back"
PRODUCTS, GRADIENTS, REST = "products", "weight gradients", "everything else"
OVER_TIME = (FORWARD, BACK)  # those that one kernel takes step after step

# our kernels, in the order in which stages are told
KERNELS = {
    "fused": {
        "pack_kernel": "pack",
        "forward_kernel": FORWARD,
        "backward_kernel": BACK,
        "share_kernel": GRADIENTS,
        "measure_kernel": GRADIENTS,
        "weigh_kernel": GRADIENTS,
    },
    "wide": {
        "update_kernel": "update",
        "look_kernel": "look",
        "talk_kernel": "talk",
        "update_back_kernel": "update, back",
        "look_back_kernel": "look, back",
        "talk_back_kernel": "talk, back",
    },
}
ORDER = {
    "fused": ("pack", FORWARD, AGAIN, BACK, GRADIENTS, REST),
    "wide": (PRODUCTS, *KERNELS["wide"].values(), REST),
}
PRODUCT = re.compile("gemm|gemv|cutlass|cublas|splitk|nvjet|xmma", re.IGNORECASE)


class Launch(NamedTuple):
    """A kernel or a copy, as the GPU ran it"""

    name: str
    ms: float


@dataclass(frozen=True)
class Stage:
    name: str
    ms: float
    launches: int
    us_a_step: float | None = None  # of a kernel that runs over time


@dataclass(frozen=True)
class Stages:
    """Of forward and backward: all, and its parts"""

    host_ms: float  # until the calls return
    gpu_ms: float
    launches: int
    stages: list[Stage]


def measure_stages(job: Job, backend: str, steps: int, rounds: int) -> Stages:
    """Of a job on a GPU"""
    host = host_milliseconds(job.both, rounds)
    launches = launches_of(job.both)
    return Stages(
        host, sum(x.ms for x in launches), len(launches), by_stage(backend, launches, steps)
    )


def by_stage(backend: str, launches: Sequence[Launch], steps: int) -> list[Stage]:
    """The stages that occur. Launches are those of one call, in the order of the GPU."""
    held: dict[str, list[float]] = {}
    for stage, launch in zip(stages_of(backend, [x.name for x in launches]), launches, strict=True):
        held.setdefault(stage, []).append(launch.ms)
    return [
        Stage(name, sum(ms), len(ms), 1e3 * sum(ms) / steps if name in OVER_TIME else None)
        for name in ORDER.get(backend, (PRODUCTS, REST))
        if (ms := held.get(name))
    ]


def stages_of(backend: str, names: Sequence[str]) -> list[str]:
    """The stage of each launch of one call"""
    found: list[str] = []
    kernels = KERNELS.get(backend, {})
    for name in names:
        stage = next((s for kernel, s in kernels.items() if name.startswith(kernel)), None)
        if stage is None:
            stage = PRODUCTS if PRODUCT.search(name) else REST
        if backend == "fused":
            went = FORWARD in found
            # the kernel of the forward pass, which it may launch twice, also computes again, later
            if stage == FORWARD and went and found[-1] != FORWARD:
                stage = AGAIN
            # before the forward pass weights are multiplied with each other
            if stage == PRODUCTS:
                stage = GRADIENTS if went else REST
        found.append(stage)
    return found


def host_milliseconds(work: Callable[[], object], rounds: int) -> float:
    """The median time until the calls return; the GPU is at rest when they begin."""
    times = []
    for _ in range(rounds + WARM_UP):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times[WARM_UP:])


def launches_of(work: Callable[[], object]) -> list[Launch]:
    """What the GPU runs in one call, in its order"""
    events = [
        event
        for event in profiled(work, activities=[ProfilerActivity.CUDA])
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
    events.sort(key=lambda event: event.start_ns())
    return [Launch(event.name(), 1e-6 * event.duration_ns()) for event in events]
