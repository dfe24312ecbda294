"""The time loop of the `batched` backend; `backward` has the way back.

All that does not depend on the state comes in precomputed (`batched.prepare`), products of two
weight matrices come in multiplied out, and weight gradients are gathered after the backward loop,
each as one large product. What is left in the loop is a handful of products of [B * F, D].

All that is linear in the state, the gates of every schema and the schema query, is one product.
Its columns are laid out gate by gate, schema by schema, S * D columns to a gate, then the query:
r u m q for the GRU, where m = W_hn h + b_hn, and i f o g q for the LSTM. The input adds to n r u
and to i f o g.

Memory counts as much as arithmetic: what is cheap to compute again is not kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.reference import most_attended
from scoff.ops.scoff.types import epsilon


class Prepared(NamedTuple):
    """Tensors of the loop. R = heads * P rows of the input; H communication heads."""

    state: Tensor  # [Z, B, F, D]
    restart: Tensor | None  # [Z, B, F, D]
    keys: Tensor | None  # [T, B, R, D], in the space of the state; None: one object file sees all
    mix: Tensor  # [T, B, heads, P, V] values, or [T, B, R, 1, gates * S * D] without weight_ih
    weight_ih: Tensor | None  # [gates * S * D, V]
    bias_ih: Tensor | None  # [gates * S * D]
    weight_h: Tensor  # [gates * S * D + D, D], the last D rows the schema query
    bias_h: Tensor | None  # [gates * S * D + D]
    comm_query: Tensor | None  # [H * D, D]; None: one object file hears only itself
    comm_out: Tensor | None  # [D, H * D], gated: [2 D, H * D]; None: no communication
    comm_bias: Tensor | None  # [2 D]
    reset: Tensor | None  # [T, B]
    valid: Tensor | None  # [T, B]
    noise: Tensor | None  # [T, B, F, S]
    comm_mask: Tensor | None  # [T, B, F, D]


class Settings(NamedTuple):
    lstm: bool
    active: int
    mean: bool
    temperature: float
    keep: bool  # whether every step's intermediates are kept, for the backward pass or a trace


class Kept(NamedTuple):
    """Results, then intermediates. K = T steps, or 1 (the last, overwritten) without `keep`."""

    output: Tensor  # [T, B, F, D]
    state: Tensor  # [Z, B, F, D]
    attention: Tensor  # [K, B, F, R]
    probs: Tensor  # [K, B, F, S]
    talk: Tensor  # [K, B, F, F * H], read before reader
    choice: Tensor  # [K, B, F]
    active: Tensor  # [K, B, F]
    before: Tensor  # [K, Z, B, F, D] the state that the step started from
    gates: Tensor  # [K, B * F, gates * S * D + D], after their nonlinearity
    extra: Tensor  # [K, B * F, S * D] the GRU's n, the LSTM's tanh(c)
    updated: Tensor  # [K, B, F, D] h after Step 3
    said: Tensor  # [K, B, F, D] tanh(message), gated communication
    gate: Tensor  # [K, B, F, D]


def allocate(p: Prepared, settings: Settings) -> Kept:
    z, b, f, d = p.state.shape
    t, rows = p.mix.shape[0], p.mix.shape[2] * p.mix.shape[3]
    k = t if settings.keep else 1
    s = num_schemata(p, settings)
    h = 0 if p.comm_out is None else p.comm_out.shape[1] // d
    gated = p.comm_bias is not None
    new = p.state.new_empty
    return Kept(
        output=new(t, b, f, d),
        state=new(z, b, f, d),
        attention=new(k, b, f, rows),
        probs=new(k, b, f, s),
        talk=new(k, b, f, f * h),
        choice=new((k, b, f), dtype=torch.int64),
        active=new((k, b, f), dtype=torch.bool),
        before=new(k, z, b, f, d),
        gates=new(k, b * f, p.weight_h.shape[0]),
        extra=new(k, b * f, s * d),
        updated=new(k, b, f, d),
        said=new(k, b, f, d if gated else 0),
        gate=new(k, b, f, d if gated else 0),
    )


def num_schemata(p: Prepared, settings: Settings) -> int:
    return p.weight_h.shape[0] // ((4 if settings.lstm else 3) * p.state.shape[-1])


def by_step(kept: Kept, steps: int) -> list[Kept]:
    """Views of what is kept, step by step; `state` is left as it is."""

    def views(name: str, x: Tensor) -> Sequence[Tensor]:
        if name == "state":
            return [x] * steps
        return x.unbind(0) if len(x) == steps else [x[0]] * steps

    columns = [views(name, x) for name, x in kept._asdict().items()]
    return [Kept(*row) for row in zip(*columns, strict=True)]


class Scratch:
    """Work space that is allocated once and used again at every step.

    Fresh memory for each intermediate costs page faults, which on a CPU cost more than the work.
    """

    def __init__(self, like: Tensor):
        self.like = like
        self.buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        key = (name, shape)
        if key not in self.buffers:
            self.buffers[key] = self.like.new_empty(shape)
        return self.buffers[key]


def forward_loop(p: Prepared, settings: Settings) -> Kept:
    kept = allocate(p, settings)
    scratch = Scratch(p.state)
    _, b, f, d = p.state.shape
    s = num_schemata(p, settings)
    state = [*p.state]  # h, and for the LSTM c  [B, F, D] each
    first_candidate = torch.arange(0, b * f * s, s, device=p.state.device)
    if p.keys is None:
        kept.attention.fill_(1)
    if p.comm_query is None:
        kept.talk.fill_(1)
    if settings.active == f:
        kept.active.fill_(True)

    for t, at in enumerate(by_step(kept, p.mix.shape[0])):
        before, attention, gates, extra = at.before, at.attention, at.gates, at.extra
        torch.stack(state, out=before)
        if p.reset is not None and p.restart is not None:
            torch.where(p.reset[t][None, :, None, None], p.restart, before, out=before)
        h = before[0].view(b * f, d)

        # Step 2
        if p.keys is not None:
            torch.softmax(torch.bmm(before[0], p.keys[t].mT), 1, out=attention)
        if settings.active < f:
            at.active.copy_(most_attended(attention.sum(-1), settings.active))
        input_gates = read_input(p, settings, t, attention, scratch)

        # Step 3
        fill_gates(p, settings, h, input_gates, gates, extra)
        if settings.lstm:
            tanh(lstm_candidate_c(before[1], gates, scratch), out=extra)
        candidates = make_candidates(settings, before, gates, extra, scratch)
        logits = dot(candidates[0].view(b * f, s, d), gates[:, None, -d:], scratch)
        if p.noise is not None:
            logits = logits + p.noise[t].view(b * f, s)
        torch.softmax(logits / settings.temperature, -1, out=at.probs.view(b * f, s))
        chosen = torch.argmax(logits, -1, out=at.choice.view(b * f)) + first_candidate
        update = update_mask(p, settings, at.active, t)
        updated = at.updated
        state = [updated, scratch("c", b, f, d)][: len(state)]
        for new, old, candidate in zip(state, before, candidates, strict=True):
            rows = candidate.view(b * f * s, d)
            torch.index_select(rows, 0, chosen, out=new.view(b * f, d))
            if update is not None:
                torch.where(update, new, old, out=new)

        # Step 4
        new_h = at.output
        if p.comm_out is None:
            new_h.copy_(updated)
        else:
            if p.comm_query is not None:
                asked = ask(p, h, scratch)
                torch.softmax(torch.bmm(updated, asked.mT), 1, out=at.talk)
            heard = scratch("heard", b * f, p.comm_out.shape[1])
            torch.bmm(at.talk.mT, updated, out=heard.view(b, -1, d))
            message = linear(heard, p.comm_out, p.comm_bias, scratch, "message")
            if p.comm_mask is not None:
                message[:, :d].mul_(p.comm_mask[t].view(b * f, d))
            if p.comm_bias is None:
                torch.add(updated, message.view(b, f, d), out=new_h)
            else:
                tanh(message[:, :d].view(b, f, d), out=at.said)
                torch.sigmoid(message[:, d:].view(b, f, d), out=at.gate)
                torch.lerp(updated, at.said, at.gate, out=new_h)
            if update is not None:
                torch.where(update, new_h, before[0], out=new_h)
        state[0] = new_h
    torch.stack(state, out=kept.state)
    return kept


def ask(p: Prepared, h: Tensor, scratch: Scratch) -> Tensor:
    """Communication queries, in the space of the state  [B, F * H, D]"""
    assert p.comm_query is not None
    out = scratch("asked", h.shape[0], p.comm_query.shape[0])
    return torch.mm(h, p.comm_query.T, out=out).view(p.state.shape[1], -1, h.shape[1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Scratch, name: str) -> Tensor:
    out = scratch(name, x.shape[0], weight.shape[0])
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def dot(a: Tensor, b: Tensor, scratch: Scratch) -> Tensor:
    """Of [N, S, D] and [N, 1, D], over D."""
    return torch.mul(a, b, out=scratch("product", *a.shape)).sum(-1)


def tanh(x: Tensor, out: Tensor) -> Tensor:
    # torch's vectorised tanh is several times slower than its sigmoid on some CPUs. The detour is
    # exact to the rounding of numbers near 1, which in half precision would be too coarse
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        torch.mul(x, 2, out=out).sigmoid_()
        return torch.add(out.new_tensor(-1), out, alpha=2, out=out)
    return torch.tanh(x, out=out)


def update_mask(p: Prepared, settings: Settings, active: Tensor, t: int) -> Tensor | None:
    """Which object files change at step t [B, F, 1]; None: all."""
    if settings.active == p.state.shape[2]:
        return None if p.valid is None else p.valid[t][:, None, None]
    return active[..., None] if p.valid is None else (active & p.valid[t][:, None])[..., None]


def shares(attention: Tensor, heads: int, mean: bool) -> Tensor:
    """The weights of the values: the attention, or its mean over positions  [..., F, R]."""
    if not mean:
        return attention
    by_head = attention.unflatten(-1, (heads, -1))
    return (by_head / (by_head.sum(-1, keepdim=True) + epsilon(attention.dtype))).flatten(-2)


def by_heads(share: Tensor, heads: int) -> Tensor:
    """[..., F, heads * P] -> [..., heads, F, P]"""
    return share.unflatten(-1, (heads, -1)).transpose(-3, -2)


def gather_values(share: Tensor, values: Tensor) -> Tensor:
    """z: [B, F, heads * P], [B, heads, P, V / heads] -> [B * F, V]"""
    read = torch.matmul(by_heads(share, values.shape[-3]), values)  # [B, heads, F, V / heads]
    return read.transpose(-3, -2).reshape(share.shape[-3] * share.shape[-2], -1)


def read_input(
    p: Prepared, settings: Settings, t: int, attention: Tensor, scratch: Scratch
) -> Tensor:
    """W_ih z + b_ih  [B * F, gates * S * D]"""
    mix = p.mix[t]
    share = shares(attention, p.mix.shape[2], settings.mean)
    if p.weight_ih is not None:
        return linear(gather_values(share, mix), p.weight_ih, p.bias_ih, scratch, "input_gates")
    out = scratch("input_gates", *attention.shape[:2], p.mix.shape[-1])
    bias = p.mix.new_zeros(()) if p.bias_ih is None else p.bias_ih
    if share.shape[-1] == 1:
        torch.addcmul(bias, share, mix.squeeze(2), out=out)
    else:
        torch.baddbmm(bias, share, mix.squeeze(2), out=out)
    return out.flatten(0, 1)


def fill_gates(
    p: Prepared, settings: Settings, h: Tensor, input_gates: Tensor, gates: Tensor, n: Tensor
) -> None:
    """r u m q and n of the GRU, or i f o g q of the LSTM"""
    if p.bias_h is None:
        torch.mm(h, p.weight_h.T, out=gates)
    else:
        torch.addmm(p.bias_h, h, p.weight_h.T, out=gates)
    size = n.shape[1]
    if settings.lstm:
        gates[:, : 4 * size].add_(input_gates)
        gates[:, : 3 * size].sigmoid_()
        g = gates[:, 3 * size : 4 * size]
        tanh(g, out=g)
    else:
        gates[:, : 2 * size].add_(input_gates[:, size:]).sigmoid_()
        r, m = gates[:, :size], gates[:, 2 * size : 3 * size]
        tanh(input_gates[:, :size].addcmul_(r, m), out=n)


def make_candidates(
    settings: Settings, before: Tensor, gates: Tensor, extra: Tensor, scratch: Scratch
) -> list[Tensor]:
    """Every schema's new h, and for the LSTM c  [B * F, S * D] each"""
    rows, size = extra.shape
    out = scratch("candidate_h", rows, size)
    if settings.lstm:
        torch.mul(gates[:, 2 * size : 3 * size], extra, out=out)
        return [out, lstm_candidate_c(before[1], gates, scratch)]
    # (1 - u) n + u h = n + u (h - n)
    change = gru_change(before[0], extra, scratch)
    return [torch.addcmul(extra, gates[:, size : 2 * size], change, out=out)]


def gru_change(h: Tensor, n: Tensor, scratch: Scratch) -> Tensor:
    """h - n, for every schema's n  [B * F, S * D]"""
    rows, size = n.shape
    out = scratch("change", rows, size)
    by_schema = (rows, -1, h.shape[-1])
    torch.sub(h.view(rows, 1, -1), n.view(by_schema), out=out.view(by_schema))
    return out


def lstm_candidate_c(c: Tensor, gates: Tensor, scratch: Scratch) -> Tensor:
    d = c.shape[-1]
    i, f, _, g, _ = gates.split([*[(gates.shape[1] - d) // 4] * 4, d], -1)
    new_c = torch.mul(i, g, out=scratch("candidate_c", *i.shape))
    by_schema = (gates.shape[0], -1, d)
    new_c.view(by_schema).addcmul_(f.view(by_schema), c.view(-1, 1, d))
    return new_c
