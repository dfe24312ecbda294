"""The time loop of the `batched` backend; `backward` has the way back.

All that does not depend on the state comes in precomputed (`batched.prepare`), products of two
weight matrices come in multiplied out, and weight gradients are gathered after the backward loop,
each as one large product. What is left in the loop is a handful of products of [B * F, D].

All that is linear in the state, the gates of every schema and the schema query, has one weight
matrix. Its columns are laid out gate by gate, schema by schema, S * D columns to a gate, then the
query: r u m q for the GRU, where m = W_hn h + b_hn, and i f o g q for the LSTM. The input adds to
n r u and to i f o g.

On a CPU at usual sizes, a third of the time would go into calling torch. So views are made before
the loops, and what takes a detour to spare a pass or a call says so.

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
    choice: Tensor | None  # [T, B, F]


class Settings(NamedTuple):
    lstm: bool
    active: int
    mean: bool
    temperature: float
    detach: bool  # what is asked of the input, from the state
    keep: bool  # whether every step's intermediates are kept, for the backward pass or a trace


class Kept(NamedTuple):
    """Results, then intermediates. K = T steps, or 1 (the last, overwritten) without `keep`."""

    output: Tensor  # [T, B, F, D]
    state: Tensor  # [Z, B, F, D]
    attention: Tensor  # [K, B, F, R]
    probs: Tensor  # [K, S, B * F]: a softmax over the last, short axis is slow on a CPU
    talk: Tensor  # [K, B, F, F * H], read before reader
    choice: Tensor  # [K, B, F]
    active: Tensor  # [K, B, F]
    before: Tensor  # [K, Z, B, F, D] the state that the step started from
    gates: Tensor  # [K, B * F * (gates * S * D + D)], the three blocks of `gate_blocks`
    extra: Tensor  # [K, B * F, S * D] the GRU's n, the LSTM's tanh(c)
    said: Tensor  # [K, B * F, 2 D] tanh(message) and the gate, gated communication


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
        probs=new(k, s, b * f),
        talk=new(k, b, f, f * h),
        choice=new((k, b, f), dtype=torch.int64),
        active=new((k, b, f), dtype=torch.bool),
        before=new(k, z, b, f, d),
        gates=new(k, b * f * len(p.weight_h)),
        extra=new(k, b * f, s * d),
        said=new(k, b * f, 2 * d if gated else 0),
    )


def num_schemata(p: Prepared, settings: Settings) -> int:
    return p.weight_h.shape[0] // ((4 if settings.lstm else 3) * p.state.shape[-1])


def gate_blocks(kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
    """r u or i f o g after their nonlinearity, and m (of the GRU) and q  [K, B * F, ...].

    Each block is whole, for sigmoid is slow on slices, and slices of what has left the cache are
    slow to read. They share one buffer because large ones stay with the process when freed, while
    to get many smaller ones anew costs page faults.
    """
    (rows, size), d = kept.extra.shape[1:], kept.before.shape[-1]
    columns = kept.gates.shape[1] // rows
    inner = 0 if columns == 4 * size + d else size
    widths = columns - inner - d, inner, d
    blocks = kept.gates.split([rows * width for width in widths], 1)
    gates, m, q = (x.unflatten(1, (rows, n)) for x, n in zip(blocks, widths, strict=True))
    return gates, m, q


class Step(NamedTuple):
    """Views of one step of `Kept`, in every shape that the loops want them in.

    All are made before the loop: one by one in it, they would cost as much as the small operations.
    """

    output: Tensor  # [B, F, D]
    attention: Tensor  # [B, F, R]
    probs: Tensor  # [S, B * F]
    talk: Tensor  # [B, F, F * H]
    talk_by_reader: Tensor  # [B, F * H, F]
    choice: Tensor  # [B * F]
    active: Tensor  # [B, F]
    before: tuple[Tensor, ...]  # [B, F, D] each
    h_rows: Tensor  # [B * F, D]
    old: Tensor  # [B * F, 1, D] h, or the LSTM's c
    gates: Tensor  # [B * F, 2 or 4 * S * D]
    gates_by_file: Tensor  # [B, F, 2 or 4 * S * D]
    gate: tuple[Tensor, ...]  # [B * F, S, D] each of them
    m_rows: Tensor  # [B * F, S * D] of the GRU
    m: Tensor  # [B * F, S, D] of the GRU
    query_rows: Tensor  # [B * F, D]
    query: Tensor  # [B * F, 1, D]
    extra: Tensor  # [B * F, S * D]
    extra_by_file: Tensor  # [B, F, S * D]
    extra_by_schema: Tensor  # [B * F, S, D]
    message: Tensor  # [B * F, 2 D]
    said: Tensor  # [B, F, D] of `message`
    heed: Tensor  # [B, F, D] the gate of `message`


def by_step(kept: Kept, steps: int) -> list[Step]:
    def views(x: Tensor) -> Sequence[Tensor]:
        return x.unbind(0) if len(x) == steps else [x[0]] * steps

    d, size = kept.before.shape[-1], kept.extra.shape[2]
    gates, m, query = gate_blocks(kept)
    files = kept.active.shape[1:]  # B, F
    said = kept.said.unflatten(1, files)
    return [
        Step(*row)
        for row in zip(
            views(kept.output),
            views(kept.attention),
            views(kept.probs),
            views(kept.talk),
            views(kept.talk.mT),
            views(kept.choice.flatten(1)),
            views(kept.active),
            zip(*(views(x) for x in kept.before.unbind(1)), strict=True),
            views(kept.before[:, 0].flatten(1, 2)),
            views(kept.before[:, -1].flatten(1, 2).unsqueeze(2)),
            views(gates),
            views(gates.unflatten(1, files)),
            zip(*(views(x.unflatten(2, (-1, d))) for x in gates.split(size, 2)), strict=True),
            views(m),
            views(m.unflatten(2, (-1, d))),
            views(query),
            views(query.unsqueeze(2)),
            views(kept.extra),
            views(kept.extra.unflatten(1, files)),
            views(kept.extra.unflatten(2, (-1, d))),
            views(kept.said),
            views(said[..., :d]),
            views(said[..., d:]),
            strict=True,
        )
    ]


def schema_major(p: Prepared, schemata: int) -> Tensor:
    """Work space [B * F, S, D], laid out schema by schema.

    With a factor that all schemata share, a CPU fills that in half of the time.
    """
    b, f, d = p.state.shape[1:]
    return p.state.new_empty(schemata, b * f, d).transpose(0, 1)


def unbind(x: Tensor | None) -> Sequence[Tensor]:
    """Step by step; nothing of nothing."""
    return () if x is None else x.unbind(0)


def forward_loop(p: Prepared, settings: Settings) -> Kept:
    kept = allocate(p, settings)
    _, b, f, d = p.state.shape
    s = num_schemata(p, settings)
    state = [*p.state]  # h, and for the LSTM c  [B, F, D] each
    # work space is allocated once: fresh memory at each step costs more than the work, on a CPU
    updated = [torch.empty_like(x) for x in state]  # after Step 3
    updated_rows = [x.view(b * f, d) for x in updated]
    *candidates, product = (schema_major(p, s) for _ in range(len(state) + 1))
    candidate_rows = [x.transpose(0, 1).flatten(0, 1) for x in candidates]
    hidden = hidden_blocks(p, kept)
    sources = input_blocks(p, kept)
    keys = unbind(None if p.keys is None else p.keys.mT)
    noise = unbind(None if p.noise is None else p.noise.flatten(1, 2).mT)
    logits, best = p.state.new_empty(s, b * f), p.state.new_empty(b * f)
    comm_mask = unbind(None if p.comm_mask is None else p.comm_mask.flatten(1, 2))
    ask_weight, say_weight = transposed(p.comm_query), transposed(p.comm_out)
    doubled = p.comm_bias is not None and sigmoid_is_faster(p.state)  # for `squash_`
    if say_weight is not None and doubled:
        say_weight = torch.cat([2 * say_weight[:, :d], say_weight[:, d:]], 1)
    heard = p.state.new_empty(b * f, 0 if say_weight is None else len(say_weight))
    heard_by_reader = heard.view(b, -1, d) if say_weight is not None else heard
    asked, asked_by_reader = queries(p)
    asked_columns = asked_by_reader.mT
    ungated = p.state.new_empty(b * f, d)
    rows = torch.arange(b * f, device=p.state.device)
    if p.keys is None:
        kept.attention.fill_(1)
    if p.comm_query is None:
        kept.talk.fill_(1)
    if settings.active == f:
        kept.active.fill_(True)

    for t, at in enumerate(by_step(kept, p.mix.shape[0])):
        for index, (old, new) in enumerate(zip(at.before, state, strict=True)):
            if p.reset is not None and p.restart is not None:
                torch.where(p.reset[t][:, None, None], p.restart[index], new, out=old)
            else:
                old.copy_(new)

        # Step 2
        if keys:
            torch.softmax(torch.bmm(at.before[0], keys[t]), 1, out=at.attention)
        if settings.active < f:
            at.active.copy_(most_attended(at.attention.sum(-1), settings.active))
        share = shares(at.attention, p.mix.shape[2], settings.mean)
        read = share if p.weight_ih is None else gather_values(share, p.mix[t])
        if p.weight_ih is None:
            blocks = at.gates_by_file, at.extra_by_file
        else:
            blocks = at.gates, at.extra
        for source, out in zip(sources, blocks, strict=False):
            read_input(source, t, read, out)

        # Step 3
        at.gates.addmm_(at.h_rows, hidden.gates)
        if not settings.lstm:
            linear(at.h_rows, hidden.m, hidden.bias, out=at.m_rows)
        torch.mm(at.h_rows, hidden.query, out=at.query_rows)
        if settings.lstm:
            squash_(at.gates, signed=at.gate[3], others=slice(3 * s * d))
        else:
            at.gates.sigmoid_()
        make_candidates(settings, at, candidates, fill=True)
        dot(candidates[0], at.query, product, out=logits)
        if noise:
            logits += noise[t]
        heated = logits if settings.temperature == 1 else logits / settings.temperature
        torch.softmax(heated, 0, out=at.probs)
        if p.choice is None:
            torch.max(logits, 0, out=(best, at.choice))  # argmax of this axis is slow on a CPU
        else:
            at.choice.copy_(p.choice[t].view_as(at.choice))
        chosen = torch.add(rows, at.choice, alpha=b * f)
        update = update_mask(p, settings, at.active, t)
        for of_all, new_rows in zip(candidate_rows, updated_rows, strict=True):
            torch.index_select(of_all, 0, chosen, out=new_rows)
        if update is not None:
            for new, old in zip(updated, at.before, strict=True):
                torch.where(update, new, old, out=new)

        # Step 4
        if say_weight is None:
            at.output.copy_(updated[0])
        else:
            if ask_weight is not None:
                torch.mm(at.h_rows, ask_weight, out=asked)
                torch.softmax(torch.bmm(updated[0], asked_columns), 1, out=at.talk)
            torch.bmm(at.talk_by_reader, updated[0], out=heard_by_reader)
            gated = p.comm_bias is not None
            message = at.message if gated else ungated
            linear(heard, say_weight, p.comm_bias, out=message)
            if comm_mask:
                message[:, :d].mul_(comm_mask[t])
            if gated:
                squash_(message, signed=at.said, others=slice(d, None), doubled=doubled)
                torch.lerp(updated[0], at.said, at.heed, out=at.output)
            else:
                torch.add(updated[0], message.view(b, f, d), out=at.output)
            if update is not None:
                torch.where(update, at.output, at.before[0], out=at.output)
        state = [at.output, *updated[1:]]
    torch.stack(state, out=kept.state)
    return kept


class Hidden(NamedTuple):
    """What multiplies the state, laid out for the loop."""

    gates: Tensor  # [D, 2 or 4 * S * D]
    m: Tensor  # [D, S * D] of the GRU
    query: Tensor  # [D, D]
    bias: Tensor | None  # of m; that of the gates comes with the input, and the query has none


def hidden_blocks(p: Prepared, kept: Kept) -> Hidden:
    parts = [x.shape[2] for x in gate_blocks(kept)]
    bias = None if p.bias_h is None else p.bias_h.split(parts)[1]
    gates, m, query = p.weight_h.T.contiguous().split(parts, 1)
    return Hidden(gates, m, query, bias)


class Source(NamedTuple):
    """How the input reaches a block of gates."""

    bias: Tensor  # [columns], or nothing to speak of; times `scale`
    mix: Sequence[Tensor]  # of every step [B, R, columns]
    weight: Tensor | None  # [V, columns], instead of `mix`
    scale: int  # of what is read


def input_blocks(p: Prepared, kept: Kept) -> list[Source]:
    """Of `gates`, and for the GRU of n."""
    columns = p.mix.shape[-1] if p.weight_ih is None else len(p.weight_ih)
    inner = gate_blocks(kept)[0].shape[2]
    bias = p.mix.new_zeros(columns)
    if p.bias_ih is not None and p.bias_h is not None:
        bias += p.bias_ih
        bias[columns - inner :] += p.bias_h[:inner]
    blocks = [(slice(columns - inner, columns), 1)]
    if inner < columns:
        blocks.append((slice(columns - inner), tanh_scale(p.mix)))
    weight = transposed(p.weight_ih)
    return [
        Source(
            bias[block] * scale,
            () if weight is not None else p.mix.squeeze(3)[..., block].unbind(0),
            None if weight is None else weight[:, block],
            scale,
        )
        for block, scale in blocks
    ]


def read_input(source: Source, t: int, read: Tensor, out: Tensor) -> None:
    """scale * (W_ih z + b) of gates; `read` is z, or by file the shares of the values in it."""
    if source.weight is not None:
        torch.addmm(source.bias, read, source.weight, alpha=source.scale, out=out)
        return
    if read.shape[-1] == 1:
        torch.addcmul(source.bias, read, source.mix[t], value=source.scale, out=out)
    else:
        torch.baddbmm(source.bias, read, source.mix[t], alpha=source.scale, out=out)


def transposed(weight: Tensor | None) -> Tensor | None:
    """Laid out anew: as a factor on the right it is faster on a CPU than its transposed view."""
    return None if weight is None else weight.T.contiguous()


def queries(p: Prepared) -> tuple[Tensor, Tensor]:
    """Room for communication queries, in the space of the state: [B * F, H * D], [B, F * H, D]"""
    b, f, d = p.state.shape[1:]
    rows = p.state.new_empty(b * f, 0 if p.comm_query is None else len(p.comm_query))
    return rows, rows.view(b, rows.shape[1] // d * f, d)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def dot(a: Tensor, b: Tensor, work: Tensor, out: Tensor) -> None:
    """Of [N, S, D] and [N, 1, D], over D, to [S, N]; overwrites `work`."""
    torch.sum(torch.mul(a, b, out=work), -1, out=out.T)


MINUS_ONE = torch.tensor(-1.0, device="cpu")


def sigmoid_is_faster(x: Tensor) -> bool:
    """Whether tanh(x) is to be computed as 2 sigmoid(2 x) - 1.

    torch's vectorised tanh is several times slower than its sigmoid on some CPUs. The detour is
    exact to the rounding of numbers near 1, which in half precision would be too coarse.
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def tanh(x: Tensor, out: Tensor) -> None:
    if sigmoid_is_faster(x):
        tanh_scaled_(torch.mul(x, tanh_scale(x), out=out))
    else:
        torch.tanh(x, out=out)


