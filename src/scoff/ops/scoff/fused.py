"""SCOFF in two Triton kernels, which run all steps of a sequence without leaving the GPU.

Forward, only the states and the choices are kept. Backward, in a few chunks of steps, one launch
computes again from the states what happened at all steps of a chunk at once, one runs them back,
and every weight gradient is a large product of what they wrote.
"""

import math

import torch
from torch import Tensor

from scoff.ops.scoff.fused_gradients import run_back
from scoff.ops.scoff.fused_launch import (
    allocate_packed,
    allocate_ran,
    describe,
    launch_forward,
    pack,
)
from scoff.ops.scoff.fused_types import (
    DIFFERENTIABLE,
    Prepared,
    Ran,
    Settings,
    exact,
    power_of_two,
    run_of,
    tensors_of,
)
from scoff.ops.scoff.launch import why_no_kernels
from scoff.ops.scoff.precision import multiplied_in, precision_of
from scoff.ops.scoff.types import GATES, Inputs, Options, Run, Weights, contiguous, returns

MAX_FILES = 64
MAX_SIZE = 128  # of an object file: a gate's weights are in shared memory
MAX_VALUE = 256  # of what it reads
MAX_COMM_SIZE = 256  # of all heads' keys, or values, of the communication
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
        wide = talk.query.shape[0] * max(talk.query.shape[1], talk.value.shape[1])
        limits.append(("numbers in keys or values of the communication", wide, MAX_COMM_SIZE))
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
        w.input_query.shape[0],
        *((0, 1) if w.communication is None else w.communication.query.shape[:2]),
    )
    ran = Ran(*_Fused.apply(*prepare(inputs, w, options), *settings))
    return run_of(ran.output, ran.final, ran.choice, ran.active, inputs.x)


def prepare(inputs: Inputs, w: Weights, options: Options) -> Prepared:
    """Does all that does not depend on the state, differentiably."""
    x, size = inputs.x, inputs.state.shape[3]
    heads, width = w.input_query.shape[0], w.weight_ih.shape[-1]
    wide = x.shape[-1] > MAX_FEATURES
    talk = w.communication
    # q . kappa = (W^eT W^q h) . a: what is asked, in the space of the input
    fold = torch.bmm(w.input_key.mT, w.input_query) / math.sqrt(w.input_key.shape[1])
    keys, values, value = x, None, w.input_value
    if wide:  # ... = h . (W^qT W^e a): keys in the space of the state
        keys = torch.einsum("tbpc,hcd->tbphd", x, fold).flatten(3)
        fold = torch.eye(size, dtype=x.dtype, device=x.device).repeat(heads, 1, 1)
    if value is None or wide or inputs.value_mask is not None:
        values = x if value is None else x @ value.T
        if inputs.value_mask is not None:
            values = values * inputs.value_mask
        value = torch.eye(width // heads, dtype=x.dtype, device=x.device).repeat(heads, 1)
    weight_ih = w.weight_ih
    if values is None and heads == 1 and power_of_two(x.shape[-1], 64) <= power_of_two(width, 64):
        weight_ih, value = weight_ih @ value, None  # W_ih z = (W_ih W^v) sum_p s_p a_p
    # q~ . kappa~ = (W~^eT W~^q h) . h~
    from_state = [w.schema_key.T @ w.schema_query, fold.flatten(0, 1)]
    read = say = None
    if talk is not None:
        from_state.insert(1, talk.query.flatten(0, 1))
        read = torch.cat([talk.key.flatten(0, 1), talk.value.flatten(0, 1)])
        say = talk.out if talk.gate is None else torch.cat([talk.out, talk.gate])

    def by_gate(weight: Tensor) -> Tensor:
        return weight.unflatten(1, (GATES[options.cell], size))

    return Prepared(
        keys=keys.contiguous(),
        values=contiguous(values),
        state=inputs.state.contiguous(),
        restart=contiguous(inputs.restart),
        from_state=torch.cat(from_state),
        value=contiguous(value),
        weight_ih=by_gate(weight_ih).contiguous(),
        weight_hh=by_gate(w.weight_hh).contiguous(),
        bias_ih=None if w.bias_ih is None else by_gate(w.bias_ih).contiguous(),
        bias_hh=None if w.bias_hh is None else by_gate(w.bias_hh).contiguous(),
        comm_read=read,
        comm_say=contiguous(say),
        comm_bias=None if talk is None else contiguous(talk.gate_bias),
        reset=contiguous(inputs.reset),
        valid=contiguous(inputs.valid),
        noise=contiguous(inputs.noise),
        comm_mask=contiguous(inputs.comm_mask),
        choice=contiguous(inputs.choice),
    )


# --- the operators

_SETTINGS = (
    "bool lstm, int active, bool mean, float temperature, str precision, "
    "int input_heads, int comm_heads, int comm_key"
)
_PREPARED, _RAN = tensors_of(Prepared), tensors_of(Ran, "ran_")
_N, _M, _R, _G = (len(x) for x in (Prepared._fields, Settings._fields, Ran._fields, DIFFERENTIABLE))


@torch.library.custom_op(
    "scoff::fused_forward",
    mutates_args=(),
    schema=f"({_PREPARED}, {_SETTINGS}) -> {returns(_R + 1)}",
)
def _forward(*args):
    """`Ran`, and the weights as the kernels read them"""
    p, settings = Prepared(*args[:_N]), Settings(*args[_N:])
    ran, packed = allocate_ran(p, settings), allocate_packed(p, settings)
    with torch.cuda.device_of(p.state):  # triton launches on the current device
        pack(p, settings, packed)
        weights = describe(p, settings, packed, turned=False)
        launch_forward(p, settings, packed.dtype, weights, ran, None, None)
    return *ran, packed


@_forward.register_fake
def _(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N:])
    return *allocate_ran(p, settings), allocate_packed(p, settings)


