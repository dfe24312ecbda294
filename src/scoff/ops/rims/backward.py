"""The hand-written backward pass of the `batched` backend.

Weight gradients are gathered after each chunk of steps, each as one batch of large products.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.rims.forward import Kept, Prepared, Settings, Step, by_head, steps_of, update_mask
from scoff.ops.scoff.backward import (
    CHUNK_ROWS,
    sigmoid_backward,
    softmax_backward,
    tanh_backward,
)


class Gradients(NamedTuple):
    """Of `Prepared`, in its order; empty where there is nothing."""

    state: Tensor
    restart: Tensor
    keys: Tensor
    values: Tensor
    query: Tensor
    weight_ih: Tensor
    weight_hh: Tensor
    bias_gates: Tensor
    bias_n: Tensor
    bias_m: Tensor
    comm_ask: Tensor
    comm_key: Tensor
    comm_value: Tensor
    comm_out: Tensor
    comm_bias: Tensor


class Late(NamedTuple):
    """What a chunk of steps leaves for the products over them  [F, N, B, ...]"""

    gates: Tensor  # before their nonlinearity: n r u m or i f o g
    query: Tensor
    ask: Tensor
    key: Tensor
    value: Tensor
    message: Tensor

    @classmethod
    def allocate(cls, p: Prepared, kept: Kept, steps: int) -> "Late":
        says = 0 if p.comm_out is None else p.comm_out.shape[1]
        sizes = [4 * kept.extra.shape[3]]
        sizes += [x.shape[3] for x in (kept.query, kept.ask, kept.key, kept.value)]
        _, f, b, _ = p.state.shape
        return cls(*(p.state.new_empty(f, steps, b, size) for size in (*sizes, says)))

    def by_step(self) -> "list[Late]":
        return [Late(*row) for row in zip(*(x.unbind(1) for x in self), strict=True)]


def backward_loop(
    p: Prepared,
    settings: Settings,
    kept: Kept,
    d_output: Tensor | None,
    d_state: Tensor | None,
    d_attention: Tensor | None,
    d_talk: Tensor | None,
) -> Gradients:
    """d_* are the gradients of the `Kept` of the same name; None: zero."""
    _, f, b, d = p.state.shape
    steps, zero = len(p.keys), p.state.new_zeros(())
    inner = 0 if settings.lstm else d
    chunk_rows = CHUNK_ROWS * (32 if p.state.is_cuda else 1)
    chunk = min(steps, -(-chunk_rows // b))
    late = Late.allocate(p, kept, chunk)
    slots = late.by_step()
    total = start_gradients(p)
    d_state = torch.zeros_like(p.state) if d_state is None else d_state.contiguous()
    carried = [x.clone() for x in d_state]  # from the step after
    d_output = zero.expand(steps, b, f, d) if d_output is None else d_output
    d_outputs = d_output.transpose(1, 2).unbind(0)
    d_new, back, work = (p.state.new_empty(f, b, d) for _ in range(3))
    d_read = p.state.new_empty(f, b, p.weight_ih.shape[2])
    d_read_by_head = by_head(d_read, settings.heads).flatten(0, 1)

    comm_weights = [w for w in (p.comm_ask, p.comm_key, p.comm_value) if w is not None]
    views = steps_of(kept, settings, steps)
    for t in reversed(range(steps)):
        at, later = views[t], slots[t % chunk]
        torch.add(carried[0], d_outputs[t], out=d_new)
        update = update_mask(p, settings, at.active, t)
        if update is None:
            carried[0].zero_()
        else:
            torch.where(update, zero, d_new, out=carried[0])
            torch.where(update, d_new, zero, out=d_new)

        if p.comm_out is not None:
            back_to_message(p, at, later, d_new, work, t)
            back_to_talk(p, settings, at, later, None if d_talk is None else d_talk[t])
            to_updated = d_new if update is None else back.zero_()
            for of_step, weight in zip(later[2:5], comm_weights, strict=True):
                to_updated.baddbmm_(of_step, weight)
            if update is not None:
                carried[0].add_(torch.where(update, zero, back, out=work))
                d_new.add_(torch.where(update, back, zero, out=back))

        if settings.lstm:
            back_to_lstm(at, later, d_new, carried, update, work)
        else:
            back_to_gru(at, later, d_new, carried[0], work)
        torch.bmm(later.gates[..., : p.weight_ih.shape[1]], p.weight_ih, out=d_read)

        torch.bmm(at.attention.mT, d_read_by_head, out=total.values[t])
        d_weight = torch.bmm(d_read_by_head, p.values[t].mT)
        if d_attention is not None:
            d_weight += d_attention[t]
        d_scores = softmax_backward(d_weight, at.attention, 2, d_weight.dtype)
        torch.bmm(d_scores.mT, at.asking, out=total.keys[t])
        put(torch.bmm(d_scores, p.keys[t]), later.query, settings.heads)
        carried[0].baddbmm_(later.query, p.query)
        carried[0].baddbmm_(later.gates[..., inner:], p.weight_hh)

        if p.reset is not None and p.restart is not None:
            reset = p.reset[t][:, None]
            for d_restart, d_carried in zip(total.restart, carried, strict=True):
                d_restart.add_(torch.where(reset, d_carried, zero))
                torch.where(reset, zero, d_carried, out=d_carried)
        if t % chunk == 0:
            gather(p, total, kept, late, range(t, min(t + chunk, steps)))
    return total._replace(state=torch.stack(carried))


def put(x: Tensor, into: Tensor, heads: int) -> None:
    """[B * heads, F, size] -> [F, B, heads * size]"""
    target = by_head(into, heads)
    target.copy_(x.view(target.shape))


def back_to_message(
    p: Prepared, at: Step, later: Late, d_new: Tensor, work: Tensor, t: int
) -> None:
    """Fills the message of `later`, and leaves in `d_new` what goes past it."""
    message = later.message
    d = d_new.shape[2]
    if p.comm_bias is None:
        message.copy_(d_new)
    else:
        said, heed = at.said[..., :d], at.said[..., d:]
        torch.sub(said, at.updated, out=work).mul_(d_new)
        sigmoid_backward(work, heed, grad_input=message[..., d:])
        torch.mul(d_new, heed, out=work)
        tanh_backward(work, said, grad_input=message[..., :d])
        d_new.sub_(work)
    if p.comm_mask is not None:
        message[..., :d].mul_(p.comm_mask[t])


def back_to_talk(
    p: Prepared, settings: Settings, at: Step, later: Late, d_talk: Tensor | None
) -> None:
    """Fills what was asked, what with, and what was told, of `later`."""
    assert p.comm_out is not None
    ask, key, value = at.comm_by_head
    d_heard = by_head(torch.bmm(later.message, p.comm_out), settings.comm_heads).flatten(0, 1)
    d_weight = torch.bmm(d_heard, value.mT)
    if d_talk is not None:
        d_weight += d_talk
    d_scores = softmax_backward(d_weight, at.talk, 2, d_weight.dtype)
    put(torch.bmm(d_scores, key), later.ask, settings.comm_heads)
    put(torch.bmm(d_scores.mT, ask), later.key, settings.comm_heads)
    put(torch.bmm(at.talk.mT, d_heard), later.value, settings.comm_heads)


def back_to_gru(at: Step, later: Late, d_new: Tensor, d_h: Tensor, work: Tensor) -> None:
    """Fills the gates of `later` and adds the direct path to `d_h`; overwrites `d_new`."""
    (r, u), n = at.gate, at.extra
    d_n, d_r, d_u, d_m = later.gates.chunk(4, 2)
    torch.mul(d_new, u, out=work)
    d_h.add_(work)
    d_new.sub_(work)  # (1 - u) d
    torch.sub(at.before[0], n, out=work).mul_(u)
    torch.mul(work, d_new, out=d_u)
    tanh_backward(d_new, n, grad_input=d_n)
    torch.mul(d_n, r, out=d_m)
    torch.mul(d_n, at.m, out=work)
    sigmoid_backward(work, r, grad_input=d_r)


def back_to_lstm(
    at: Step,
    later: Late,
    d_new: Tensor,
    carried: Sequence[Tensor],
    update: Tensor | None,
    work: Tensor,
) -> None:
    """Fills the gates of `later`, and puts the gradient of the old c into `carried`."""
    (i, forget, o, g), tanh_c, (_, d_c) = at.gate, at.extra, carried
    d_i, d_forget, d_o, d_g = later.gates.chunk(4, 2)
    torch.mul(d_new, o, out=work)
    d_new_c = tanh_backward(work, tanh_c, grad_input=work)
    if update is None:
        d_new_c.add_(d_c)
        d_c.zero_()
    else:
        zero = d_c.new_zeros(())
        d_new_c.add_(torch.where(update, d_c, zero))
        torch.where(update, zero, d_c, out=d_c)
    d_c.addcmul_(d_new_c, forget)
    sigmoid_backward(d_new.mul_(tanh_c), o, grad_input=d_o)
    sigmoid_backward(d_new_c * g, i, grad_input=d_i)
    sigmoid_backward(d_new_c * at.before[1], forget, grad_input=d_forget)
    tanh_backward(d_new_c * i, g, grad_input=d_g)


def start_gradients(p: Prepared) -> Gradients:
    """Zeros to add to; what is filled step by step is not filled yet. Empty where nothing is."""

    def start(name: str) -> Tensor:
        x = getattr(p, name)
        if x is None or name == "state":
            return p.state.new_empty(0)
        return torch.empty_like(x) if name in ("keys", "values") else torch.zeros_like(x)

    return Gradients(*(start(name) for name in Gradients._fields))


def gather(p: Prepared, total: Gradients, kept: Kept, late: Late, steps: range) -> None:
    """Adds what the steps ask of the weights, each as one batch of large products."""
    cut = slice(steps.start, steps.stop)
    gates, query, *talk, message = (x[:, : len(steps)].flatten(1, 2) for x in late)
    inputs = p.weight_ih.shape[1]
    inner = gates.shape[2] - p.weight_hh.shape[1]  # where the state's columns start

    def add(into: Tensor, left: Tensor, right: Tensor) -> None:
        into.baddbmm_(left.mT, right[:, cut].flatten(1, 2))

    add(total.query, query, kept.before[0])
    add(total.weight_ih, gates[..., :inputs], kept.read)
    add(total.weight_hh, gates[..., inner:], kept.before[0])
    if p.bias_gates is not None:
        sums = gates.sum(1, keepdim=True).split([inner, inputs - inner, inner], 2)
        for bias, x in zip((total.bias_n, total.bias_gates, total.bias_m), sums, strict=True):
            if x.shape[2] > 0:
                bias.add_(x)
    if p.comm_out is not None:
        asked = total.comm_ask, total.comm_key, total.comm_value
        for weight, x in zip(asked, talk, strict=True):
            add(weight, x, kept.updated)
        add(total.comm_out, message, kept.heard)
        if p.comm_bias is not None:
            total.comm_bias.add_(message.sum(1, keepdim=True))
