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
    ask,
    by_heads,
    by_step,
    dot,
    gather_values,
    gru_change,
    make_candidates,
    num_schemata,
    shares,
    update_mask,
)
from scoff.ops.scoff.types import epsilon

softmax_backward = torch.ops.aten._softmax_backward_data
sigmoid_backward = torch.ops.aten.sigmoid_backward
tanh_backward = torch.ops.aten.tanh_backward

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

    # gradients of h, and for the LSTM of c, that come from the step after
    carried = [x.contiguous().clone() for x in d_state]
    d_new, d_read = scratch("d_new", b, f, d), scratch("d_read", b, f, d)
    work = scratch("work", b, f, d)
    views = by_step(kept, t_all)
    late_views = [Late(*row) for row in zip(*(x.unbind(0) for x in late), strict=True)]
    for t in reversed(range(t_all)):
        at, later = views[t], late_views[t % chunk]
        before, gates, extra = at.before, at.gates, at.extra
        h = before[0].view(b * f, d)
        torch.add(carried[0], d_output[t], out=d_new)
        d_h = carried[0].view(b * f, d)  # takes what goes to the step before
        update = update_mask(p, settings, at.active, t)
        if update is None:
            d_h.zero_()
        else:
            torch.where(update, zero, d_new, out=carried[0])
            torch.where(update, d_new, zero, out=d_new)

        # Step 4
        if p.comm_out is not None:
            updated, talk = at.updated, at.talk
            d_message = later.message
            if p.comm_bias is None:
                d_message.copy_(d_new.view(b * f, d))
            else:
                said, gate = at.said, at.gate
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
                torch.bmm(d_scores.mT, updated, out=later.comm_query.view(b, -1, d))
                d_h.addmm_(later.comm_query, p.comm_query)
            if update is not None:
                carried[0].add_(torch.where(update, zero, d_read, out=work))
                torch.where(update, d_read, zero, out=d_read)
            d_new.add_(d_read)

        # Step 3
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
        probs = at.probs.view(b * f, s)
        d_logits = softmax_backward(d_weights, probs, -1, probs.dtype) / settings.temperature
        d_logits = d_logits[..., None]  # [B * F, S, 1]
        d_gates, query = later.gates, gates[:, -d:]
        product = torch.mul(by_schema, d_logits, out=scratch("product", b * f, s, d))
        torch.sum(product, 1, out=d_gates[:, -d:])
        # the chosen candidate gets the gradient of the state, each gets that of its logit
        chosen = torch.zeros_like(probs).scatter_(1, at.choice.view(b * f, 1), 1)[..., None]
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
            torch.mm(d_input, p.weight_ih, out=later.z)
        if p.keys is not None:
            d_s = d_attention_of(p, settings, t, at.attention, d_input, later.z)
            if d_attention is not None:
                d_s = d_s + d_attention[t]
            later.scores.copy_(softmax_backward(d_s, at.attention, 1, d_s.dtype))
            if p.keys.shape[2] == 1:
                carried[0].addcmul_(later.scores, p.keys[t])
            else:
                carried[0].baddbmm_(later.scores, p.keys[t])

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
    total = by_head.sum(-1, keepdim=True) + epsilon(attention.dtype)
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
    change = gru_change(h, n, scratch)
    sigmoid_backward(change.mul_(d_candidate), u, grad_input=d_u)
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