def tanh_scale(x: Tensor) -> int:
    """Of what `tanh_scaled_` takes: to double it on the way there spares a pass."""
    return 2 if sigmoid_is_faster(x) else 1


def tanh_scaled_(x: Tensor) -> None:
    if sigmoid_is_faster(x):
        torch.add(MINUS_ONE, x.sigmoid_(), alpha=2, out=x)
    else:
        x.tanh_()


def squash_(x: Tensor, signed: Tensor, others: slice, doubled: bool = False) -> None:
    """tanh of the view `signed` of x, sigmoid of the other columns; in one pass on a CPU.

    `doubled`: `signed` is already times two, as sigmoid wants it.

    It works through whole memory much faster than through slices, whose rows end in odd lengths.
    """
    if sigmoid_is_faster(x):
        if not doubled:
            signed.mul_(2)
        x.sigmoid_()
        torch.add(MINUS_ONE, signed, alpha=2, out=signed)
    else:
        signed.tanh_()
        x[:, others].sigmoid_()


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


def make_candidates(
    settings: Settings, at: Step, out: Sequence[Tensor], fill: bool = False
) -> None:
    """Every schema's new h, and for the LSTM c, from the old h or c  [B * F, S, D] each

    `fill`: `extra` is to be made; for the GRU it holds the input's part of n so far, scaled.
    """
    extra = at.extra_by_schema
    if settings.lstm:
        i, f, o, g = at.gate
        torch.mul(i, g, out=out[1]).addcmul_(f, at.old)
        if fill:
            tanh(out[1], out=extra)
        torch.mul(o, extra, out=out[0])
        return
    if fill:
        tanh_scaled_(extra.addcmul_(at.gate[0], at.m, value=tanh_scale(extra)))
    torch.lerp(extra, at.old, at.gate[1], out=out[0])  # (1 - u) n + u h
