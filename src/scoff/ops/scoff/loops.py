"""The time loops of the `batched` backend, forward and hand-written backward.

All that does not depend on the state comes in precomputed (`batched.prepare`), products of two
weight matrices come in multiplied out, and weight gradients are gathered after the backward loop,
each as one large product. What is left in the loop is a handful of products of [B * F, D].

All that is linear in the state, the gates of every schema and the schema query, is one product.
Its columns are laid out gate by gate, schema by schema, S * D columns to a gate, then the query:
r u m q for the GRU, where m = W_hn h + b_hn, and i f o g q for the LSTM. The input adds to n r u
and to i f o g.

Memory counts as much as arithmetic: what is cheap to compute again is not kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.reference import most_attended
from scoff.ops.scoff.types import EPSILON

softmax_backward = torch.ops.aten._softmax_backward_data
sigmoid_backward = torch.ops.aten.sigmoid_backward
tanh_backward = torch.ops.aten.tanh_backward


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


class Scratch:
    """Work space that is allocated once and used again at every step.

    Fresh memory for each intermediate costs page faults, which on a CPU cost more than the work.
    """

    def __init__(self, like: Tensor):
        self.like = like
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = self.like.new_empty(shape)
        return self.buffers[name]


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

    for t in range(p.mix.shape[0]):
        i = t if settings.keep else 0
        before = kept.before[i]
        torch.stack(state, out=before)
        if p.reset is not None and p.restart is not None:
            torch.where(p.reset[t][None, :, None, None], p.restart, before, out=before)
        h = before[0].view(b * f, d)

        # Step 2
        attention = kept.attention[i]
        if p.keys is not None:
            torch.softmax(torch.bmm(before[0], p.keys[t].mT), 1, out=attention)
        if settings.active < f:
            kept.active[i] = most_attended(attention.sum(-1), settings.active)
        input_gates = read_input(p, settings, t, attention, scratch)

        # Step 3
        gates, extra = kept.gates[i], kept.extra[i]
        fill_gates(p, settings, h, input_gates, gates, extra)
        if settings.lstm:
            tanh(lstm_candidate_c(before[1], gates, scratch), out=extra)
        candidates = make_candidates(settings, before, gates, extra, scratch)
        logits = dot(candidates[0].view(b * f, s, d), gates[:, None, -d:], scratch)
        if p.noise is not None:
            logits = logits + p.noise[t].view(b * f, s)
        torch.softmax(logits / settings.temperature, -1, out=kept.probs[i].view(b * f, s))
        chosen = torch.argmax(logits, -1, out=kept.choice[i].view(b * f)) + first_candidate
        update = update_mask(p, settings, kept.active[i], t)
        updated = kept.updated[i]
        state = [updated, scratch("c", b, f, d)][: len(state)]
        for new, old, candidate in zip(state, before, candidates, strict=True):
            rows = candidate.view(b * f * s, d)
            torch.index_select(rows, 0, chosen, out=new.view(b * f, d))
            if update is not None:
                torch.where(update, new, old, out=new)

        # Step 4
        new_h = kept.output[t]
        if p.comm_out is None:
            new_h.copy_(updated)
        else:
            if p.comm_query is not None:
                asked = ask(p, h, scratch)
                torch.softmax(torch.bmm(updated, asked.mT), 1, out=kept.talk[i])
            heard = scratch("heard", b * f, p.comm_out.shape[1])
            torch.bmm(kept.talk[i].mT, updated, out=heard.view(b, -1, d))
            message = linear(heard, p.comm_out, p.comm_bias, scratch, "message")
            if p.comm_mask is not None:
                message[:, :d].mul_(p.comm_mask[t].view(b * f, d))
            if p.comm_bias is None:
                torch.add(updated, message.view(b, f, d), out=new_h)
            else:
                said, gate = kept.said[i], kept.gate[i]
                tanh(message[:, :d].view(b, f, d), out=said)
                torch.sigmoid(message[:, d:].view(b, f, d), out=gate)
                torch.lerp(updated, said, gate, out=new_h)
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
    # torch's vectorised tanh is several times slower than its sigmoid on some CPUs; in half
    # precision the detour would cost accuracy
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
    return (by_head / (by_head.sum(-1, keepdim=True) + EPSILON)).flatten(-2)


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
    by_schema = (rows, -1, before.shape[-1])
    u = gates[:, size : 2 * size].view(by_schema)
    h = before[0].view(rows, 1, -1)
    torch.lerp(extra.view(by_schema), h, u, out=out.view(by_schema))
    return [out]


def lstm_candidate_c(c: Tensor, gates: Tensor, scratch: Scratch) -> Tensor:
    d = c.shape[-1]
    i, f, _, g, _ = gates.split([*[(gates.shape[1] - d) // 4] * 4, d], -1)
    new_c = torch.mul(i, g, out=scratch("candidate_c", *i.shape))
    by_schema = (gates.shape[0], -1, d)
    new_c.view(by_schema).addcmul_(f.view(by_schema), c.view(-1, 1, d))
    return new_c


class Gradients(NamedTuple):
    """Of `Prepared`, in its order; empty where there is nothing."""

    state: Tensor
    restart: Tensor
    keys: Tensor
    mix: Tensor
    weight_ih: Tensor
    bias_ih: Tensor
    weight_h: Tensor
    bias_h: Tensor
    comm_query: Tensor
    comm_out: Tensor
    comm_bias: Tensor


def backward_loop(
    p: Prepared,
    settings: Settings,
    kept: Kept,
    d_output: Tensor,
    d_state: Tensor,
    d_attention: Tensor | None,
    d_probs: Tensor | None,
    d_talk: Tensor | None,
) -> Gradients:
    """d_* are the gradients of the `Kept` of the same name; the last three are often not used."""
    b, f, d = p.state.shape[1:]
    t_all, s = p.mix.shape[0], num_schemata(p, settings)
    total = start_gradients(p)
    scratch = Scratch(p.state)
    # weight gradients are gathered over this many steps at a time: enough rows for an efficient
    # product, few enough to stay in a CPU's cache
    chunk = t_all if p.state.is_cuda else min(t_all, -(-CHUNK_ROWS // (b * f)))
    late = allocate_late(p, kept, chunk)
    zero = p.state.new_zeros(())

    carried = [x.clone() for x in d_state]  # from the step after: of h, and for the LSTM of c
    d_new, d_read = scratch("d_new", b, f, d), scratch("d_read", b, f, d)
    work = scratch("work", b, f, d)
    for t in reversed(range(t_all)):
        at = t % chunk
        before = kept.before[t]
        h = before[0].view(b * f, d)
        torch.add(carried[0], d_output[t], out=d_new)
        d_h = carried[0].view(b * f, d)  # takes what goes to the step before
        update = update_mask(p, settings, kept.active[t], t)
        if update is None:
            d_h.zero_()
        else:
            torch.where(update, zero, d_new, out=carried[0])
            torch.where(update, d_new, zero, out=d_new)

        # Step 4
        if p.comm_out is not None:
            updated, talk = kept.updated[t], kept.talk[t]
            d_message = late.message[at]
            if p.comm_bias is None:
                d_message.copy_(d_new.view(b * f, d))
            else:
                said, gate = kept.said[t], kept.gate[t]
                d_said, d_gate = (part.view(b, f, d) for part in d_message.split(d, -1))
                torch.sub(said, updated, out=work).mul_(d_new)
                sigmoid_backward(work, gate, grad_input=d_gate)
                torch.mul(d_new, gate, out=work)
                tanh_backward(work, said, grad_input=d_said)
                d_new.sub_(work)
            if p.comm_mask is not None:
                d_message[:, :d].mul_(p.comm_mask[t].view(b * f, d))
            d_heard = scratch("d_heard", b * f, p.comm_out.shape[1])
            d_heard = torch.mm(d_message, p.comm_out, out=d_heard).view(b, -1, d)  # [B, F * H, D]
            torch.bmm(talk, d_heard, out=d_read)  # what reading asks of those who are read
            if p.comm_query is not None:
                d_t = torch.bmm(updated, d_heard.mT)
                if d_talk is not None:
                    d_t = d_t + d_talk[t]
                d_scores = softmax_backward(d_t, talk, 1, talk.dtype)
                d_read.baddbmm_(d_scores, ask(p, h, scratch))
                torch.bmm(d_scores.mT, updated, out=late.comm_query[at].view(b, -1, d))
                d_h.addmm_(late.comm_query[at], p.comm_query)
            if update is not None:
                carried[0].add_(torch.where(update, zero, d_read, out=work))
                torch.where(update, d_read, zero, out=d_read)
            d_new.add_(d_read)

        # Step 3
        gates, extra = kept.gates[t], kept.extra[t]
        candidates = make_candidates(settings, before, gates, extra, scratch)
        by_schema = candidates[0].view(b * f, s, d)
        d_new_h, d_new_c = d_new.view(b * f, 1, d), None
        d_weights = dot(by_schema, d_new_h, scratch)
        if settings.lstm:
            d_new_c = carried[1].view(b * f, 1, d).clone()
            if update is None:
                carried[1].zero_()
            else:
                torch.where(update, zero, carried[1], out=carried[1])
                d_new_c.sub_(carried[1].view_as(d_new_c))
            d_weights = d_weights + dot(candidates[1].view(b * f, s, d), d_new_c, scratch)
        if d_probs is not None:
            d_weights = d_weights + d_probs[t].view(b * f, s)
        probs = kept.probs[t].view(b * f, s)
        d_logits = softmax_backward(d_weights, probs, -1, probs.dtype) / settings.temperature
        d_logits = d_logits[..., None]  # [B * F, S, 1]
        d_gates, query = late.gates[at], gates[:, -d:]
        product = torch.mul(by_schema, d_logits, out=scratch("product", b * f, s, d))
        torch.sum(product, 1, out=d_gates[:, -d:])
        # the chosen candidate gets the gradient of the state, each gets that of its logit
        chosen = torch.zeros_like(probs).scatter_(1, kept.choice[t].view(b * f, 1), 1)[..., None]
        d_candidate = torch.mul(chosen, d_new_h, out=scratch("d_candidate", b * f, s, d))
        d_candidate = d_candidate.addcmul_(d_logits, query[:, None]).flatten(1)
        if d_new_c is not None:
            d_candidate_c = (chosen * d_new_c).flatten(1)
            c, d_c = before[1].view(b * f, d), carried[1].view(b * f, d)
            lstm_backward(d_candidate, d_candidate_c, c, gates, extra, d_gates, d_c)
        else:
            gru_backward(d_candidate, h, gates, extra, d_gates, d_h, scratch)
        d_h.addmm_(d_gates[:, d_gates.shape[1] - p.weight_h.shape[0] :], p.weight_h)

        # Step 2
        d_input = d_gates[:, : p.weight_h.shape[0] - d]
        if p.weight_ih is not None:
            torch.mm(d_input, p.weight_ih, out=late.z[at])
        if p.keys is not None:
            d_s = d_attention_of(p, settings, t, kept.attention[t], d_input, late.z[at])
            if d_attention is not None:
                d_s = d_s + d_attention[t]
            late.scores[at] = softmax_backward(d_s, kept.attention[t], 1, d_s.dtype)
            if p.keys.shape[2] == 1:
                carried[0].addcmul_(late.scores[at], p.keys[t])
            else:
                carried[0].baddbmm_(late.scores[at], p.keys[t])

        if p.reset is not None and p.restart is not None:
            reset = p.reset[t][:, None, None]
            for d_restart, d_carried in zip(total.restart, carried, strict=True):
                d_restart.add_(torch.where(reset, d_carried, zero))
                torch.where(reset, zero, d_carried, out=d_carried)
        if at == 0:
            stop = min(t + chunk, t_all)
            gather_gradients(p, settings, kept, late, total, slice(t, stop))
    return Gradients(*(x.contiguous() for x in total._replace(state=torch.stack(carried))))


CHUNK_ROWS = 2048


class Late(NamedTuple):
    """What a chunk of steps (N) leaves for the products that are gathered after it."""

    gates: Tensor  # [N, B * F, 4 * S * D + D], before their nonlinearity: n r u m q or i f o g q
    z: Tensor  # [N, B * F, V]
    scores: Tensor  # [N, B, F, R]
    comm_query: Tensor  # [N, B * F, H * D]
    message: Tensor  # [N, B * F, D or 2 D]
    heard: Tensor  # [N, B * F, H * D]


def allocate_late(p: Prepared, kept: Kept, chunk: int) -> Late:
    def like(x: Tensor) -> Tensor:
        return x.new_empty(chunk, *x.shape[1:])

    rows = kept.gates.shape[1]
    says, hears = (0, 0) if p.comm_out is None else p.comm_out.shape
    return Late(
        gates=p.state.new_empty(chunk, rows, 4 * kept.extra.shape[2] + p.state.shape[3]),
        z=p.state.new_empty(chunk, rows, 0 if p.weight_ih is None else p.weight_ih.shape[1]),
        scores=like(kept.attention),
        comm_query=p.state.new_empty(chunk, rows, 0 if p.comm_query is None else len(p.comm_query)),
        message=p.state.new_empty(chunk, rows, says),
        heard=p.state.new_empty(chunk, rows, hears),
    )


def start_gradients(p: Prepared) -> Gradients:
    """Zeros for what is summed, space for what is written once, nothing for what is not there."""

    def start(name: str) -> Tensor:
        x = getattr(p, name)
        if x is None or name == "state":
            return p.state.new_empty(0)
        if name in ("keys", "mix"):
            return torch.empty_like(x)
        return (
            x.new_zeros(x.shape[::-1]).T
            if x.ndim == 2 and len(x) > x.shape[1]
            else torch.zeros_like(x)
        )

    return Gradients(*(start(name) for name in Gradients._fields))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right, the larger factor on the right, which is faster on a CPU"""
    if left.shape[1] > right.shape[1]:
        total.T.addmm_(right.T, left)
    else:
        total.addmm_(left.T, right)


