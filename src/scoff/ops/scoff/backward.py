"""The hand-written backward pass of the `batched` backend.

In the loop is only what the step before depends on; what is a sum over steps, every weight gradient
and the gradients of the input, is gathered after each chunk of steps, as one large product each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.forward import (
    Kept,
    Prepared,
    Scratch,
    Settings,
    Step,
    ask,
    by_heads,
    by_step,
    choose,
    dot,
    for_schemata,
    gather_values,
    make_candidates,
    num_schemata,
    shares,
    transposed,
    unbind,
    update_mask,
)
from scoff.ops.scoff.types import epsilon

# overloads: to find them anew at each call takes longer than some of the calls themselves
softmax_backward = torch.ops.aten._softmax_backward_data.default
softmax_backward_out = torch.ops.aten._softmax_backward_data.out
sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input

CHUNK_ROWS = 1024  # rows of B * F: enough for an efficient product, few enough for a CPU's cache


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
    chunk_rows = CHUNK_ROWS * (8 if p.state.is_cuda else 1)
    chunk = min(t_all, -(-chunk_rows // (b * f)))
    late = allocate_late(p, kept, chunk)
    zero = p.state.new_zeros(())
    keys, mix = unbind(p.keys), unbind(p.mix.squeeze(3).mT if p.weight_ih is None else p.mix.mT)
    weight_h, ask_weight = p.weight_h.T.contiguous(), transposed(p.comm_query)
    chosen = torch.zeros_like(kept.probs).scatter_(3, kept.choice[..., None], 1)
    chosen = chosen.view(t_all, b * f, s, 1).unbind(0)
    first_candidate = torch.arange(0, b * f * s, s, device=p.state.device)
    chosen_rows = (kept.choice.flatten(1) + first_candidate).unbind(0)

    # gradients of h, and for the LSTM of c, that come from the step after
    carried = [x.contiguous().clone() for x in d_state]
    d_h, d_c = (x.view(b * f, d) for x in (carried[0], carried[-1]))  # of the step before
    d_new, d_read = scratch("d_new", b, f, d), scratch("d_read", b, f, d)
    d_new_rows = d_new.view(b * f, 1, d)
    d_new_c = scratch("d_new_c", b * f, 1, d)
    work = scratch("work", b, f, d)
    d_heard = scratch("d_heard", b * f, late.heard.shape[2])
    d_heard_by_reader = d_heard.view(b, -1, d) if p.comm_out is not None else d_heard
    d_logits = scratch("d_logits", b * f, s)
    d_candidate = scratch("d_candidate", b * f, s, d)
    d_candidate_rows = d_candidate.view(b * f, s * d)
    d_h_t = scratch("d_h_t", d, b * f)
    d_outputs = d_output.unbind(0)
    steps, slots = by_step(kept, t_all), late_slots(p, late)
    for t in reversed(range(t_all)):
        at, later = steps[t], slots[t % chunk]
        torch.add(carried[0], d_outputs[t], out=d_new)
        update = update_mask(p, settings, at.active, t)
        if update is None:
            d_h.zero_()
        else:
            torch.where(update, zero, d_new, out=carried[0])
            torch.where(update, d_new, zero, out=d_new)

        # what the forward pass did not keep
        old = for_schemata(at.old, s, scratch)
        candidates = make_candidates(settings, at, old, scratch)

        # Step 4
        if p.comm_out is not None:
            updated = later.updated
            choose(candidates[0], chosen_rows[t], at.before[0], update, out=updated)
            if p.comm_bias is None:
                later.said.copy_(d_new)
            else:
                torch.sub(at.said, updated, out=work).mul_(d_new)
                sigmoid_backward(work, at.heed, grad_input=later.heed)
                torch.mul(d_new, at.heed, out=work)
                tanh_backward(work, at.said, grad_input=later.said)
                d_new.sub_(work)
            if p.comm_mask is not None:
                later.said.mul_(p.comm_mask[t])
            torch.mm(later.message, p.comm_out, out=d_heard)
            asked_back = d_new if update is None else d_read.zero_()  # of those who are read
            asked_back.baddbmm_(at.talk, d_heard_by_reader)
            if ask_weight is not None:
                d_t = torch.bmm(updated, d_heard_by_reader.mT)
                if d_talk is not None:
                    d_t += d_talk[t]
                d_scores = softmax_backward(d_t, at.talk, 1, d_t.dtype)
                asked_back.baddbmm_(d_scores, ask(ask_weight, at.h_rows, b, scratch))
                torch.bmm(d_scores.mT, updated, out=later.comm_query)
            if update is not None:
                carried[0].add_(torch.where(update, zero, d_read, out=work))
                d_new.add_(torch.where(update, d_read, zero, out=d_read))

        # Step 3
        candidates = [x.view(b * f, s, d) for x in candidates]
        d_weights = dot(candidates[0], d_new_rows, scratch)
        if settings.lstm:
            d_new_c.copy_(d_c[:, None])
            if update is None:
                d_c.zero_()
            else:
                torch.where(update, zero, carried[1], out=carried[1])
                d_new_c.sub_(d_c[:, None])
            d_weights += dot(candidates[1], d_new_c, scratch)
        if d_probs is not None:
            d_weights += d_probs[t].view(b * f, s)
        softmax_backward_out(d_weights, at.probs, -1, d_weights.dtype, grad_input=d_logits)
        if settings.temperature != 1:
            d_logits.div_(settings.temperature)
        product = torch.mul(candidates[0], d_logits[..., None], out=scratch("product", b * f, s, d))
        sum_schemata(product, out=later.query)
        # the chosen candidate gets the gradient of the state, each gets that of its logit
        torch.mul(chosen[t], d_new_rows, out=d_candidate).addcmul_(d_logits[..., None], at.query)
        if settings.lstm:
            d_candidate_c = torch.mul(chosen[t], d_new_c, out=candidates[1]).view(b * f, s * d)
            lstm_backward(d_candidate_rows, d_candidate_c, old, at, later, d_c, scratch)
        else:
            gru_backward(d_candidate_rows, old, at, later, d_h, scratch)
        # these products are faster on a CPU transposed, with many columns
        torch.mm(weight_h, later.hidden.T, out=d_h_t)
        if ask_weight is not None:
            d_h_t.addmm_(ask_weight, later.comm_query_rows.T)
        d_h.add_(d_h_t.T)

        # Step 2
        if p.weight_ih is not None:
            torch.mm(later.input, p.weight_ih, out=later.z)
        if keys:
            d_s = d_attention_of(p, settings, mix[t], at.attention, later)
            if d_attention is not None:
                d_s = d_s + d_attention[t]
            softmax_backward_out(d_s, at.attention, 1, d_s.dtype, grad_input=later.scores)
            if p.keys is not None and p.keys.shape[2] == 1:
                carried[0].addcmul_(later.scores, keys[t])
            else:
                carried[0].baddbmm_(later.scores, keys[t])

        if p.reset is not None and p.restart is not None:
            reset = p.reset[t][:, None, None]
            for d_restart, d_carried in zip(total.restart, carried, strict=True):
                d_restart.add_(torch.where(reset, d_carried, zero))
                torch.where(reset, zero, d_carried, out=d_carried)
        if t % chunk == 0:
            stop = min(t + chunk, t_all)
            gather_gradients(p, settings, kept, late, total, slice(t, stop))
    return Gradients(*(x.contiguous() for x in total._replace(state=torch.stack(carried))))


class Late(NamedTuple):
    """What a chunk of steps (N) leaves for the products that are gathered after it."""

    gates: Tensor  # [N, B * F, 4 * S * D + D], before their nonlinearity: n r u m q or i f o g q
    z: Tensor  # [N, B * F, V]
    scores: Tensor  # [N, B, F, R]
    comm_query: Tensor  # [N, B * F, H * D]
    updated: Tensor  # [N, B, F, D] h after Step 3
    message: Tensor  # [N, B * F, D or 2 D]
    heard: Tensor  # [N, B * F, H * D]


def allocate_late(p: Prepared, kept: Kept, chunk: int) -> Late:
    def like(x: Tensor) -> Tensor:
        return x.new_empty(chunk, *x.shape[1:])

    rows = kept.extra.shape[1]
    says, hears = (0, 0) if p.comm_out is None else p.comm_out.shape
    return Late(
        gates=p.state.new_empty(chunk, rows, 4 * kept.extra.shape[2] + p.state.shape[3]),
        z=p.state.new_empty(chunk, rows, 0 if p.weight_ih is None else p.weight_ih.shape[1]),
        scores=like(kept.attention),
        comm_query=p.state.new_empty(chunk, rows, 0 if p.comm_query is None else len(p.comm_query)),
        updated=like(kept.before[:, 0]),
        message=p.state.new_empty(chunk, rows, says),
        heard=p.state.new_empty(chunk, rows, hears),
    )


class Slot(NamedTuple):
    """Views of one step of `Late`, in every shape that the loop wants them in."""

    hidden: Tensor  # [B * F, gates * S * D + D] what the product with the state gave
    input: Tensor  # [B * F, gates * S * D] what the input added to
    input_by_file: Tensor  # [B, F, gates * S * D]
    n: Tensor  # [B * F, S * D] of the GRU
    squashed: Tensor  # [B * F, 2 or 4 * S * D] r u or i f o g
    m: Tensor  # [B * F, S * D] of the GRU
    query: Tensor  # [B * F, D]
    z: Tensor  # [B * F, V]
    scores: Tensor  # [B, F, R]
    comm_query: Tensor  # [B, F * H, D]
    comm_query_rows: Tensor  # [B * F, H * D]
    updated: Tensor  # [B, F, D]
    message: Tensor  # [B * F, D or 2 D]
    said: Tensor  # [B, F, D] of `message`
    heed: Tensor  # [B, F, D] of `message`


def late_slots(p: Prepared, late: Late) -> list[Slot]:
    (b, f, d), hidden = p.state.shape[1:], len(p.weight_h)
    inner = late.gates.shape[2] - hidden  # where the state's columns start: at 0 for the LSTM
    message = late.message.unflatten(1, (b, f))
    views = Slot(
        hidden=late.gates[..., inner:],
        input=late.gates[..., : hidden - d],
        input_by_file=late.gates[..., : hidden - d].unflatten(1, (b, f)),
        n=late.gates[..., :inner],
        squashed=late.gates[..., inner : hidden - d],
        m=late.gates[..., hidden - d : -d],
        query=late.gates[..., -d:],
        z=late.z,
        scores=late.scores,
        comm_query=late.comm_query.view(len(late.gates), b, -1, d)
        if late.comm_query.numel()
        else late.comm_query,
        comm_query_rows=late.comm_query,
        updated=late.updated,
        message=late.message,
        said=message[..., :d],
        heed=message[..., d:],
    )
    return [Slot(*row) for row in zip(*(x.unbind(0) for x in views), strict=True)]


def start_gradients(p: Prepared) -> Gradients:
    """Zeros for what is summed, space for what is written once, nothing for what is not there."""

    def start(name: str) -> Tensor:
        x = getattr(p, name)
        if x is None or name == "state":
            return p.state.new_empty(0)
        if name in ("keys", "mix"):
            return torch.empty_like(x)
        if x.ndim == 2 and len(x) > x.shape[1]:
            return x.new_zeros(x.shape[::-1]).T  # as `add_product` fills it
        return torch.zeros_like(x)

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
        sums = torch.mv(gates.T, gates.new_ones(len(gates)))  # faster on a CPU than the sum
        total.bias_h.add_(sums[-len(p.bias_h) :])
        total.bias_ih.add_(sums[: len(p.bias_ih)])
    if p.comm_out is not None:
        heard = late.heard.view(*h.shape[:2], -1, d)
        torch.matmul(kept.talk[steps].mT, late.updated, out=heard)
        add_product(total.comm_out, late.message.flatten(0, 1), late.heard.flatten(0, 1))
        if p.comm_bias is not None:
            total.comm_bias.add_(late.message.sum((0, 1)))
        if p.comm_query is not None:
            add_product(total.comm_query, late.comm_query.flatten(0, 1), rows)

    share = shares(kept.attention[steps], p.mix.shape[2], settings.mean)  # [N, B, F, R]
    d_mix = total.mix[steps]
    if p.keys is not None:
        if p.keys.shape[2] == 1:  # torch's product of so little is slow on a CPU
            torch.sum(late.scores * h, 2, keepdim=True, out=total.keys[steps])
        else:
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
    p: Prepared, settings: Settings, mix: Tensor, attention: Tensor, later: Slot
) -> Tensor:
    """What the gates' gradient asks of the attention  [B, F, R]"""
    b, f, rows = attention.shape
    heads = p.mix.shape[2]
    if p.weight_ih is None:
        d_share = torch.bmm(later.input_by_file, mix)
    else:
        d_read = later.z.view(b, f, heads, -1).transpose(1, 2)  # [B, heads, F, V / heads]
        d_share = (d_read @ mix).transpose(1, 2).reshape(b, f, rows)
    if not settings.mean:
        return d_share
    d_share, by_head = (x.unflatten(-1, (heads, -1)) for x in (d_share, attention))
    total = by_head.sum(-1, keepdim=True) + epsilon(attention.dtype)
    return ((d_share - (d_share * by_head).sum(-1, keepdim=True) / total) / total).flatten(-2)


