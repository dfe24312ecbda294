"""Launching the kernels of the `fused` backend: how the work is cut, and where it goes."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from scoff.ops.scoff.fused_types import (
    Kept,
    Prepared,
    Ran,
    Settings,
    Sizes,
    exact,
    power_of_two,
    sizes_of,
)
from scoff.ops.scoff.kernels import backward_kernel, forward_kernel, pack_kernel
from scoff.ops.scoff.types import epsilon


class Layout(NamedTuple):
    """How the work is cut."""

    sequences: int  # of a program
    columns: int  # their object files, padded
    rows: int  # of a block of weights
    positions: int  # of a block of the input
    warps: int
    stages: int  # blocks of weights in flight


PROCESSORS = 132  # of an H100 or H200: up to as many sequences, each has one of its own


def lay_out(z: Sizes, batch: int, kernel: str) -> Layout:
    columns = power_of_two(z.files)
    sequences = columns // z.files
    if kernel != "recompute":
        sequences = max(1, min(sequences, -(-batch // PROCESSORS)))
    return Layout(
        sequences,
        columns,
        rows=32 if kernel == "backward" else 64,
        positions=max(16, min(64, power_of_two(sequences * z.positions))),
        warps=4,
        stages=1 if kernel == "recompute" else 3,
    )


_fitting: dict[Any, int] = {}


def launch(kernel: Any, programs: int, arguments: list[Any], shape: dict[str, Any]) -> None:
    """With as many stages as fit into shared memory, at most those of the layout"""
    key = (kernel, *shape.values(), *(getattr(x, "dtype", x is None) for x in arguments))
    most: int = _fitting.get(key) or shape["STAGES"]
    for stages in range(most, 0, -1):
        try:
            kernel[(programs,)](*arguments, **{**shape, "STAGES": stages})
        except triton.OutOfResources:
            if stages == 1:
                raise
        else:
            _fitting[key] = stages
            return


def constants(p: Prepared, z: Sizes, settings: Settings, layout: Layout) -> dict[str, Any]:
    """The kernels' compile-time arguments"""
    values = p.keys if p.values is None else p.values
    key_row, value_row = p.keys.shape[3], values.shape[3]
    return {
        "comm_scale": 1 / math.sqrt(z.comm_key),
        "epsilon": epsilon(p.keys.dtype),
        **dict(zip("FDPACWVSHEU", z, strict=True)),
        "KEY_ROW": key_row,
        "KEY_HEAD": 0 if key_row == z.key else z.key,
        "VALUE_ROW": value_row,
        "VALUE_HEAD": 0 if value_row == z.seen else z.seen,
        "SHARED": p.values is None,
        "WORK": z.schemata * 4 * z.size + z.asked,
        "SAY": 0 if p.comm_say is None else p.comm_say.shape[0],
        "WHAT": max(z.key, z.seen),
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
        "ACC": accumulator(p.state),
        "PRECISION": settings.precision,
        "num_warps": layout.warps,
    }