def gather_gradients(
    p: Prepared, settings: Settings, kept: Kept, late: Late, total: Gradients, steps: slice
) -> None:
    """Adds what the steps ask of the weights and the input, each as one large product."""
    late = Late(*(x[: steps.stop - steps.start] for x in late))
    d = p.state.shape[-1]
    h = kept.before[steps, 0]  # [N, B, F, D]
    rows = h.reshape(-1, d)
    gates = late.gates.flatten(0, 1)
    d_input, d_hidden = (
        gates[:, : len(p.weight_h) - d],
        gates[:, gates.shape[1] - len(p.weight_h) :],
    )
    add_product(total.weight_h, d_hidden, rows)
    if p.bias_h is not None and p.bias_ih is not None:
        total.bias_h.add_(d_hidden.sum(0))
        total.bias_ih.add_(d_input.sum(0))
    if p.comm_out is not None:
        heard = late.heard.view(*h.shape[:2], -1, d)
        torch.matmul(kept.talk[steps].mT, kept.updated[steps], out=heard)
        add_product(total.comm_out, late.message.flatten(0, 1), late.heard.flatten(0, 1))
        if p.comm_bias is not None:
            total.comm_bias.add_(late.message.sum((0, 1)))
        if p.comm_query is not None:
            add_product(total.comm_query, late.comm_query.flatten(0, 1), rows)

    share = shares(kept.attention[steps], p.mix.shape[2], settings.mean)  # [N, B, F, R]
    d_mix = total.mix[steps]
    if p.keys is not None:
        torch.matmul(late.scores.mT, h, out=total.keys[steps])
    if p.weight_ih is not None:
        heads = p.mix.shape[2]
        z = gather_values(share.flatten(0, 1), p.mix[steps].flatten(0, 1))
        add_product(total.weight_ih, d_input, z)
        d_read = late.z.unflatten(1, share.shape[1:3]).unflatten(-1, (heads, -1)).transpose(2, 3)
        torch.matmul(by_heads(share, heads).mT, d_read, out=d_mix)
    else:
        d_input = d_input.unflatten(0, h.shape[:3])
        torch.matmul(share.mT, d_input, out=d_mix.squeeze(3))


