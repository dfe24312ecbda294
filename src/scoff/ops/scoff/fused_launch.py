"""Launching the kernels of the `fused` backend: how the work is cut, and where it goes."""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from scoff.ops.scoff.fused_types import (
    Kept,
    Prepared,
    Ran,
    Settings,
    Sizes,
    exact,
    fields_of,
    power_of_two,
    sizes_of,
)
from scoff.ops.scoff.kernels import backward_kernel, forward_kernel, pack_kernel
from scoff.ops.scoff.launch import launch
from scoff.ops.scoff.types import epsilon

PROCESSORS = 132  # of an H100 or H200: up to as many sequences, each has one of its own
MOST_PROGRAMS = 2 * PROCESSORS  # that compute single steps again: each has scratch memory


class Layout(NamedTuple):
    """How the work is cut."""

    sequences: int  # of a program
    columns: int  # their object files, padded
    rows: int  # of a block of weights
    gate_rows: int  # of a block of a gate's
    positions: int  # of a block of the input
    warps: int
    stages: int  # blocks of weights in flight


def columns_of(z: Sizes) -> int:
    return power_of_two(z.files, 8)


def block_rows(z: Sizes, packed: torch.dtype) -> int:
    return 128 if packed == torch.float16 and z.size > 64 else 64


def gate_rows(z: Sizes, packed: torch.dtype) -> int:
    """Of 16 bits, all; of 32, half of them, so that more blocks are on their way"""
    return power_of_two(z.size, 64) if packed == torch.float16 else 64


