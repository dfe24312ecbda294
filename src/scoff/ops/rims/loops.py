"""The time loops of the `batched` backend, there and back; the way back is written by hand.

What does not depend on the state comes in precomputed (`batched.prepare`). Weight gradients are
gathered after each chunk of steps of the backward loop, each as one product.

Modules each have their own weights, so products are batches of F, and most tensors have the modules
first, [F, B, ...]. Kept are [F, T, B, ...], so that products over many steps are such batches too.
Where modules attend, each sequence and head has a product of its own, [B * heads, F, ...].

The gates' columns are n r u of the input and r u m of the state for the GRU, where m = W_hn h +
b_hn, and i f o g of both for the LSTM.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.backward import (
    CHUNK_ROWS,
    sigmoid_backward,
    softmax_backward,
    tanh_backward,
)
from scoff.ops.scoff.forward import tanh
from scoff.ops.scoff.reference import most_attended


class Prepared(NamedTuple):
    """Tensors of the loop. H communication heads, K and K' sizes of keys, V of what is read."""

    state: Tensor  # [Z, F, B, D]
    restart: Tensor | None  # [Z, F, B, D]
    keys: Tensor  # [T, B * heads, 1 + P, K], scaled; the null input first
    values: Tensor  # [T, B * heads, 1 + P, V / heads]
    query: Tensor  # [F, heads * K, D]
    weight_ih: Tensor  # [F, gates * D, V]
    weight_hh: Tensor  # [F, gates * D, D]
    bias_gates: Tensor | None  # [F, 1, 2 or 4 * D] of r u or i f o g
    bias_n: Tensor | None  # [F, 1, D] of the GRU
    bias_m: Tensor | None  # [F, 1, D] of the GRU
    comm_ask: Tensor | None  # [F, H * K', D], scaled; None: no communication
    comm_key: Tensor | None  # [F, H * K', D]
    comm_value: Tensor | None  # [F, H * V', D]
    comm_out: Tensor | None  # [F, D, H * V'], gated: [F, 2 D, H * V']
    comm_bias: Tensor | None  # [F, 1, 2 D]; None: not gated
    reset: Tensor | None  # [T, B]
    valid: Tensor | None  # [T, B]
    comm_mask: Tensor | None  # [T, F, B, D]


class Settings(NamedTuple):
    lstm: bool
    active: int
    heads: int
    comm_heads: int
    keep: bool  # whether every step's intermediates are kept, for the backward pass or a trace


class Kept(NamedTuple):
    """Results, then intermediates. N = T steps, or 1 (the last, overwritten) without `keep`."""

    output: Tensor  # [T, B, F, D]
    state: Tensor  # [Z, F, B, D]
    attention: Tensor  # [N, B * heads, F, 1 + P]
    talk: Tensor  # [N, B * H, F, F]
    active: Tensor  # [N, B, F]
    before: Tensor  # [Z, F, N, B, D] the state that the step started from
    query: Tensor  # [F, N, B, heads * K]
    read: Tensor  # [F, N, B, V]
    gates: Tensor  # [F, N, B, 2 or 4 * D] r u or i f o g
    m: Tensor  # [F, N, B, D] of the GRU
    extra: Tensor  # [F, N, B, D] the GRU's n, the LSTM's tanh(c)
    updated: Tensor  # [F, N, B, D] h after the update
    ask: Tensor  # [F, N, B, H * K']
    key: Tensor  # [F, N, B, H * K']
    value: Tensor  # [F, N, B, H * V']
    heard: Tensor  # [F, N, B, H * V']
    said: Tensor  # [F, N, B, 2 D] tanh(message) and the gate, of gated communication


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


def allocate(p: Prepared, settings: Settings) -> Kept:
    z, f, b, d = p.state.shape
    t, rows, positions, _ = p.keys.shape
    n = t if settings.keep else 1
    new = p.state.new_empty

    def each(size: int) -> Tensor:
        return new(f, n, b, size)

    def columns(weight: Tensor | None) -> int:
        return 0 if weight is None else weight.shape[1]

    return Kept(
        output=new(t, b, f, d),
        state=new(z, f, b, d),
        attention=new(n, rows, f, positions),
        talk=new(n, b * settings.comm_heads, f, f),
        active=new((n, b, f), dtype=torch.bool),
        before=new(z, f, n, b, d),
        query=each(columns(p.query)),
        read=each(p.weight_ih.shape[2]),
        gates=each(4 * d if settings.lstm else 2 * d),
        m=each(0 if settings.lstm else d),
        extra=each(d),
        updated=each(d),
        ask=each(columns(p.comm_ask)),
        key=each(columns(p.comm_key)),
        value=each(columns(p.comm_value)),
        heard=each(columns(p.comm_value)),
        said=each(0 if p.comm_bias is None else 2 * d),
    )


