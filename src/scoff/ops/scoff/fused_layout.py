"""How the work of the `fused` backend is cut: into programs, blocks and chunks of steps."""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from scoff.ops.scoff.fused_types import (
    Fields,
    Prepared,
    Settings,
    Sizes,
    exact,
    fields_of,
    power_of_two,
    sizes_of,
    value_folds,
)
from scoff.ops.scoff.kernels.shape import Shape
from scoff.ops.scoff.types import epsilon

PACKED_AT_ONCE = 1024
SCRATCH = 28 * 1024  # bytes of shared memory that the forward kernel needs beside all weights
LITTLE_SCRATCH = 2 * 1024  # and beside those that are asked and said, and on their way
OUTPUTS = 3.5  # what is kept may take as much as so many outputs, or as the input
FEWEST = 4  # chunks, of which two things are done at once


class Plan(NamedTuple):
    """All that decides how the kernels are compiled."""

    sizes: Sizes
    settings: Settings
    fields: Fields
    folds: bool  # whether weight_ih @ value is multiplied out
    key_row: int
    value_row: int | None
    dtype: torch.dtype
    packed: torch.dtype  # of the weights, as the kernels read them


def plan_for(p: Prepared, settings: Settings) -> Plan:
    folds, whole = value_folds(p), exact(p.state)
    z = sizes_of(p, folds)
    seen = settings.mean or (p.value is not None and not folds)
    return Plan(
        z,
        settings,
        fields_of(z, settings.mean, seen),
        folds,
        p.keys.shape[3],
        None if p.values is None else p.values.shape[3],
        p.keys.dtype,
        # numbers of 16 bits have as many digits as tf32, and take half as long to read
        torch.float16 if settings.precision == "tf32" and whole != torch.float64 else whole,
    )


# --- programs


class GPU(NamedTuple):
    processors: int  # up to as many sequences, each has one of its own
    memory: int  # bytes of shared memory that one program may have


properties_of = functools.cache(torch.cuda.get_device_properties)  # which takes its time


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    if device.type != "cuda":  # interpreted: as if it were an H200
        return GPU(132, 0)
    return GPU(properties_of(device).multi_processor_count, memory_of(device))


