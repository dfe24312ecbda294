"""SCOFF in few large operations, on any device, as one operator with a hand-written way back."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.exporting import hides_requires_grad
from scoff.ops.operators import Loops, operator
from scoff.ops.scoff.backward import backward_loop
from scoff.ops.scoff.forward import Kept, Prepared, Settings, allocate, forward_loop
from scoff.ops.scoff.gather import Gradients
from scoff.ops.scoff.reference import scoff_reference
from scoff.ops.scoff.types import Inputs, Options, Run, Weights, contiguous, epsilon


def scoff_batched(inputs: Inputs, w: Weights, options: Options, keep: bool = False) -> Run:
    """`keep`: whether the details of `Run` are wanted; without it they may hold the last step."""
    if inputs.x.shape[1] == 0:
        return scoff_reference(inputs, w, options)
    p = prepare(inputs, w, options)
    needs_grad = torch.is_grad_enabled() and (
        hides_requires_grad() or any(x is not None and x.requires_grad for x in p)
    )
    settings = Settings(
        options.cell == "lstm",
        options.active,
        options.reduction == "mean" and inputs.state.shape[2] > 1,  # one: already in the values
        options.temperature,
        options.detach_input_query,
        keep or needs_grad,
    )
    kept = Kept(*_recurrence(*p, *settings))
    b, f = inputs.state.shape[1:3]
    steps = kept.attention.shape[0]
    positions = inputs.x.shape[2]
    attention = kept.attention.view(steps, b, f, p.mix.shape[2], p.mix.shape[3])
    if attention.shape[-1] != positions:  # one object file: its positions were summed beforehand
        attention = attention.expand(-1, -1, -1, -1, positions)
    talk = kept.talk.view(steps, b, f, f, -1).permute(0, 1, 4, 3, 2)  # [K, B, H, reader, read]
    if w.communication is not None and talk.shape[2] != w.communication.query.shape[0]:
        talk = talk.expand(-1, -1, w.communication.query.shape[0], -1, -1)
    probs = kept.probs.unflatten(2, (b, f)).permute(0, 2, 3, 1)
    return Run(kept.output, kept.state, attention, probs, kept.choice, kept.active, talk)


def prepare(inputs: Inputs, w: Weights, options: Options) -> Prepared:
    """Does all that does not depend on the state, differentiably."""
    x, (_, _, f, d) = inputs.x, inputs.state.shape
    heads = w.input_query.shape[0]
    order = GATE_ORDER[options.cell]
    weight_ih = gate_major(w.weight_ih, d, order.input)  # [gates * S * D, V]
    values = x
    if w.input_value is not None:
        if x.shape[2] == heads == 1 and inputs.value_mask is None and is_less_folded(w):
            weight_ih = weight_ih @ w.input_value
        else:
            values = x @ w.input_value.T
    if inputs.value_mask is not None:
        values = values * inputs.value_mask
    # q~ . kappa~ = (W~^eT W~^q h) . h~: the query in the space of the state
    schema_query = w.schema_key.T @ w.schema_query
    weight_h = torch.cat([gate_major(w.weight_hh, d, order.hidden), schema_query])
    bias_ih = bias_h = None
    if w.bias_ih is not None and w.bias_hh is not None:
        bias_ih = gate_major(w.bias_ih, d, order.input)
        bias_h = torch.cat([gate_major(w.bias_hh, d, order.hidden), w.bias_hh.new_zeros(d)])
    keys = comm_query = comm_out = comm_bias = None

    if f == 1:  # the softmax over one object file is 1: it reads all positions alike
        values = values.sum(2)
        if options.reduction == "mean":
            values = values / (x.shape[2] + epsilon(x.dtype))
        mix = (values @ weight_ih.T)[:, :, None, None]
        weight_ih = None
        weight_h = weight_h + nothing_of(w)
    else:
        # q . kappa = h . (W^qT W^e a): keys in the space of the state need no query in the loop
        fold = torch.einsum("hed,hec->hdc", w.input_query, w.input_key)
        keys = torch.einsum("tbpc,hdc->tbhpd", x, fold / math.sqrt(w.input_key.shape[1])).flatten(
            2, 3
        )
        values = values.unflatten(-1, (heads, -1)).transpose(2, 3)  # [T, B, heads, P, V / heads]
        if x.shape[2] == 1:  # W_ih z = sum over heads of s * (W_ih v), which leaves the loop
            by_head = weight_ih.unflatten(-1, (heads, -1))  # [gates * S * D, heads, V / heads]
            mix = torch.einsum("tbhpv,ghv->tbhpg", values, by_head)
            weight_ih = None
        else:
            mix = values

    if w.communication is not None:
        c = w.communication
        out = c.out if c.gate is None else torch.cat([c.out, c.gate])
        out = out.unflatten(-1, (c.query.shape[0], -1))  # [D or 2 D, H, V']
        if f == 1:
            comm_out = torch.einsum("ohv,hvd->od", out, c.value)
        else:
            comm_out = torch.einsum("ohv,hvd->ohd", out, c.value).flatten(1)
            fold = torch.einsum("hei,hed->hid", c.key, c.query) / math.sqrt(c.key.shape[1])
            comm_query = fold.flatten(0, 1)
        if c.gate_bias is not None:
            comm_bias = torch.cat([torch.zeros_like(c.gate_bias), c.gate_bias])

    return Prepared(
        state=inputs.state.contiguous(),
        restart=contiguous(inputs.restart),
        keys=contiguous(keys),
        mix=mix.contiguous(),
        weight_ih=weight_ih,
        bias_ih=bias_ih,
        weight_h=weight_h,
        bias_h=bias_h,
        comm_query=comm_query,
        comm_out=comm_out,
        comm_bias=comm_bias,
        reset=inputs.reset,
        valid=inputs.valid,
        noise=contiguous(inputs.noise),
        comm_mask=contiguous(inputs.comm_mask),
        choice=inputs.choice,
    )


def is_less_folded(w: Weights) -> bool:
    """Whether W_ih W^v takes fewer multiplications of an input than W^v and then W_ih."""
    assert w.input_value is not None
    (size, features), gates = w.input_value.shape, w.weight_ih.shape[0] * w.weight_ih.shape[1]
    return features * gates <= size * (features + gates)


def nothing_of(w: Weights) -> Tensor:
    """Zero, made of the weights that one object file has no use for.

    They get a gradient of zero, as in the reference, and are not "unused parameters" to DDP.
    """
    unused = [w.input_query, w.input_key]
    if w.communication is not None:
        unused += [w.communication.query, w.communication.key]
    return torch.stack([0 * x.sum() for x in unused]).sum()


class GateOrder(NamedTuple):
    """Where the loops' gates are in torch's order, r z n and i f g o."""

    input: tuple[int, ...]
    hidden: tuple[int, ...]


GATE_ORDER = {
    "gru": GateOrder(input=(2, 0, 1), hidden=(0, 1, 2)),
    "lstm": GateOrder(input=(0, 1, 3, 2), hidden=(0, 1, 3, 2)),
}


def gate_major(weight: Tensor, size: int, order: tuple[int, ...]) -> Tensor:
    """[S, gates * D, ...] -> [gates * S * D, ...], the gates in the order given"""
    by_gate = weight.unflatten(1, (len(order), size)).unbind(1)
    return torch.cat([by_gate[gate].flatten(0, 1) for gate in order])


_recurrence = operator(
    "batched",
    Loops(
        Prepared,
        Settings,
        Kept,
        Gradients,
        ("attention", "probs", "talk"),
        ("choice", "active"),
        allocate,
        forward_loop,
        backward_loop,
    ),
)