class Step(NamedTuple):
    """Views of one step of `Kept`, in the shapes that the loops want them in."""

    output: Tensor  # [F, B, D]
    attention: Tensor  # [B * heads, F, 1 + P]
    talk: Tensor  # [B * H, F, F]
    active: Tensor  # [B, F]
    before: tuple[Tensor, ...]  # [F, B, D] each
    query: Tensor  # [F, B, heads * K]
    asking: Tensor  # [B * heads, F, K] of `query`
    read: Tensor  # [F, B, V]
    read_by_head: Tensor  # [B, heads, F, V / heads] of `read`
    gates: Tensor  # [F, B, 2 or 4 * D]
    gate: tuple[Tensor, ...]  # [F, B, D] each of them
    m: Tensor  # [F, B, D]
    extra: Tensor  # [F, B, D]
    updated: Tensor  # [F, B, D]
    said: Tensor  # [F, B, 2 D]
    comm: tuple[Tensor, ...]  # ask, key, value, heard  [F, B, ...]
    comm_by_head: tuple[Tensor, ...]  # the first three [B * H, F, ...]
    heard_by_head: Tensor  # [B, H, F, V']


def by_head(x: Tensor, heads: int) -> Tensor:
    """[F, B, heads * size] -> [B, heads, F, size], a view"""
    return x.unflatten(2, (heads, x.shape[2] // max(1, heads))).permute(1, 2, 0, 3)


def steps_of(kept: Kept, settings: Settings, steps: int) -> list[Step]:
    """Made before the loop, for a view costs as much as a small operation."""

    def views(x: Tensor, axis: int = 1) -> Sequence[Tensor]:
        found = x.unbind(axis)
        return found if len(found) == steps else found * steps

    def heads_of(x: Tensor, heads: int) -> list[Tensor]:
        return [by_head(each, heads) for each in views(x)]

    heads, comm_heads = settings.heads, settings.comm_heads
    comm = kept.ask, kept.key, kept.value, kept.heard
    asking = [each.flatten(0, 1) for each in heads_of(kept.query, heads)]
    spoken = [[each.flatten(0, 1) for each in heads_of(x, comm_heads)] for x in comm[:3]]
    columns: dict[str, Iterable[Any]] = {
        "output": (each.transpose(0, 1) for each in kept.output.unbind(0)),
        "attention": views(kept.attention, 0),
        "talk": views(kept.talk, 0),
        "active": views(kept.active, 0),
        "before": zip(*(views(x) for x in kept.before), strict=True),
        "query": views(kept.query),
        "asking": asking,
        "read": views(kept.read),
        "read_by_head": heads_of(kept.read, heads),
        "gates": views(kept.gates),
        "gate": zip(*(views(x) for x in kept.gates.split(kept.extra.shape[3], 3)), strict=True),
        "m": views(kept.m),
        "extra": views(kept.extra),
        "updated": views(kept.updated),
        "said": views(kept.said),
        "comm": zip(*(views(x) for x in comm), strict=True),
        "comm_by_head": zip(*spoken, strict=True),
        "heard_by_head": heads_of(kept.heard, comm_heads),
    }
    rows = zip(*columns.values(), strict=True)
    return [Step(**dict(zip(columns, row, strict=True))) for row in rows]


def update_mask(p: Prepared, settings: Settings, active: Tensor, t: int) -> Tensor | None:
    """Which modules change at step t [F, B, 1], or if it is the same ones [B, 1]; None: all."""
    if settings.active == p.state.shape[1]:
        return None if p.valid is None else p.valid[t][:, None]
    update = active if p.valid is None else active & p.valid[t][:, None]
    return update.T[..., None]


def product(bias: Tensor | None, x: Tensor, weight: Tensor, out: Tensor) -> None:
    if bias is None:
        torch.bmm(x, weight, out=out)
    else:
        torch.baddbmm(bias, x, weight, out=out)


def forward_loop(p: Prepared, settings: Settings) -> Kept:
    kept = allocate(p, settings)
    _, f, b, d = p.state.shape
    state = [*p.state]
    c = p.state.new_empty(f, b, d if settings.lstm else 0)
    if settings.active == f:
        kept.active.fill_(True)
    for t, at in enumerate(steps_of(kept, settings, len(p.keys))):
        for index, (old, new) in enumerate(zip(at.before, state, strict=True)):
            if p.reset is not None and p.restart is not None:
                torch.where(p.reset[t][:, None], p.restart[index], new, out=old)
            else:
                old.copy_(new)
        attend(p, settings, at, t)
        update_modules(p, settings, at, c)
        update = update_mask(p, settings, at.active, t)
        if update is not None:
            for new, old in zip((at.updated, c), at.before, strict=False):
                torch.where(update, new, old, out=new)
        if p.comm_out is None:
            at.output.copy_(at.updated)
        else:
            communicate(p, at, t)
            if update is not None:
                torch.where(update, at.output, at.before[0], out=at.output)
        state = [at.output, c] if settings.lstm else [at.output]
    torch.stack(state, out=kept.state)
    return kept


def attend(p: Prepared, settings: Settings, at: Step, t: int) -> None:
    """Who attends to what, what each reads, and who is active"""
    torch.bmm(at.before[0], p.query.mT, out=at.query)
    torch.softmax(torch.bmm(at.asking, p.keys[t].mT), 2, out=at.attention)
    read = torch.bmm(at.attention, p.values[t])
    at.read_by_head.copy_(read.view(at.read_by_head.shape))
    if settings.active < p.state.shape[1]:
        null = at.attention[..., 0].unflatten(0, (-1, settings.heads)).mean(1)
        at.active.copy_(most_attended(-null, settings.active))


def update_modules(p: Prepared, settings: Settings, at: Step, c: Tensor) -> None:
    """A GRU or LSTM cell for each; fills `c` of the LSTM."""
    h, d = at.before[0], p.state.shape[3]
    inner = 0 if settings.lstm else d  # columns of n, or of m
    read_n, read_gates = p.weight_ih.mT.split([inner, p.weight_ih.shape[1] - inner], 2)
    state_gates, state_m = p.weight_hh.mT.split([p.weight_hh.shape[1] - inner, inner], 2)
    product(p.bias_gates, at.read, read_gates, out=at.gates)
    at.gates.baddbmm_(h, state_gates)
    if settings.lstm:
        i, forget, o, g = at.gate
        at.gates[..., : 3 * d].sigmoid_()
        tanh(g, out=g)
        torch.mul(i, g, out=c).addcmul_(forget, at.before[1])
        tanh(c, out=at.extra)
        torch.mul(o, at.extra, out=at.updated)
    else:
        r, u = at.gate
        product(p.bias_n, at.read, read_n, out=at.extra)
        product(p.bias_m, h, state_m, out=at.m)
        at.gates.sigmoid_()
        tanh(at.extra.addcmul_(r, at.m), out=at.extra)
        torch.lerp(at.extra, h, u, out=at.updated)


def communicate(p: Prepared, at: Step, t: int) -> None:
    assert p.comm_out is not None
    weights = [w.mT for w in (p.comm_ask, p.comm_key, p.comm_value) if w is not None]
    *asked, heard = at.comm
    for weight, out in zip(weights, asked, strict=True):
        torch.bmm(at.updated, weight, out=out)
    ask, key, value = at.comm_by_head
    torch.softmax(torch.bmm(ask, key.mT), 2, out=at.talk)
    at.heard_by_head.copy_(torch.bmm(at.talk, value).view(at.heard_by_head.shape))
    d = at.updated.shape[2]
    if p.comm_bias is None:
        message = torch.bmm(heard, p.comm_out.mT)
    else:
        message = torch.baddbmm(p.comm_bias, heard, p.comm_out.mT, out=at.said)
    said, heed = message[..., :d], message[..., d:]
    if p.comm_mask is not None:
        said.mul_(p.comm_mask[t])
    if p.comm_bias is None:
        torch.add(at.updated, said, out=at.output)
    else:
        tanh(said, out=said)
        torch.lerp(at.updated, said, heed.sigmoid_(), out=at.output)


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