@torch.library.custom_op(
    "scoff::fused_backward",
    mutates_args=(),
    schema=f"({_PREPARED}, {_SETTINGS}, Tensor packed, {_RAN}, Tensor d_output, Tensor d_final)"
    f" -> {returns(_G)}",
)
def _backward(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N : _N + _M])
    packed, *ran = args[_N + _M : _N + _M + 1 + _R]
    with torch.cuda.device_of(p.state), multiplied_in(settings.precision, p.state):
        found = run_back(p, settings, packed, Ran(*ran), *args[_N + _M + 1 + _R :])
    return tuple(found.get(name, p.state.new_empty(0)) for name in DIFFERENTIABLE)


@_backward.register_fake
def _(*args):
    wanted = args[:_G]
    return tuple(args[2].new_empty(0) if x is None else torch.empty_like(x) for x in wanted)


class _Fused(torch.autograd.Function):
    # torch.library.register_autograd takes half a millisecond for as many arguments

    @staticmethod
    def forward(ctx, *args):
        *found, packed = _forward(*args)
        ran = Ran(*found)
        ctx.settings = Settings(*args[_N:])
        ctx.save_for_backward(*args[:_N], packed, *ran._replace(final=ran.choice))
        ctx.mark_non_differentiable(ran.cells, ran.choice, ran.active)
        ctx.set_materialize_grads(False)
        return tuple(ran)

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, (d_output, d_final, *_) = ctx.saved_tensors, gradients
        p, ran = Prepared(*saved[:_N]), Ran(*saved[_N + 1 :])
        d_output = torch.zeros_like(ran.output) if d_output is None else d_output.contiguous()
        if d_final is None:
            d_final = torch.zeros_like(p.state, dtype=exact(p.state))
        found = _backward(*p, *ctx.settings, saved[_N], *ran, d_output, d_final.contiguous())
        wanted = [g if x is not None else None for g, x in zip(found, p[:_G], strict=True)]
        return *wanted, *([None] * (_N - _G + _M))
