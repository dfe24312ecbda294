"""SCOFF in two Triton kernels, which run all steps of a sequence without leaving the GPU.

Forward, the states and the choices are kept, and where processors are all busy, of the last steps,
all that is needed. Backward, in a few chunks of steps, one launch computes again from the states
what happened at all steps of a chunk at once, one runs them back, and every weight gradient is a
large product of what they wrote.
"""

import functools
import math

import torch

from scoff.ops.exporting import refuse_second_derivatives
from scoff.ops.scoff.fused_gradients import run_back
from scoff.ops.scoff.fused_launch import (
    allocate_kept,
    allocate_packed,
    allocate_ran,
    describe,
    launch_forward,
    pack,
)
from scoff.ops.scoff.fused_layout import chunks_of, memory_of, plan_for, spread
from scoff.ops.scoff.fused_types import (
    DIFFERENTIABLE,
    Kept,
    Prepared,
    Ran,
    Settings,
    exact,
    power_of_two,
    run_of,
    tensors_of,
)
from scoff.ops.scoff.launch import FEWEST_POSITIONS, is_plain, why_no_kernels
from scoff.ops.scoff.precision import multiplied_in, precision_of
from scoff.ops.scoff.replay import Replay
from scoff.ops.scoff.types import Inputs, Options, Run, Weights, contiguous, returns

MAX_FILES = 64
MAX_SIZE = 128  # of an object file: a gate's weights are in shared memory
MAX_VALUE = 256  # of what it reads
MAX_COMM_SIZE = 256  # of all heads' keys, or values, of the communication
H200_MEMORY = 227 * 1024  # bytes of shared memory, where it is not known
MAX_FEATURES = 256  # of an input that is read as it is; more are projected beforehand
FEW_POSITIONS = 32  # that are looked at all at once


def why_not(inputs: Inputs, w: Weights) -> str | None:
    """Why the kernels cannot do this; None: they can."""
    files, size = inputs.state.shape[2:]
    talk = w.communication
    if (reason := why_no_kernels(inputs.x)) is not None:
        return reason
    heads, features, read = len(w.input_query), inputs.x.shape[-1], w.weight_ih.shape[-1]
    comm_heads = comm_size = 0
    if talk is not None:
        comm_heads = len(talk.query)
        comm_size = comm_heads * max(talk.query.shape[1], talk.value.shape[1])
    limits = [
        ("object files", files, MAX_FILES),
        ("numbers in an object file", size, MAX_SIZE),
        ("numbers that an object file reads", read, MAX_VALUE),
        ("numbers in keys or values of the communication", comm_size, MAX_COMM_SIZE),
    ]
    in_half, projected = precision_of(inputs.x.dtype) == "tf32", is_projected(inputs, w)
    # torch's compiler does not like to see a cache
    least_of = least_memory if torch.compiler.is_compiling() else known_least_memory
    few = inputs.x.shape[2] <= FEW_POSITIONS
    given = (files, size, heads, features, read, projected, comm_heads, comm_size, few, in_half)
    memory = memory_of(inputs.x.device) or H200_MEMORY
    limits.append(("bytes of shared memory", least_of(*given), memory))
    for what, got, most in limits:
        if got > most:
            return f"{got} {what} are more than {most}"
    return None


