"""SCOFF with wide states: at each step a few matrix products, and Triton kernels between them.

All that multiplies the state is one matrix: the gates of every schema, the schema query, and what
is asked of the input and of other object files. What does not depend on the state, and with one
object file that is all of the input, is multiplied in large products before the loop over time.

Forward, only the states and the choices are kept. Backward, in a few chunks of steps, large
products compute again from the states what happened at all steps of a chunk; in the loop is only
what the step before depends on; and every weight gradient is one large product of what it left.

Rows of what is multiplied are padded with zeros to whole multiples of 16 bytes, which tensor cores
want. Behind a row's own numbers is a one, so that biases are a column of the weights.
"""

import math

import torch
from torch import Tensor

from scoff.ops.scoff.batched import is_less_folded
from scoff.ops.scoff.fused_types import exact, run_of, tensors_of
from scoff.ops.scoff.launch import is_plain, why_no_kernels
from scoff.ops.scoff.precision import multiplied_in, precision_of
from scoff.ops.scoff.replay import Replay, empty_like
from scoff.ops.scoff.types import (
    Inputs,
    Options,
    Run,
    Weights,
    contiguous,
    epsilon,
    returns,
)
from scoff.ops.scoff.wide_backward import run_back
from scoff.ops.scoff.wide_forward import run_forward
from scoff.ops.scoff.wide_layout import (
    DIFFERENTIABLE,
    Left,
    Prepared,
    Settings,
    allocate_left,
    layout_of,
    longest_chunk,
)

MAX_FILES = 64  # a program has those of a sequence at once


def why_not(inputs: Inputs, w: Weights) -> str | None:  # noqa: ARG001
    """Why this backend cannot do this; None: it can. It takes weights of any size."""
    files = inputs.state.shape[2]
    if (reason := why_no_kernels(inputs.x)) is not None:
        return reason
    return f"{files} object files are more than {MAX_FILES}" if files > MAX_FILES else None


def scoff_wide(inputs: Inputs, w: Weights, options: Options) -> Run:
    """All of `Run` but the details, which are empty: `batched` gives those."""
    alone = inputs.state.shape[2] == 1
    settings = Settings(
        options.cell == "lstm",
        options.active,
        options.reduction == "mean",
        epsilon(inputs.x.dtype),
        precision_of(inputs.x.dtype),
        w.input_query.shape[0],
        1 if w.communication is None or alone else w.communication.query.shape[0],
        options.detach_input_query,
    )
    unused = unused_alone(w) if alone else []
    p = prepare(inputs, w, options)
    output, final, choice, active = _Wide.apply(*p, *settings, 1 / options.temperature, *unused)
    return run_of(output, final, choice, active, inputs.x)


