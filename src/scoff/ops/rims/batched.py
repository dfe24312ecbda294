"""RIMs in few large operations, on any device, as one operator with a hand-written way back."""

import math

import torch
from torch import Tensor

from scoff.ops.exporting import hides_requires_grad
from scoff.ops.operators import Loops, operator
from scoff.ops.rims.backward import Gradients, backward_loop
from scoff.ops.rims.forward import Kept, Prepared, Settings, allocate, forward_loop
from scoff.ops.rims.reference import project_input, rims_reference
from scoff.ops.rims.types import Inputs, Options, Run, Weights
from scoff.ops.scoff.batched import GATE_ORDER
from scoff.ops.scoff.types import contiguous


def rims_batched(inputs: Inputs, w: Weights, options: Options, keep: bool = False) -> Run:
    """`keep`: whether the details of `Run` are wanted; without it they may hold the last step."""
    if inputs.x.shape[1] == 0:
        return rims_reference(inputs, w, options)
    p = prepare(inputs, w, options)
    needs_grad = torch.is_grad_enabled() and (
        hides_requires_grad() or any(x is not None and x.requires_grad for x in p)
    )
    heads = w.input_key.shape[0]
    comm_heads = 0 if w.communication is None else w.communication.query.shape[1]
    settings = Settings(
        options.cell == "lstm", options.active, heads, comm_heads, keep or needs_grad
    )
    kept = Kept(*_recurrence(*p, *settings))
    b = inputs.state.shape[1]
    attention = kept.attention.unflatten(1, (b, heads)).mean(2)[..., 1:]
    talk = kept.talk.unflatten(1, (b, comm_heads))
    return Run(kept.output, kept.state.transpose(1, 2), attention, kept.active, talk)


def prepare(inputs: Inputs, w: Weights, options: Options) -> Prepared:
    """Does all that does not depend on the state, differentiably."""
    d = inputs.state.shape[3]
    order = GATE_ORDER[options.cell]

    def by_sequence(x: Tensor) -> Tensor:
        """[T, B, heads, P, ...] -> [T, B * heads, 1 + P, ...]; the null input comes first"""
        return torch.nn.functional.pad(x, (0, 0, 1, 0)).flatten(1, 2).contiguous()

    keys, values = (by_sequence(x) for x in project_input(inputs, w))
    bias_gates = bias_n = bias_m = None
    if w.bias_ih is not None and w.bias_hh is not None:
        of_input = reordered(w.bias_ih[..., None], d, order.input).mT
        of_state = reordered(w.bias_hh[..., None], d, order.hidden).mT
        if options.cell == "gru":
            bias_n, of_input = of_input.split([d, 2 * d], 2)
            of_state, bias_m = of_state.split([2 * d, d], 2)
        bias_gates = of_input + of_state
    ask = key = value = say = comm_bias = None
    if w.communication is not None:
        c = w.communication
        ask = c.query.flatten(1, 2) / math.sqrt(c.query.shape[2])
        key, value = c.key.flatten(1, 2), c.value.flatten(1, 2)
        say = c.out if c.gate is None else torch.cat([c.out, c.gate], 1)
        if c.gate_bias is not None:
            comm_bias = torch.cat([torch.zeros_like(c.gate_bias), c.gate_bias], 1)[:, None]
    return Prepared(
        state=by_module(inputs.state),
        restart=None if inputs.restart is None else by_module(inputs.restart),
        keys=keys,
        values=values,
        query=w.input_query.flatten(1, 2),
        weight_ih=reordered(w.weight_ih, d, order.input),
        weight_hh=reordered(w.weight_hh, d, order.hidden),
        bias_gates=bias_gates,
        bias_n=contiguous(bias_n),
        bias_m=contiguous(bias_m),
        comm_ask=ask,
        comm_key=key,
        comm_value=value,
        comm_out=say,
        comm_bias=comm_bias,
        reset=inputs.reset,
        valid=inputs.valid,
        comm_mask=None if inputs.comm_mask is None else by_module(inputs.comm_mask),
    )


def by_module(x: Tensor) -> Tensor:
    """[..., B, F, D] -> [..., F, B, D]"""
    return x.transpose(1, 2).contiguous()


def reordered(weight: Tensor, size: int, order: tuple[int, ...]) -> Tensor:
    """[F, gates * D, ...] with the gates in the order given"""
    if order == (*range(len(order)),):
        return weight
    by_gate = weight.unflatten(1, (len(order), size)).unbind(1)
    return torch.cat([by_gate[gate] for gate in order], 1)


_recurrence = operator(
    "rims",
    Loops(
        Prepared,
        Settings,
        Kept,
        Gradients,
        ("attention", "talk"),
        ("active",),
        allocate,
        forward_loop,
        backward_loop,
    ),
)