def least_memory(
    files: int,
    size: int,
    heads: int,
    features: int,
    read: int,
    projected: bool,
    comm_heads: int,
    comm_size: int,
    few_positions: bool,
    in_half: bool,
) -> int:
    """Bytes of shared memory without which the kernels do not compile, although no weights stay or
    are on their way, and few positions are read at once; found by compiling them"""
    itemsize = 2 if in_half else 4
    columns, state = power_of_two(files, 8), power_of_two(size, 64)
    key = power_of_two(size if features > MAX_FEATURES else features, 64)
    seen = power_of_two(read // heads, 64) if projected else key
    read = power_of_two(read, 64)
    # gradients of what is seen, and asked: for several blocks of positions they stay
    shared = read if heads > 1 else 0
    found = [4 * (seen * (3 * columns + 2 * FEWEST_POSITIONS) + shared * columns)]
    if few_positions:
        found = [min(*found, 8 * columns * (seen + shared + FEW_POSITIONS))]
    if heads > 1 or seen > read:  # the matrix in between, its factor, and keys, twice
        found.append(4 * (read * seen + 2 * FEWEST_POSITIONS * key) + 2 * read * columns)
    else:
        read = seen
    # weights and their factors: of a gate, both that of the state and that of what is read
    rows = state if in_half else 64
    found.append(itemsize * (rows + columns) * (read + state))
    found.append(itemsize * max(state, key) * (state + columns))
    if comm_heads:
        found.append(itemsize * power_of_two(comm_size, 64) * (state + columns))
        found.append(12 * spread(files, comm_heads, comm_size))
    return max(found)


known_least_memory = functools.cache(least_memory)


def is_projected(inputs: Inputs, w: Weights) -> bool:
    """Whether values are made beforehand, of all positions"""
    masked = inputs.value_mask is not None
    heads_share = w.input_value is None and len(w.input_query) > 1
    return inputs.x.shape[-1] > MAX_FEATURES or masked or heads_share


def scoff_fused(inputs: Inputs, w: Weights, options: Options) -> Run:
    """All of `Run` but the details, which are empty: `batched` gives those."""
    settings = Settings(
        options.cell == "lstm",
        options.active,
        options.reduction == "mean",
        precision_of(inputs.x.dtype),
        options.detach_input_query,
    )
    p = prepare(inputs, w)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in p)
    ran = Ran(*_Fused.apply(*p, *settings, 1 / options.temperature, keep))
    return run_of(ran.output, ran.final, ran.choice, ran.active, inputs.x)


def prepare(inputs: Inputs, w: Weights) -> Prepared:
    """As the kernels like it, differentiably"""
    x, size = inputs.x, inputs.state.shape[3]
    heads, width = w.input_query.shape[0], w.weight_ih.shape[-1]
    talk = w.communication
    query, key = w.input_query, w.input_key
    keys, values, value = x, None, w.input_value
    if x.shape[-1] > MAX_FEATURES:  # q . kappa = h . (W^qT W^e a): keys in the space of the state
        scaled = torch.bmm(key.mT, query) / math.sqrt(key.shape[1])
        keys = torch.einsum("tbpc,hcd->tbphd", x, scaled).flatten(3)
        query = torch.eye(size, dtype=x.dtype, device=x.device).repeat(heads, 1, 1)
        key = None
    if is_projected(inputs, w):
        values = x if value is None else x @ value.T
        if inputs.value_mask is not None:
            values = values * inputs.value_mask
        value = None
        if heads > 1:  # what each has seen is a part of z
            value = torch.eye(width // heads, dtype=x.dtype, device=x.device).repeat(heads, 1)
    return Prepared(
        keys=keys.contiguous(),
        values=contiguous(values),
        state=inputs.state.contiguous(),
        restart=contiguous(inputs.restart),
        schema_query=w.schema_query.contiguous(),
        schema_key=w.schema_key.contiguous(),
        input_query=query.contiguous(),
        input_key=contiguous(key),
        value=contiguous(value),
        weight_ih=w.weight_ih.contiguous(),
        weight_hh=w.weight_hh.contiguous(),
        bias_ih=contiguous(w.bias_ih),
        bias_hh=contiguous(w.bias_hh),
        comm_query=None if talk is None else talk.query.contiguous(),
        comm_key=None if talk is None else talk.key.contiguous(),
        comm_value=None if talk is None else talk.value.contiguous(),
        comm_out=None if talk is None else talk.out.contiguous(),
        comm_gate=None if talk is None else contiguous(talk.gate),
        comm_bias=None if talk is None else contiguous(talk.gate_bias),
        reset=contiguous(inputs.reset),
        valid=contiguous(inputs.valid),
        noise=contiguous(inputs.noise),
        comm_mask=contiguous(inputs.comm_mask),
        choice=contiguous(inputs.choice),
    )


# --- the operators

_SETTINGS = "bool lstm, int active, bool mean, str precision, bool detach"
_PREPARED, _RAN = tensors_of(Prepared), tensors_of(Ran, "ran_")
_N, _M, _R, _G = (len(x) for x in (Prepared._fields, Settings._fields, Ran._fields, DIFFERENTIABLE))


def _run_forward(*args):
    """`Ran`, the weights as the kernels read them, and, if the last argument says so, what is kept
    of the last steps"""
    *given, keep = args
    p, settings = Prepared(*given[:_N]), Settings(*given[_N:])
    plan = plan_for(p, settings)
    ran, packed, kept = allocate_ran(p, settings), allocate_packed(p, plan), None
    if keep and (chunks := chunks_of(p, plan)).times == 1:
        kept = allocate_kept(p, plan, chunks.steps)
    # triton launches on the current device
    with torch.cuda.device_of(p.state), multiplied_in(settings.precision, p.state):
        pack(p, plan, packed)
        launch_forward(p, plan, describe(plan, packed, turned=False), ran, kept)
    return *ran, packed, *(kept or ())


_forward = torch.library.custom_op(
    "scoff::fused_forward",
    lambda *args: _run_forward(*args, False),
    mutates_args=(),
    schema=f"({_PREPARED}, {_SETTINGS}) -> {returns(_R + 1)}",
)


@_forward.register_fake
def _(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N:])
    # how many positions there are, which a compiler may not know, does not matter to the weights
    plan = plan_for(p._replace(keys=p.keys.narrow(2, 0, 1)), settings)
    return *allocate_ran(p, settings), allocate_packed(p, plan)