def aligned(n: int) -> int:
    return -(-n // 8) * 8


def accumulator(x: Tensor) -> triton.language.dtype:
    double = x.dtype == torch.float64  # in tests: the interpreter has it
    return triton.language.float64 if double else triton.language.float32


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

    def with_ones(rows: int, width: int) -> Tensor:
        out = torch.zeros_like(new(rows, aligned(width + 1)))
        out[:, width] = 1
        return out

    def talk(width: int) -> Tensor | None:
        return None if p.comm_say is None else new(rows, width)

    return Kept(
        work=new(rows, z.schemata * 4 * z.size + z.asked),
        look=new(rows, 2, z.heads, z.positions),
        what=new(rows, 2, z.heads, max(z.key, z.seen)),
        mass=new(rows, z.heads),
        seen=new(rows, z.heads, z.seen),
        right=with_ones(rows, z.size + z.value),
        query=new(rows, z.size),
        logits=new(rows, z.schemata),
        updated=new(rows, z.size),
        read=talk(z.read),
        heard=None if p.comm_say is None else with_ones(rows, z.comm_heads * z.comm_value),
        message=talk(0 if p.comm_say is None else p.comm_say.shape[0]),
    )


class Padded(NamedTuple):
    """The weights as the kernels read them: sides as in `constants`, or multiples of 64."""

    from_state: Tensor
    value: Tensor | None
    weight_ih: Tensor
    weight_hh: Tensor
    comm_read: Tensor | None
    comm_say: Tensor | None


def pad(p: Prepared, settings: Settings, transposed: bool) -> Padded:
    whole = exact(p.state)
    half = settings.precision == "tf32" and whole == torch.float32
    packed = torch.float16 if half else whole

    def padded(x: Tensor | None, powers: str, dtype: torch.dtype = packed) -> Any:
        if x is None:
            return None
        rows, columns = (
            power_of_two(n, 64) if how == "p" else -(-n // 64) * 64
            for n, how in zip(x.shape[-2:], powers, strict=True)
        )
        if transposed:
            rows, columns = columns, rows
        out = x.new_empty(*x.shape[:-2], rows, columns, dtype=dtype)
        pack_kernel[(-(-rows * columns // 4096), x[..., 0, 0].numel())](
            x,
            out,
            *x.shape[-2:],
            rows,
            columns,
            TRANSPOSED=transposed,
            BLOCK=4096,
            PRECISION=settings.precision,
        )
        return out

    return Padded(
        padded(p.from_state, "mp"),
        padded(p.value, "pp", whole),
        padded(p.weight_ih, "pp"),
        padded(p.weight_hh, "pp"),
        padded(p.comm_read, "mp"),
        padded(p.comm_say, "mp"),
    )


def described(x: Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    """For the copy engine, which needs no registers for addresses: blocks of a matrix, or of
    several, one below the other"""
    if x is None:
        return None
    return TensorDescriptor.from_tensor(x.flatten(0, -2), [rows, columns])


def launch_forward(
    p: Prepared,
    weights: Padded,
    settings: Settings,
    ran: Ran | None,
    kept: Kept | None,
    active: Tensor | None,
) -> None:
    """Fills `ran`, or `kept` where choices and the active are known."""
    z = sizes_of(p, settings)
    steps, batch = p.keys.shape[:2]
    layout = lay_out(z, batch, "forward" if kept is None else "recompute")
    programs = -(-batch // layout.sequences)
    shape = constants(p, z, settings, layout)
    tried = 1 if p.choice is not None else z.schemata
    each = (2 + 2 * tried) * shape["DP"] + z.asked + z.read + 2 * z.size + 3 * layout.rows
    size = layout.columns * each
    scratch = p.state.new_empty((programs, size), dtype=exact(p.state))
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
        described(weights.from_state, shape["NB"], shape["DP"]),
        weights.value,
        described(weights.weight_ih, shape["NB"], shape["VP"]),
        described(weights.weight_hh, shape["NB"], shape["DP"]),
        p.bias_ih,
        p.bias_hh,
        described(weights.comm_read, shape["NB"], shape["DP"]),
        described(weights.comm_say, shape["NB"], shape["UP"]),
        p.comm_bias,
        *results,
        *([None] * len(Kept._fields) if kept is None else kept),
        scratch,
        steps,
        batch,
    ]
    shape |= {
        "RIGHT": aligned(z.size + z.value + 1),
        "HEARD": aligned(z.comm_heads * z.comm_value + 1),
        "ACTIVE": settings.active,
        "SCRATCH": size,
    }
    launch(forward_kernel, programs, arguments, shape)


def launch_backward(
    p: Prepared,
    weights: Padded,
    settings: Settings,
    before: Tensor,
    ran: Ran,
    kept: Kept,
    d_output: Tensor,
    d_state: Tensor,
    d_restart: Tensor | None,
    d_z: Tensor,
) -> None:
    """Puts gradients into d_z and in the place of what was kept; carries d_state back."""
    z = sizes_of(p, settings)
    steps, batch = p.keys.shape[:2]
    layout = lay_out(z, batch, "backward")
    programs = -(-batch // layout.sequences)
    shape = constants(p, z, settings, layout)
    size = layout.columns * (z.asked + z.read + shape["SAY"])
    arguments = [
        p.keys,
        p.keys if p.values is None else p.values,
        p.reset,
        p.valid,
        p.comm_mask,
        described(weights.from_state, shape["DP"], shape["NB"]),
        weights.value,
        described(weights.weight_ih, shape["VP"], shape["NB"]),
        described(weights.weight_hh, shape["DP"], shape["NB"]),
        described(weights.comm_read, shape["DP"], shape["NB"]),
        described(weights.comm_say, shape["UP"], shape["NB"]),
        before,
        ran.choice,
        ran.active,
        kept.work,
        kept.look,
        kept.what,
        kept.mass,
        kept.seen,
        kept.query,
        kept.logits,
        kept.updated,
        kept.read,
        kept.message,
        d_output,
        d_state,
        d_restart,
        d_z,
        before.new_empty(programs, size),
        steps,
        batch,
    ]
    shape |= {
        "temperature": settings.temperature,
        "SCRATCH": size,
    }
    launch(backward_kernel, programs, arguments, shape)