def d_attention_of(
    p: Prepared, settings: Settings, t: int, attention: Tensor, d_input: Tensor, d_z: Tensor
) -> Tensor:
    """What the gates' gradient asks of the attention  [B, F, R]"""
    b, f, rows = attention.shape
    heads = p.mix.shape[2]
    if p.weight_ih is None:
        d_share = torch.bmm(d_input.unflatten(0, (b, f)), p.mix[t].squeeze(2).mT)
    else:
        d_read = d_z.view(b, f, heads, -1).transpose(1, 2)  # [B, heads, F, V / heads]
        d_share = (d_read @ p.mix[t].mT).transpose(1, 2).reshape(b, f, rows)
    if not settings.mean:
        return d_share
    d_share, by_head = (x.unflatten(-1, (heads, -1)) for x in (d_share, attention))
    total = by_head.sum(-1, keepdim=True) + EPSILON
    return ((d_share - (d_share * by_head).sum(-1, keepdim=True) / total) / total).flatten(-2)


def gru_backward(
    d_candidate: Tensor,
    h: Tensor,
    gates: Tensor,
    n: Tensor,
    d_gates: Tensor,
    d_h: Tensor,
    scratch: Scratch,
) -> None:
    """Fills `d_gates` but for the query, and adds the direct path to `d_h`."""
    size = n.shape[1]
    r, u, m, _ = gates.split([size, size, size, h.shape[1]], -1)
    d_n, d_r, d_u, d_m, _ = d_gates.split([size, size, size, size, h.shape[1]], -1)
    by_schema = (h.shape[0], -1, h.shape[1])
    product = torch.mul(d_candidate, u, out=scratch("gru_product", *n.shape))
    d_h.add_(product.view(by_schema).sum(1))
    torch.sub(d_candidate, product, out=product)
    tanh_backward(product, n, grad_input=d_n)
    torch.sub(h[:, None], n.view(by_schema), out=product.view(by_schema))
    sigmoid_backward(product.mul_(d_candidate), u, grad_input=d_u)
    sigmoid_backward(torch.mul(d_n, m, out=product), r, grad_input=d_r)
    torch.mul(d_n, r, out=d_m)


def lstm_backward(
    d_candidate: Tensor,
    d_candidate_c: Tensor,
    c: Tensor,
    gates: Tensor,
    tanh_c: Tensor,
    d_gates: Tensor,
    d_c: Tensor,
) -> None:
    """Fills `d_gates` but for the query, and adds to `d_c`."""
    parts = [*[tanh_c.shape[1]] * 4, c.shape[1]]
    i, f, o, g, _ = gates.split(parts, -1)
    d_i, d_f, d_o, d_g, _ = d_gates.split(parts, -1)
    by_schema = (c.shape[0], -1, c.shape[1])
    d_new_c = d_candidate_c + tanh_backward(d_candidate * o, tanh_c)
    sigmoid_backward(d_candidate * tanh_c, o, grad_input=d_o)
    sigmoid_backward(d_new_c * g, i, grad_input=d_i)
    tanh_backward(d_new_c * i, g, grad_input=d_g)
    d_forget = d_new_c.view(by_schema) * c[:, None]
    sigmoid_backward(d_forget.flatten(1), f, grad_input=d_f)
    d_c.add_((d_new_c * f).view(by_schema).sum(1))
