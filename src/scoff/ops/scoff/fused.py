"""SCOFF in two Triton kernels, which run all steps of a sequence without leaving the GPU.

Forward, the states and the choices are kept, and where processors are all busy, of the last steps,
all that is needed. Backward, in a few chunks of steps, one launch computes again from the states
what happened at all steps of a chunk at once, one runs them back, and every weight gradient is a
large product of what they wrote.
"""

import math

import torch

from scoff.ops.scoff.fused_gradients import run_back
from scoff.ops.scoff.fused_launch import (
    allocate_kept,
    allocate_packed,
    allocate_ran,
    chunks_of,
    describe,
    launch_forward,
    pack,
    plan_for,
    spread,
)
from scoff.ops.scoff.fused_types import (
    DIFFERENTIABLE,
    Kept,
    Prepared,
    Ran,
    Settings,
    run_of,
    tensors_of,
)
from scoff.ops.scoff.launch import is_plain, why_no_kernels
from scoff.ops.scoff.precision import multiplied_in, precision_of
from scoff.ops.scoff.replay import Replay
from scoff.ops.scoff.types import Inputs, Options, Run, Weights, contiguous, returns

MAX_FILES = 64
MAX_SIZE = 128  # of an object file: a gate's weights are in shared memory
MAX_VALUE = 256  # of what it reads
MAX_COMM_SIZE = 256  # of all heads' keys, or values, of the communication
MAX_SPREAD = 2**14  # of which the backward kernel takes 14 bytes each of 227 KiB, on an H200
MAX_FEATURES = 256  # of an input that is read as it is; more are projected beforehand


def why_not(inputs: Inputs, w: Weights) -> str | None:
    """Why the kernels cannot do this; None: they can."""
    files, size = inputs.state.shape[2:]
    talk = w.communication
    if (reason := why_no_kernels(inputs.x)) is not None:
        return reason
    limits = [
        ("object files", files, MAX_FILES),
        ("numbers in an object file", size, MAX_SIZE),
        ("numbers that an object file reads", w.weight_ih.shape[-1], MAX_VALUE),
    ]
    if talk is not None:
        heads = talk.query.shape[0]
        wide = heads * max(talk.query.shape[1], talk.value.shape[1])
        limits.append(("numbers in keys or values of the communication", wide, MAX_COMM_SIZE))
        said = "numbers in what object files tell each other, spread over heads and padded,"
        limits.append((said, spread(files, heads, wide), MAX_SPREAD))
    for what, got, most in limits:
        if got > most:
            return f"{got} {what} are more than {most}"
    return None


def scoff_fused(inputs: Inputs, w: Weights, options: Options) -> Run:
    """All of `Run` but the details, which are empty: `batched` gives those."""
    settings = Settings(
        options.cell == "lstm",
        options.active,
        options.reduction == "mean",
        options.temperature,
        precision_of(inputs.x.dtype),
        options.detach_input_query,
    )
    p = prepare(inputs, w)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in p)
    ran = Ran(*_Fused.apply(*p, *settings, keep))
    return run_of(ran.output, ran.final, ran.choice, ran.active, inputs.x)


def prepare(inputs: Inputs, w: Weights) -> Prepared:
    """As the kernels like it, differentiably"""
    x, size = inputs.x, inputs.state.shape[3]
    heads, width = w.input_query.shape[0], w.weight_ih.shape[-1]
    wide = x.shape[-1] > MAX_FEATURES
    talk = w.communication
    query, key = w.input_query, w.input_key
    keys, values, value = x, None, w.input_value
    if wide:  # q . kappa = h . (W^qT W^e a): keys in the space of the state
        scaled = torch.bmm(key.mT, query) / math.sqrt(key.shape[1])
        keys = torch.einsum("tbpc,hcd->tbphd", x, scaled).flatten(3)
        query = torch.eye(size, dtype=x.dtype, device=x.device).repeat(heads, 1, 1)
        key = None
    if wide or inputs.value_mask is not None or (value is None and heads > 1):
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

_SETTINGS = "bool lstm, int active, bool mean, float temperature, str precision, bool detach"
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
    return *allocate_ran(p, settings), allocate_packed(p, plan_for(p, settings))


def _run_backward(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N : _N + _M])
    packed, *ran = args[_N + _M : _N + _M + 1 + _R]
    d_output, d_final, *kept = args[_N + _M + 1 + _R :]
    given = Kept(*kept) if kept else None
    with torch.cuda.device_of(p.state), multiplied_in(settings.precision, p.state):
        found = run_back(p, settings, packed, Ran(*ran), d_output, d_final, given)
    return tuple(found[name] if name in found else p.state.new_empty(0) for name in DIFFERENTIABLE)


_backward = torch.library.custom_op(
    "scoff::fused_backward",
    _run_backward,
    mutates_args=(),
    schema=f"({_PREPARED}, {_SETTINGS}, Tensor packed, {_RAN}, Tensor d_output, Tensor? d_final)"
    f" -> {returns(_G)}",
)


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
        found = _replayed_forward(*args) if is_plain(args[0]) else _forward(*args[:-1])
        ran, packed, kept = Ran(*found[:_R]), found[_R], found[_R + 1 :]
        ctx.settings, ctx.kept_is_fresh = Settings(*args[_N:-1]), True
        ctx.save_for_backward(*args[:_N], packed, *ran._replace(final=ran.choice), *kept)
        ctx.mark_non_differentiable(ran.cells, ran.choice, ran.active)
        ctx.set_materialize_grads(False)
        return tuple(ran)

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, (d_output, d_final, *_) = ctx.saved_tensors, gradients
        p, ran = Prepared(*saved[:_N]), Ran(*saved[_N + 1 : _N + 1 + _R])
        d_output = torch.zeros_like(ran.output) if d_output is None else d_output.contiguous()
        given = (*p, *ctx.settings, saved[_N], *ran, d_output, contiguous(d_final))
        if is_plain(d_output):
            if ctx.kept_is_fresh:  # it is overwritten, should there be another backward pass
                given += saved[_N + 1 + _R :]
                ctx.kept_is_fresh = False
            # not views: what is done to one in place is no concern of the others
            found = [g.data for g in _replayed_backward(*given)]
        else:
            found = _backward(*given)
        wanted = [g if x is not None else None for g, x in zip(found, p[:_G], strict=True)]
        return *wanted, *([None] * (_N - _G + _M + 1))
