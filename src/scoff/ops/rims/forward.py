"""The time loop of the `batched` backend; `backward` has the way back.

What does not depend on the state comes in precomputed (`batched.prepare`).

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


class Columns(NamedTuple):
    """Weights as the loop multiplies with them: views, made before it"""

    query: Tensor  # [F, D, heads * K]
    read_n: Tensor  # [F, V, D] of the GRU
    read_gates: Tensor  # [F, V, 2 or 4 * D]
    state_gates: Tensor  # [F, D, 2 or 4 * D]
    state_m: Tensor  # [F, D, D] of the GRU
    comm: list[Tensor]  # those of ask, key, value and out


def columns_of(p: Prepared, settings: Settings) -> Columns:
    inner = 0 if settings.lstm else p.state.shape[3]  # columns of n, or of m
    read_n, read_gates = p.weight_ih.mT.split([inner, p.weight_ih.shape[1] - inner], 2)
    state_gates, state_m = p.weight_hh.mT.split([p.weight_hh.shape[1] - inner, inner], 2)
    comm = p.comm_ask, p.comm_key, p.comm_value, p.comm_out
    comm = [weight.mT for weight in comm if weight is not None]
    return Columns(p.query.mT, read_n, read_gates, state_gates, state_m, comm)


def forward_loop(p: Prepared, settings: Settings) -> Kept:
    kept, w = allocate(p, settings), columns_of(p, settings)
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
        attend(p, w, settings, at, t)
        update_modules(p, w, settings, at, c)
        update = update_mask(p, settings, at.active, t)
        if update is not None:
            for new, old in zip((at.updated, c), at.before, strict=False):
                torch.where(update, new, old, out=new)
        if p.comm_out is None:
            at.output.copy_(at.updated)
        else:
            communicate(p, w, at, t)
            if update is not None:
                torch.where(update, at.output, at.before[0], out=at.output)
        state = [at.output, c] if settings.lstm else [at.output]
    torch.stack(state, out=kept.state)
    return kept


def attend(p: Prepared, w: Columns, settings: Settings, at: Step, t: int) -> None:
    """Who attends to what, what each reads, and who is active"""
    torch.bmm(at.before[0], w.query, out=at.query)
    torch.softmax(torch.bmm(at.asking, p.keys[t].mT), 2, out=at.attention)
    read = torch.bmm(at.attention, p.values[t])
    at.read_by_head.copy_(read.view(at.read_by_head.shape))
    if settings.active < p.state.shape[1]:
        null = at.attention[..., 0].unflatten(0, (-1, settings.heads)).mean(1)
        at.active.copy_(most_attended(-null, settings.active))


def update_modules(p: Prepared, w: Columns, settings: Settings, at: Step, c: Tensor) -> None:
    """A GRU or LSTM cell for each; fills `c` of the LSTM."""
    h, d = at.before[0], p.state.shape[3]
    product(p.bias_gates, at.read, w.read_gates, out=at.gates)
    at.gates.baddbmm_(h, w.state_gates)
    if settings.lstm:
        i, forget, o, g = at.gate
        at.gates[..., : 3 * d].sigmoid_()
        tanh(g, out=g)
        torch.mul(i, g, out=c).addcmul_(forget, at.before[1])
        tanh(c, out=at.extra)
        torch.mul(o, at.extra, out=at.updated)
    else:
        r, u = at.gate
        product(p.bias_n, at.read, w.read_n, out=at.extra)
        product(p.bias_m, h, w.state_m, out=at.m)
        at.gates.sigmoid_()
        tanh(at.extra.addcmul_(r, at.m), out=at.extra)
        torch.lerp(at.extra, h, u, out=at.updated)


def communicate(p: Prepared, w: Columns, at: Step, t: int) -> None:
    *weights, say = w.comm
    *asked, heard = at.comm
    for weight, out in zip(weights, asked, strict=True):
        torch.bmm(at.updated, weight, out=out)
    ask, key, value = at.comm_by_head
    torch.softmax(torch.bmm(ask, key.mT), 2, out=at.talk)
    at.heard_by_head.copy_(torch.bmm(at.talk, value).view(at.heard_by_head.shape))
    d = at.updated.shape[2]
    if p.comm_bias is None:
        message = torch.bmm(heard, say)
    else:
        message = torch.baddbmm(p.comm_bias, heard, say, out=at.said)
    said, heed = message[..., :d], message[..., d:]
    if p.comm_mask is not None:
        said.mul_(p.comm_mask[t])
    if p.comm_bias is None:
        torch.add(at.updated, said, out=at.output)
    else:
        tanh(said, out=said)
        torch.lerp(at.updated, said, heed.sigmoid_(), out=at.output)