def sum_schemata(x: Tensor, out: Tensor) -> None:
    """Over the schemata of x [N, S, D]; torch's own sum of so few is slow on a CPU."""
    if x.is_cuda:
        torch.sum(x, 1, out=out)
    else:
        first, *others = x.unbind(1)
        out.copy_(first)
        for other in others:
            out.add_(other)


def add_schemata(total: Tensor, x: Tensor) -> None:
    """Adds the sum over the schemata of x [N, S, D]."""
    if x.is_cuda:
        total.add_(x.sum(1))
    else:
        for part in x.unbind(1):
            total.add_(part)


def gru_backward(
    d_candidate: Tensor, h: Tensor, at: Step, later: Slot, d_h: Tensor, scratch: Scratch
) -> None:
    """Fills the gates of `later`, and adds the direct path to `d_h`; h is [B * F, S * D]."""
    rows, size = h.shape
    r, u = at.gate
    product = torch.mul(d_candidate, u, out=scratch("d_product", rows, size))
    add_schemata(d_h, product.view(rows, -1, d_h.shape[1]))
    torch.sub(d_candidate, product, out=product)
    tanh_backward(product, at.extra, grad_input=later.n)
    d_squashed = scratch("d_squashed", rows, 2 * size)
    d_r, d_u = d_squashed.chunk(2, 1)
    torch.mul(later.n, at.m, out=d_r)
    torch.sub(h, at.extra, out=d_u).mul_(d_candidate)
    sigmoid_backward(d_squashed, at.gates, grad_input=later.squashed)
    torch.mul(later.n, r, out=later.m)


def lstm_backward(
    d_candidate: Tensor,
    d_new_c: Tensor,
    c: Tensor,
    at: Step,
    later: Slot,
    d_c: Tensor,
    scratch: Scratch,
) -> None:
    """Fills the gates of `later`, and adds to `d_c`; c is [B * F, S * D]."""
    rows, size = c.shape
    (i, f, o, g), tanh_c = at.gate, at.extra
    d_squashed = scratch("d_squashed", rows, 4 * size)
    d_i, d_f, d_o, d_g = d_squashed.chunk(4, 1)
    torch.mul(d_candidate, tanh_c, out=d_o)
    d_candidate.mul_(o)
    d_new_c.add_(tanh_backward(d_candidate, tanh_c, grad_input=d_candidate))
    torch.mul(d_new_c, g, out=d_i)
    torch.mul(d_new_c, i, out=d_g)
    torch.mul(d_new_c, c, out=d_f)
    sigmoid_backward(d_squashed, at.gates, grad_input=later.squashed)
    tanh_backward(d_g, g, grad_input=later.squashed[:, 3 * size :])
    add_schemata(d_c, d_new_c.mul_(f).view(rows, -1, d_c.shape[1]))