def prepare(inputs: Inputs, w: Weights, options: Options) -> Prepared:
    """Does all that does not depend on the state, differentiably."""
    dtype = exact(inputs.x)
    x, files = inputs.x.to(dtype), inputs.state.shape[2]
    talk = w.communication
    alone, value, keys = files == 1, None, None
    if alone:  # the softmax over one object file is 1: it reads all positions alike
        values, value = summed_values(x, w, inputs.value_mask)
        if options.reduction == "mean":
            values = values / (x.shape[2] + epsilon(inputs.x.dtype))
    else:
        values = x if w.input_value is None else x @ w.input_value.to(dtype).T
        values = masked(values, inputs.value_mask)
        keys = x @ (w.input_key.to(dtype).flatten(0, 1) / math.sqrt(w.input_key.shape[1])).T
    return Prepared(
        values=values.contiguous(),
        keys=contiguous(keys),
        state=inputs.state.to(dtype).contiguous(),
        restart=None if inputs.restart is None else inputs.restart.to(dtype).contiguous(),
        weight_ih=w.weight_ih.contiguous(),
        value=contiguous(value),
        weight_hh=w.weight_hh.contiguous(),
        bias_ih=contiguous(w.bias_ih),
        bias_hh=contiguous(w.bias_hh),
        schema_query=w.schema_query.contiguous(),
        schema_key=w.schema_key.contiguous(),
        input_query=None if alone else w.input_query.contiguous(),
        comm_query=None if talk is None or alone else talk.query.contiguous(),
        comm_key=None if talk is None or alone else talk.key.contiguous(),
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


def unused_alone(w: Weights) -> list[Tensor]:
    """What one object file has no use for. It is not an "unused parameter" to DDP all the same."""
    talk = [] if w.communication is None else [w.communication.query, w.communication.key]
    return [w.input_query, w.input_key, *talk]


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values * mask


def summed_values(x: Tensor, w: Weights, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The sum over positions [T, B, 1, V], and what multiplies it before `weight_ih` does"""
    if w.input_value is None:
        return masked(x, mask).sum(2, keepdim=True), None
    if mask is not None:
        return (x @ w.input_value.to(x.dtype).T * mask).sum(2, keepdim=True), None
    total = x if x.shape[2] == 1 else x.sum(2, keepdim=True)
    if is_less_folded(w):
        return total, w.input_value
    return total @ w.input_value.to(x.dtype).T, None


# --- the operators

_SETTINGS = (
    "bool lstm, int active, bool mean, float epsilon, str precision, int input_heads, "
    "int comm_heads, bool detach"
)
_PREPARED = tensors_of(Prepared)
_LEFT = tensors_of(Left, "left_")
for _name in ("work", "message"):  # gradients take their place
    _LEFT = _LEFT.replace(f"Tensor left_{_name}", f"Tensor({_name}!) left_{_name}")
_N, _M, _L, _G = (
    len(x) for x in (Prepared._fields, Settings._fields, Left._fields, DIFFERENTIABLE)
)


_WEIGHTS = range(*map(Prepared._fields.index, ("weight_ih", "reset")))


def with_all_digits(p: Prepared) -> Prepared:
    """Weights in the type of the state"""
    dtype = p.state.dtype
    weights = {name: x for name, x in p._asdict().items() if x is not None and x.dtype != dtype}
    weights = {n: x for n, x in weights.items() if Prepared._fields.index(n) in _WEIGHTS}
    return p._replace(**{n: empty_like(x, dtype).copy_(x) for n, x in weights.items()})


def _run_forward(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N:])
    # triton launches on the current device
    with torch.cuda.device_of(p.state), multiplied_in(settings.precision, p.state):
        output, final, left = run_forward(with_all_digits(p), settings)
    return output, final, *left


_forward = torch.library.custom_op(
    "scoff::wide_forward",
    _run_forward,
    mutates_args=(),
    schema=f"({_PREPARED}, {_SETTINGS}) -> {returns(2 + _L)}",
)


@_forward.register_fake
def _(*args):
    p = Prepared(*args[:_N])
    z = layout_of(p, Settings(*args[_N:]))
    output = p.state.new_empty(z.steps, *p.state.shape[1:])
    return output, torch.empty_like(p.state), *allocate_left(p, z, longest_chunk(p, z))


def _run_backward(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N : _N + _M])
    left = Left(*args[_N + _M : _N + _M + _L])
    with torch.cuda.device_of(p.state), multiplied_in(settings.precision, p.state):
        found = run_back(with_all_digits(p), settings, left, *args[_N + _M + _L :])
        for name, x in found.items():
            if x.dtype != (dtype := getattr(p, name).dtype):
                found[name] = empty_like(x, dtype).copy_(x)
    return tuple(found.get(name, p.state.new_empty(0)) for name in DIFFERENTIABLE)


_backward = torch.library.custom_op(
    "scoff::wide_backward",
    _run_backward,
    mutates_args=("left_work", "left_message"),
    schema=f"({_PREPARED}, {_SETTINGS}, {_LEFT}, bool fresh, Tensor coldness, "
    f"Tensor d_output, Tensor? d_final) -> {returns(_G)}",
)


@_backward.register_fake
def _(*args):
    wanted = args[:_G]
    return tuple(args[0].new_empty(0) if x is None else torch.empty_like(x) for x in wanted)


_replayed_forward = Replay(_run_forward, stay=_WEIGHTS)
_replayed_backward = Replay(_run_backward, stay=_WEIGHTS, together=True)


class _Wide(torch.autograd.Function):
    # torch.library.register_autograd takes half a millisecond for as many arguments

    @staticmethod
    def forward(ctx, *args):
        run = _replayed_forward if is_plain(args[0]) else _forward
        output, final, *left = run(*args[: _N + _M])
        left = Left(*left)
        ctx.settings, ctx.coldness = args[_N : _N + _M], args[_N + _M]
        ctx.sizes = left.work.shape, left.message.shape
        # of the last steps the backward pass has what happened, once: it overwrites that
        ctx.last_is_fresh = not torch.compiler.is_compiling()
        if not ctx.last_is_fresh:
            left = left._replace(work=output.new_empty(0), message=output.new_empty(0))
        ctx.save_for_backward(*args[:_N], *left, *args[_N + _M + 1 :])
        ctx.mark_non_differentiable(left.choice, left.active)
        ctx.set_materialize_grads(False)
        return output, final, left.choice, left.active

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, (d_output, d_final, *_) = ctx.saved_tensors, gradients
        p, left, unused = Prepared(*saved[:_N]), saved[_N : _N + _L], saved[_N + _L :]
        output_shape = (p.values.shape[0], *p.state.shape[1:])
        d_output = p.state.new_zeros(output_shape) if d_output is None else d_output.contiguous()
        fresh, ctx.last_is_fresh = ctx.last_is_fresh, False
        # by their data, for autograd would not hand out again what it knows to be overwritten
        last = zip(left[-2:], ctx.sizes, strict=True)
        last = [x.data if x.shape == size else x.new_empty(size) for x, size in last]
        # a number would be a constant of what is replayed
        coldness = d_output.new_full((1,), ctx.coldness, dtype=exact(d_output))
        plain = is_plain(d_output)
        run = _replayed_backward if plain else _backward
        given = (*p, *ctx.settings, *left[:-2], *last, fresh, coldness)
        found = run(*given, d_output, contiguous(d_final))
        if plain:  # not views: what is done to one in place is no concern of the others
            found = [g.data for g in found]
        wanted = [g if x is not None else None for g, x in zip(found, p[:_G], strict=True)]
        return *wanted, *([None] * (_N - _G + _M + 1)), *(torch.zeros_like(x) for x in unused)