def memory_of(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; 0: unknown"""
    # torch's compiler sees through a cache of a function of its own, not of others
    found = properties_of(device) if device.type == "cuda" else None
    return getattr(found, "shared_memory_per_block_optin", 0)


class Layout(NamedTuple):
    sequences: int  # of a program
    columns: int  # their object files, padded
    rows: int  # of a block of a gate's weights
    positions: int  # of a block of the input
    warps: int
    stages: int  # blocks of weights in flight
    hold: int  # weights that stay in shared memory: see `held`


def gate_rows(z: Sizes, packed: torch.dtype) -> int:
    """Of 16 bits, all; of 32, half of them, so that more blocks are on their way"""
    return power_of_two(z.size, 64) if packed == torch.float16 else 64


def lay_out(plan: Plan, kernel: str, batch: int, gpu: GPU) -> Layout:
    z = plan.sizes
    columns = power_of_two(z.files, 8)
    sequences = columns // z.files
    if kernel != "recompute":
        sequences = max(1, min(sequences, -(-batch // gpu.processors)))
    # a program with a processor of its own has more space
    alone = -(-batch // sequences) <= gpu.processors
    return Layout(
        sequences,
        columns,
        gate_rows(z, plan.packed),
        positions=max(16, min(64, power_of_two(sequences * z.positions))),
        warps=4,
        stages=4 if kernel == "backward" and batch <= gpu.processors else 3,
        hold=held(plan, gpu.memory) if kernel == "forward" and alone else 0,
    )


def held(plan: Plan, memory: int) -> int:
    """Which weights stay in shared memory, of as many bytes, all through the forward pass: 0, none;
    1, what the state asks, and what is said; 2, all. The others are read at each step."""
    # others, or in products with more than 8 columns, would be held in registers, and spilled
    if plan.packed != torch.float16 or plan.sizes.files > 8 or plan.sizes.heads > 1:
        return 0
    asks, weight_ih, weight_hh, reads, says, *_ = packing_of(plan).numels
    size = plan.packed.itemsize
    if size * (asks + weight_ih + weight_hh + reads + says) <= memory - SCRATCH:
        return 2
    gates = plan.sizes.schemata * (4 if plan.settings.lstm else 3)
    on_their_way = 2 * (weight_ih + weight_hh) // gates
    return int(size * (asks + says + on_their_way) <= memory - LITTLE_SCRATCH)


def cut(plan: Plan, kernel: str, batch: int, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Into how many programs, and how"""
    return cut_for(plan, kernel, batch, gpu_of(device))


@functools.lru_cache(1024)  # of numbers of sequences there may be very many
def cut_for(plan: Plan, kernel: str, batch: int, gpu: GPU) -> tuple[int, dict[str, Any]]:
    layout = lay_out(plan, kernel, batch, gpu)
    return -(-batch // layout.sequences), constants(plan, kernel, layout)


def turns_of(programs: int, device: torch.device) -> int:
    """That each takes, where there are more than two to a processor"""
    return -(-programs // (2 * gpu_of(device).processors))


@functools.cache
def constants(plan: Plan, kernel: str, layout: Layout) -> dict[str, Any]:
    """The compile-time arguments of one of the two large kernels"""
    z, settings = plan.sizes, plan.settings
    at = {name.upper(): start for name, start in plan.fields._asdict().items()}
    del at["GATES"]  # are first
    value_row = plan.key_row if plan.value_row is None else plan.value_row
    heads = power_of_two(max(1, z.comm_heads), 1)
    shape = Shape(
        comm_scale=1 / math.sqrt(z.comm_key),
        epsilon=epsilon(plan.dtype),
        **dict(zip("FDPACWVSHEU", z[:-1], strict=True)),
        KEY_ROW=plan.key_row,
        KEY_HEAD=0 if plan.key_row == z.key else z.key,
        VALUE_ROW=value_row,
        VALUE_HEAD=0 if value_row == z.seen else z.seen,
        SHARED=plan.value_row is None,
        SAYS=z.says // z.size,
        KEPT=at.pop("END"),
        **at,
        ACTIVE=settings.active,
        MEAN=settings.mean,
        LSTM=settings.lstm,
        DETACH=settings.detach,
        HOLD=layout.hold,
        SINGLE=kernel == "recompute",
        SEQUENCES=layout.sequences,
        R=layout.columns,
        **padded(z),
        CP=power_of_two(z.key, 64),
        WP=power_of_two(z.seen, 64),
        HP=heads,
        SP=power_of_two(z.schemata, 1),
        ROWS=layout.rows,
        RC=talk_columns(heads, layout.columns),
        PB=layout.positions,
        STAGES=layout.stages,
        ACC=accumulator(plan.dtype),
        PRECISION=settings.precision,
    )
    return {"shape": shape, "num_warps": layout.warps}


def padded(z: Sizes) -> dict[str, int]:
    """Rows and columns of the weights: of the state, of what it reads, asks and says"""
    return {
        "DP": power_of_two(z.size, 64),
        "VP": power_of_two(z.value, 64),
        "AP": power_of_two(max(z.size, z.key), 64),
        "TP": power_of_two(z.comm_heads * max(z.comm_key, z.comm_value), 64) if z.says else 0,
    }


def talk_columns(heads: int, columns: int) -> int:
    """Of the communication, whose products want 16 with those of all heads"""
    return max(16 // heads, columns)


def spread(files: int, heads: int, width: int) -> int:
    """How many numbers there are in what a program's object files tell each other, of all heads,
    when it is spread for products"""
    heads = power_of_two(heads, 1)
    return power_of_two(width, 64) * heads * talk_columns(heads, power_of_two(files, 8))


def accumulator(dtype: torch.dtype) -> triton.language.dtype:
    double = dtype == torch.float64  # in tests: the interpreter has it
    return triton.language.float64 if double else triton.language.float32


# --- the weights


class Stack(NamedTuple):
    """Matrices of one kind, one below the other, and the blocks in which they are read"""

    shape: tuple[int, int]
    block: tuple[int, int]

    def describe(self, packed: Tensor) -> TensorDescriptor | None:
        """For the copy engine, which needs no registers for addresses"""
        if packed.numel() == 0:
            return None
        return TensorDescriptor(packed, [*self.shape], [self.shape[1], 1], [*self.block])


class Packing(NamedTuple):
    """What the state asks, weight_ih, weight_hh, what is read of others and said to them; then the
    same transposed"""

    stacks: list[Stack]
    numels: list[int]
    constants: dict[str, Any]  # of the kernel that packs them


@functools.cache
def packing_of(plan: Plan) -> Packing:
    z = plan.sizes
    gates, says = z.schemata * (4 if plan.settings.lstm else 3), z.says // z.size
    rows = gate_rows(z, plan.packed)
    d, v, a, t = padded(z).values()
    # how many, of how many rows and columns, of which so many rows are read at once
    kinds = [
        (1 + z.heads, (a, d), a),
        (gates, (d, v), rows),
        (gates, (d, d), rows),
        (3, (t, d), t),
        (says, (d, t), d),
    ]
    stacks = [Stack((n * r, c), (b, c)) for n, (r, c), b in kinds]
    stacks += [Stack((n * c, r), (c, b)) for n, (r, c), b in kinds]
    sizes = {"SG": gates, "D": z.size, "V": z.value, "A": z.heads, "C": z.key}
    sizes |= {"HE": z.comm_heads * z.comm_key, "HU": z.heard, "SAYS": says, **padded(z)}
    rest = {"ACC": accumulator(plan.dtype), "PRECISION": plan.settings.precision}
    return Packing(
        stacks,
        [math.prod(s.shape) for s in stacks],
        {**sizes, "BLOCK": PACKED_AT_ONCE, **rest},
    )


# --- steps


class Chunks(NamedTuple):
    """Of how many steps the backward pass keeps what it needs, and how often"""

    steps: int
    times: int


def chunks_of(p: Prepared, plan: Plan) -> Chunks:
    """More take more memory and less time. Sequences that leave processors idle have two: while one
    chunk is run back, the next is computed again and the last is summed. Others have one, and that
    of the last steps is filled by the forward pass."""
    steps, (b, f, d) = p.keys.shape[0], p.state.shape[1:]
    device, whole = p.state.device, exact(p.keys).itemsize
    programs, _ = cut(plan, "backward", b, device)
    times = 2 if programs <= gpu_of(device).processors else 1
    most = max(p.keys.numel() * p.keys.element_size(), int(OUTPUTS * steps * b * f * d * whole))
    fit = most // (times * b * f * plan.fields.end * whole)
    if times == 2:  # something has to be left to do beside
        fit = min(fit, -(-steps // FEWEST))
    fit = max(1, fit)
    return Chunks(-(-steps // -(-steps // fit)), times)