def _run_backward(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N : _N + _M])
    coldness, packed, *ran = args[_N + _M : _N + _M + 2 + _R]
    d_output, d_final, *kept = args[_N + _M + 2 + _R :]
    given = Kept(*kept) if kept else None
    with torch.cuda.device_of(p.state), multiplied_in(settings.precision, p.state):
        found = run_back(p, settings, coldness, packed, Ran(*ran), d_output, d_final, given)
    return tuple(found[name] if name in found else p.state.new_empty(0) for name in DIFFERENTIABLE)


_backward = torch.library.custom_op(
    "scoff::fused_backward",
    _run_backward,
    mutates_args=(),
    schema=f"({_PREPARED}, {_SETTINGS}, Tensor coldness, Tensor packed, {_RAN}, "
    f"Tensor d_output, Tensor? d_final) -> {returns(_G)}",
)


refuse_second_derivatives(_backward)


@_backward.register_fake
def _(*args):
    wanted = args[:_G]
    return tuple(args[2].new_empty(0) if x is None else torch.empty_like(x) for x in wanted)


_WEIGHTS = range(*map(Prepared._fields.index, ("schema_query", "reset")))
_replayed_forward = Replay(_run_forward, stay=_WEIGHTS)
_replayed_backward = Replay(_run_backward, stay=_WEIGHTS, together=True)


class _Fused(torch.autograd.Function):
    # torch.library.register_autograd takes half a millisecond for as many arguments

    @staticmethod
    def forward(ctx, *args):
        *given, coldness, keep = args
        found = _replayed_forward(*given, keep) if is_plain(given[0]) else _forward(*given)
        ran, packed, kept = Ran(*found[:_R]), found[_R], found[_R + 1 :]
        ctx.settings, ctx.coldness, ctx.kept_is_fresh = given[_N:], coldness, True
        ctx.save_for_backward(*given[:_N], packed, *ran._replace(final=ran.choice), *kept)
        ctx.mark_non_differentiable(ran.cells, ran.choice, ran.active)
        ctx.set_materialize_grads(False)
        return tuple(ran)

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, (d_output, d_final, *_) = ctx.saved_tensors, gradients
        p, ran = Prepared(*saved[:_N]), Ran(*saved[_N + 1 : _N + 1 + _R])
        d_output = torch.zeros_like(ran.output) if d_output is None else d_output.contiguous()
        # a number would be a constant of what is replayed
        coldness = d_output.new_full((1,), ctx.coldness, dtype=exact(d_output))
        given = (*p, *ctx.settings, coldness, saved[_N], *ran, d_output, contiguous(d_final))
        if is_plain(d_output):
            if ctx.kept_is_fresh:  # it is overwritten, should there be another backward pass
                given += saved[_N + 1 + _R :]
                ctx.kept_is_fresh = False
            # not views: what is done to one in place is no concern of the others
            found = [g.data for g in _replayed_backward(*given)]
        else:
            found = _backward(*given)
        wanted = [g if x is not None else None for g, x in zip(found, p[:_G], strict=True)]
        return *wanted, *([None] * (_N - _G + _M + 2))
