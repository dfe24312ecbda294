"""The least time in which the `fused` backend can read weights, step after step.

Each of its programs reads all weights at each step back, and at each step there those that do not
stay in its shared memory, out of the cache. Here as many programs read as many bytes in the same
way and do nothing else. That bounds this design, not the problem: where all weights stayed with
those who need them, nobody would read them again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from scoff.bench.floor import WeightReading, fastest
from scoff.bench.layers import make_scoff
from scoff.bench.settings import Setting
from scoff.nn.scoff_cell import SCOFFCell
from scoff.ops.scoff import fused
from scoff.ops.scoff.fused_layout import Plan, cut_for, gpu_of, packing_of, plan_for
from scoff.ops.scoff.fused_types import Settings
from scoff.ops.scoff.precision import precision_of
from scoff.ops.scoff.types import Inputs

TURNS = 1000  # so many that the launch does not count
ROWS, COLUMNS = 256, 32  # of a block of 32 KiB: as large as those that the kernels read
STAGES = 4  # three blocks on their way; two programs of a processor have the space for that


@triton.jit(do_not_specialize=["turns"])
def read_kernel(
    words,  # [.., COLUMNS] what lies beyond the last row reads as zero
    sums,  # [programs]
    turns,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program reads all words, turn after turn, and adds them, so that they are needed."""
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    # one loop, so that the first blocks of a turn are on their way when the last one ends
    for i in tl.range(0, turns * BLOCKS, num_stages=STAGES):  # pyright: ignore
        total += words.load([i % BLOCKS * ROWS, 0])
    tl.store(sums + tl.program_id(0), tl.sum(total))


launched: Any = read_kernel  # to a type checker it is a Python function, called in the wrong way


def read(words: Tensor, programs: int, turns: int) -> Tensor:
    """The sum that each program found, modulo 2**32"""
    rows = len(words) // COLUMNS
    described = TensorDescriptor(words, [rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    sums = words.new_empty(programs)
    shape = {"BLOCKS": -(-rows // ROWS), "ROWS": ROWS, "COLUMNS": COLUMNS, "STAGES": STAGES}
    launched[(programs,)](described, sums, turns, **shape, num_warps=8)
    return sums


def measure_reading(
    setting: Setting, device: torch.device, dtype: torch.dtype
) -> WeightReading | None:
    """None: `fused` does not take this setting."""
    plan = plan_of(setting, device, dtype)
    if plan is None:
        return None
    size = bytes_of_a_step(plan)
    words = torch.zeros(size // 4, dtype=torch.int32, device=device)
    gpu = gpu_of(device)
    programs, shape = cut_for(plan, "forward", setting.batch, gpu)  # as many as back
    seconds = fastest(lambda: read(words, programs, TURNS), device) / TURNS
    together = -(-programs // gpu.processors)  # programs of the busiest processor
    steps = setting.length * (2 - share_that_stays(plan, shape["shape"].HOLD))
    return WeightReading(size, steps, seconds, together * size / seconds)


def plan_of(setting: Setting, device: torch.device, dtype: torch.dtype) -> Plan | None:
    (cell,) = make_scoff(setting, "fused", device, dtype).cells
    assert isinstance(cell, SCOFFCell)
    weights = cell.weights(dtype)
    inputs = Inputs(
        weights.weight_hh.new_empty(1, 1, setting.positions, setting.input),
        weights.weight_hh.new_empty(1, 1, setting.object_files, setting.size),
    )
    if fused.why_not(inputs, weights) is not None:
        return None
    lstm, mean = cell.cell == "lstm", cell.input_reduction == "mean"
    settings = Settings(lstm, cell.active_object_files, mean, precision_of(dtype))
    with torch.no_grad():
        return plan_for(fused.prepare(inputs, weights), settings)


def share_that_stays(plan: Plan, hold: int) -> float:
    """Of the weights, in shared memory: none, what is asked and said, or all"""
    asks, weight_ih, weight_hh, reads, says, *_ = packing_of(plan).numels
    stays = (0, asks + says, asks + weight_ih + weight_hh + reads + says)
    return stays[hold] / stays[2]


def bytes_of_a_step(plan: Plan) -> int:
    """One half of what is packed: the way back reads the other, of the same size."""
    return sum(packing_of(plan).numels) // 2 * plan.packed.itemsize
