"""The least time that SCOFF's forward and backward pass could take on a device.

The largest of three: the bytes that must move over the bandwidth, the operations of Algorithm 1
over the rate, and the steps, there and back, times the latency of one dependent step. What the
device can do is measured, not looked up: by a large copy, a large matrix product in the dtype and
precision of the layers, and a chain of small products each of which needs the one before.

Algorithm 1 is counted as it is written. A backend may save operations by algebra, and one that
keeps the whole recurrence in a single kernel may have a latency below that of a launched product.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from scoff.bench.settings import Setting
from scoff.bench.timing import milliseconds
from scoff.nn.scoff_cell import SCOFFCell
from scoff.ops.scoff.precision import multiplied_in, precision_of

LATENCY_WIDTH = 64  # about that of one object file
CHAIN = 1000  # products in the chain
COPIED = {"cuda": 2**30, "cpu": 2**27}  # bytes: far beyond any cache
PRODUCT = {"cuda": 8192, "cpu": 512}  # rows and columns


@dataclass(frozen=True)
class Machine:
    """What a device can do, measured."""

    device: str
    bandwidth: float  # bytes a second
    rate: float  # floating-point operations a second
    latency: float  # seconds of a dependent step

    def __str__(self) -> str:
        return (
            f"measured: copy {self.bandwidth / 1e9:.4g} GB/s, product "
            f"{self.rate / 1e12:.4g} TFLOP/s, dependent step {1e6 * self.latency:.2f} us "
            f"(a vector times {LATENCY_WIDTH} x {LATENCY_WIDTH})"
        )


@dataclass(frozen=True)
class Work:
    """What SCOFF's forward and backward pass must do at least."""

    bytes: int
    operations: int
    steps: int  # each after the one before it


@dataclass(frozen=True)
class Floor:
    """Milliseconds, by what bounds them."""

    bytes: float
    operations: float
    latency: float

    @property
    def ms(self) -> float:
        return max(self.bytes, self.operations, self.latency)


@dataclass(frozen=True)
class WeightReading:
    """What the `fused` backend reads of its weights, measured: a bound of its own, see `weights`"""

    bytes: int  # of a step
    steps: float  # there and back; there, in proportion to the weights that do not stay
    seconds: float  # of a step
    rate: float  # bytes a second of one processor

    @property
    def ms(self) -> float:
        return 1e3 * self.steps * self.seconds


def floor_of(work: Work, machine: Machine) -> Floor:
    return Floor(
        1e3 * work.bytes / machine.bandwidth,
        1e3 * work.operations / machine.rate,
        1e3 * work.steps * machine.latency,
    )


def work_of(setting: Setting, cell: SCOFFCell, dtype: torch.dtype) -> Work:
    s = setting
    tokens = s.batch * s.length
    inputs, outputs = tokens * s.positions * s.input, tokens * s.hidden
    weights = sum(weight.numel() for weight in cell.parameters())
    # the input read and its gradient written, the output written, the weights read
    numbers = 2 * inputs + outputs + weights
    # a multiplication and an addition each; backwards two products for each one forwards
    operations = 2 * 3 * tokens * multiply_adds(setting, cell)
    return Work(numbers * dtype.itemsize, operations, 2 * s.length)


def multiply_adds(setting: Setting, cell: SCOFFCell) -> int:
    """Of one step of one sequence, forwards."""
    files, schemata, positions = setting.object_files, setting.schemata, setting.positions
    w = cell.weights(cell.like.dtype)
    # each weight times the vectors that it is applied to
    projections = (
        files * w.input_query.numel()
        + positions * w.input_key.numel()
        + files * (w.weight_ih.numel() + w.weight_hh.numel())  # those of all schemata
        + files * w.schema_query.numel()
        + files * schemata * w.schema_key.numel()
    )
    if w.input_value is not None:
        projections += positions * w.input_value.numel()
    key, value = w.input_query[..., 0].numel(), w.weight_ih.shape[-1]  # over all heads
    between = files * positions * (key + value)  # scores and sums of the input attention
    # logits of the schemata, and the sum of candidates through which their gradient goes
    between += files * schemata * (w.schema_query.shape[0] + setting.size)
    if (c := w.communication) is not None:
        spoken = (c.query, c.key, c.value, c.out, c.gate)
        projections += files * sum(x.numel() for x in spoken if x is not None)
        between += files * files * (c.query[..., 0].numel() + c.value[..., 0].numel())
    return projections + between


# --- what the device can do


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    return Machine(
        device_name(device),
        measure_bandwidth(device),
        measure_rate(device, dtype),
        measure_latency(device, dtype),
    )


def measure_bandwidth(device: torch.device) -> float:
    """Bytes read and written in a second."""
    size = COPIED[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / fastest(lambda: target.copy_(source), device)


def measure_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations in a second."""
    n = PRODUCT[device.type]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    with multiplied_in(precision_of(dtype), a):  # as the layers multiply
        return 2 * n**3 / fastest(lambda: torch.mm(a, b, out=c), device)


def measure_latency(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of one of many products each of which needs the one before."""
    weight = torch.eye(LATENCY_WIDTH, device=device, dtype=dtype)
    # two vectors in turns, so that no product writes what it reads
    state = torch.ones(2, 1, LATENCY_WIDTH, device=device, dtype=dtype)

    def chain() -> None:
        for step in range(CHAIN):
            torch.mm(state[step % 2], weight, out=state[1 - step % 2])

    if device.type != "cuda":
        return fastest(chain, device) / CHAIN
    chain()  # cuBLAS sets itself up, which cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()  # or the launching would be measured
    with torch.cuda.graph(graph):
        chain()
    return fastest(graph.replay, device) / CHAIN


def fastest(work: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """Seconds of the fastest round: a bound wants the best that the device does."""
    return 1e-3 * min(milliseconds(work, device) for _ in range(rounds))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