@functools.cache
def lay_out(z: Sizes, batch: int, kernel: str, packed: torch.dtype) -> Layout:
    columns = columns_of(z)
    sequences = columns // z.files
    if kernel != "recompute":
        sequences = max(1, min(sequences, -(-batch // PROCESSORS)))
    return Layout(
        sequences,
        columns,
        block_rows(z, packed),
        gate_rows(z, packed),
        positions=max(16, min(64, power_of_two(sequences * z.positions))),
        warps=4,
        stages=1 if kernel == "recompute" else 3,
    )


@functools.cache
def assembler_takes_halves(device: torch.device) -> bool:
    """Hopper's products of 16-bit numbers, with 16 columns or more, read shared memory that is not
    theirs when assembled by ptxas 12.8 to 13.0, one of which comes with Triton 3.6 to 3.9."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return True
    version = knobs.nvidia.ptxas.version
    return tuple(int(part) for part in version.split(".")[:2]) >= (13, 1)


def packed_type(p: Prepared, settings: Settings) -> torch.dtype:
    """Numbers of 16 bits have as many digits as tf32, and take half as long to read."""
    whole = exact(p.state)
    if settings.precision != "tf32" or whole != torch.float32:
        return whole
    few = columns_of(sizes_of(p, settings)) == 8
    return torch.float16 if few or assembler_takes_halves(p.state.device) else whole


@functools.cache
def constants(
    kernel: str,
    z: Sizes,
    settings: Settings,
    layout: Layout,
    key_row: int,
    value_row: int | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The compile-time arguments of one of the two large kernels"""
    fields = fields_of(z)
    scratch = z.asked + z.read
    if kernel == "backward":
        own = {}
        scratch += z.says
    else:
        own = {
            "RIGHT": fields.right,
            "HEARD": fields.heard,
            "ACTIVE": settings.active,
            "SINGLE": kernel == "recompute",
            "ROWS": layout.gate_rows,
        }
        scratch += 2 * z.size + 3 * layout.rows
    talkers = max(16, layout.columns)
    shared = value_row is None
    if value_row is None:
        value_row = key_row
    return {
        **own,
        "SCRATCH": talkers * scratch,
        "RC": talkers,
        "comm_scale": 1 / math.sqrt(z.comm_key),
        "epsilon": epsilon(dtype),
        **dict(zip("FDPACWVSHEU", z[:-1], strict=True)),
        "KEY_ROW": key_row,
        "KEY_HEAD": 0 if key_row == z.key else z.key,
        "VALUE_ROW": value_row,
        "VALUE_HEAD": 0 if value_row == z.seen else z.seen,
        "SHARED": shared,
        "SAY": z.says,
        "WHAT": max(z.key, z.seen),
        "KEPT": fields.end,
        "MASS": fields.mass,
        "SEEN": fields.seen,
        "LOGITS": fields.logits,
        "UPDATED": fields.updated,
        "READ": fields.read,
        "MESSAGE": fields.message,
        "MEAN": settings.mean,
        "LSTM": settings.lstm,
        "SEQUENCES": layout.sequences,
        "R": layout.columns,
        "DP": power_of_two(z.size, 64),
        "CP": power_of_two(z.key, 64),
        "WP": power_of_two(z.seen, 64),
        "VP": power_of_two(z.value, 64),
        "HP": power_of_two(max(1, z.comm_heads), 1),
        "EP": power_of_two(max(1, z.comm_heads) * z.comm_key, 64),
        "UP": power_of_two(max(1, z.comm_heads) * z.comm_value, 64),
        "SP": power_of_two(z.schemata, 1),
        "NB": layout.rows,
        "PB": layout.positions,
        "STAGES": layout.stages,
        "ACC": accumulator(dtype),
        "PRECISION": settings.precision,
        "num_warps": layout.warps,
    }


def accumulator(dtype: torch.dtype) -> triton.language.dtype:
    double = dtype == torch.float64  # in tests: the interpreter has it
    return triton.language.float64 if double else triton.language.float32


class Matrix(NamedTuple):
    """Padded, somewhere in a tensor of many, and the blocks in which it is read"""

    start: int
    shape: tuple[int, int]
    block: tuple[int, int]

    def describe(self, packed: Tensor) -> TensorDescriptor | None:
        """For the copy engine, which needs no registers for addresses"""
        rows, columns = self.shape
        if rows * columns == 0:
            return None
        part = packed[self.start : self.start + rows * columns]
        return TensorDescriptor(part, [rows, columns], [columns, 1], [*self.block])


class Packing(NamedTuple):
    """Where the kernels find from_state, weight_ih, weight_hh, comm_read and comm_say."""

    upright: list[Matrix]
    turned: list[Matrix]  # transposed
    numel: int
    constants: dict[str, Any]  # of the kernel that packs them


@functools.cache
def packing_of(
    z: Sizes, lstm: bool, precision: str, dtype: torch.dtype, packed: torch.dtype
) -> Packing:
    gates = z.schemata * (4 if lstm else 3)
    d, v = power_of_two(z.size, 64), power_of_two(z.value, 64)
    u = power_of_two(z.heard, 64) if z.says else 0
    x, read, say = (-(-n // 128) * 128 for n in (z.asked, z.read, z.says))
    n, g = block_rows(z, packed), gate_rows(z, packed)
    shapes = [(x, d), (gates * d, v), (gates * d, d), (read, d), (say, u)]
    shapes += [(d, x), (gates * v, d), (gates * d, d), (d, read), (u, say)]
    blocks = [(n, d), (g, v), (g, d), (n, d), (n, u)]
    blocks += [(d, n), (v, n), (d, n), (d, n), (u, n)]
    matrices, numel = [], 0
    for shape, block in zip(shapes, blocks, strict=True):
        matrices.append(Matrix(numel, shape, block))
        numel += shape[0] * shape[1]
    sizes = {"SG": gates, "D": z.size, "V": z.value, "X": z.asked}
    sizes |= {"READ": z.read, "SAY": z.says, "HU": z.heard}
    padded = {"DP": d, "VP": v, "XP": x, "READ_P": read, "SAY_P": say, "UP": u}
    rest = {"BLOCK": 1024, "ACC": accumulator(dtype), "PRECISION": precision}
    return Packing(matrices[:5], matrices[5:], numel, {**sizes, **padded, **rest})


def packing_for(p: Prepared, settings: Settings, packed: torch.dtype) -> Packing:
    z = sizes_of(p, settings)
    return packing_of(z, settings.lstm, settings.precision, p.state.dtype, packed)


def pack(p: Prepared, settings: Settings, out: Tensor) -> None:
    packing = packing_for(p, settings, out.dtype)
    weights = [p.from_state, p.weight_ih, p.weight_hh, p.comm_read, p.comm_say]
    launch(pack_kernel, packing.numel // 1024, [*weights, out], packing.constants)


Described = list[TensorDescriptor | None]


def describe(p: Prepared, settings: Settings, packed: Tensor, turned: bool) -> Described:
    packing = packing_for(p, settings, packed.dtype)
    return [m.describe(packed) for m in (packing.turned if turned else packing.upright)]


def allocate_packed(p: Prepared, settings: Settings) -> Tensor:
    dtype = packed_type(p, settings)
    return p.state.new_empty(packing_for(p, settings, dtype).numel, dtype=dtype)


def allocate_ran(p: Prepared, settings: Settings) -> Ran:
    t, (b, f, d) = p.keys.shape[0], p.state.shape[1:]
    new = p.state.new_empty
    return Ran(
        output=new((t, b, f, d), dtype=exact(p.state)),
        final=new(p.state.shape, dtype=exact(p.state)),
        cells=new((t, b, f, d if settings.lstm else 0), dtype=exact(p.state)),
        choice=new((t, b, f), dtype=torch.int64),
        active=new((t, b, f), dtype=torch.bool),
    )


def allocate_kept(p: Prepared, z: Sizes, rows: int) -> Kept:
    def new(*shape: int) -> Tensor:
        return p.keys.new_empty(shape, dtype=exact(p.keys))

    return Kept(
        rows=new(rows, fields_of(z).end),
        look=new(rows, 2, z.heads, z.positions),
        what=new(rows, 2, z.heads, max(z.key, z.seen)),
    )


def cut(
    p: Prepared, settings: Settings, kernel: str, packed: torch.dtype
) -> tuple[int, dict[str, Any]]:
    """Into how many programs, and how"""
    z, batch = sizes_of(p, settings), p.keys.shape[1]
    layout = lay_out(z, batch, kernel, packed)
    value_row = None if p.values is None else p.values.shape[3]
    fixed = settings._replace(temperature=1.0)  # which is no constant, and may change
    shape = constants(kernel, z, fixed, layout, p.keys.shape[3], value_row, p.keys.dtype)
    return -(-batch // layout.sequences), shape


def launch_forward(
    p: Prepared,
    settings: Settings,
    packed: torch.dtype,
    weights: Described,
    ran: Ran | None,
    kept: Kept | None,
    active: Tensor | None,
) -> None:
    """Fills `ran`; or `kept`, of single steps, where choices and the active are known."""
    kind = "forward" if kept is None else "recompute"
    programs, shape = cut(p, settings, kind, packed)
    turns, batch = p.keys.shape[:2]
    if kept is not None:
        turns = -(-programs // MOST_PROGRAMS)
        programs = -(-programs // turns)
    results: list[Tensor | None] = [None] * 5
    if ran is not None:
        cells = ran.cells if settings.lstm else None
        results = [ran.output, cells, ran.final, ran.choice, ran.active]
    arguments = [
        p.keys,
        p.keys if p.values is None else p.values,
        p.state,
        p.restart,
        p.reset,
        p.valid,
        p.noise,
        p.comm_mask,
        p.choice,
        active,
        p.value,
        *weights[:3],
        p.bias_ih,
        p.bias_hh,
        *weights[3:],
        p.comm_bias,
        *results,
        *((None, None, None) if kept is None else kept),
        p.state.new_empty((programs, shape["SCRATCH"]), dtype=exact(p.state)),
        turns,
        batch,
    ]
    launch(forward_kernel, programs, arguments, shape)


def launch_backward(
    p: Prepared,
    settings: Settings,
    packed: torch.dtype,
    weights: Described,
    before: Tensor,
    ran: Ran,
    kept: Kept,
    d_output: Tensor,
    d_state: Tensor,
    d_restart: Tensor | None,
    d_z: Tensor,
) -> None:
    """Puts gradients into d_z and in the place of what was kept; carries d_state back."""
    programs, shape = cut(p, settings, "backward", packed)
    arguments = [
        p.keys,
        p.keys if p.values is None else p.values,
        p.reset,
        p.valid,
        p.comm_mask,
        p.value,
        *weights,
        before,
        ran.choice,
        ran.active,
        *kept,
        d_output,
        d_state,
        d_restart,
        d_z,
        before.new_empty(programs, shape["SCRATCH"]),
        settings.temperature,
        *p.keys.shape[:2],
    ]
    launch(backward_kernel, programs, arguments, shape)
