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
    Settings,
    Step,
    by_step,
    dot,
    make_candidates,
    num_schemata,
    queries,
    schema_major,
    transposed,
    unbind,
    update_mask,
)
from scoff.ops.scoff.gather import (
    Gradients,
    Slot,
    allocate_late,
    chunks,
    finish_gradients,
    gather_gradients,
    late_slots,
    start_gradients,
)
from scoff.ops.scoff.types import epsilon

# to find overloads anew at each call takes longer than some of the calls themselves; torch's own
# function, where there is one, takes a third of the time of an overload
softmax_backward = torch._softmax_backward_data  # pyright: ignore[reportPrivateImportUsage]
sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input

CHUNK_ROWS = 256  # rows of B * F: enough for an efficient product, few enough for a CPU's L2 cache


def backward_loop(
    p: Prepared,
    settings: Settings,
    kept: Kept,
    d_output: Tensor | None,
    d_state: Tensor | None,
    d_attention: Tensor | None,
    d_probs: Tensor | None,
    d_talk: Tensor | None,
) -> Gradients:
    """d_* are the gradients of the `Kept` of the same name; None: zero."""
    b, f, d = p.state.shape[1:]
    t_all, s = p.mix.shape[0], num_schemata(p, settings)
    total = start_gradients(p)
    chunk_rows = CHUNK_ROWS * (32 if p.state.is_cuda else 1)
    chunk = min(t_all, -(-chunk_rows // (b * f)))
    late = allocate_late(p, kept, chunk)
    zero = p.state.new_zeros(())
    keys, mix = unbind(p.keys), unbind(p.mix.squeeze(3).mT if p.weight_ih is None else p.mix.mT)
    weight_h, ask_weight = p.weight_h.T.contiguous(), transposed(p.comm_query)
    new = p.state.new_empty
    chosen = new(t_all, b * f, s, 1).zero_().scatter_(2, kept.choice.view(t_all, -1, 1, 1), 1)
    chosen = chosen.unbind(0)
    first_candidate = torch.arange(0, b * f * s, s, device=p.state.device)
    chosen_rows = (kept.choice.flatten(1) + first_candidate).unbind(0)

    # gradients of h, and for the LSTM of c, that come from the step after
    d_state = torch.zeros_like(p.state) if d_state is None else d_state.contiguous()
    carried = [x.clone() for x in d_state]
    d_h, d_c = (x.view(b * f, d) for x in (carried[0], carried[-1]))  # of the step before
    d_new, d_read, work = (new(b, f, d) for _ in range(3))
    d_new_rows = d_new.view(b * f, 1, d)
    d_new_c = new(b * f, 1, d)
    d_heard = new(b * f, late.heard.shape[2])
    d_heard_by_reader = d_heard.view(b, -1, d) if p.comm_out is not None else d_heard
    d_heard_columns = d_heard_by_reader.mT
    asked, asked_by_reader = queries(p)
    d_weights, d_logits = (new(s, b * f) for _ in range(2))
    d_logits_columns = d_logits.T[..., None]
    candidates = [new(b * f, s, d) for _ in carried]
    candidate_rows = candidates[0].view(-1, d)
    d_candidate, d_old = (new(b * f, s, d) for _ in range(2))
    product = schema_major(p, s)
    d_gates = Squashed.allocate(p.state, b * f, s, d, 4 if settings.lstm else 0)
    d_h_columns = new(d, b * f)
    d_h_rows = d_h_columns.T
    d_outputs = (zero.expand(t_all, b, f, d) if d_output is None else d_output).unbind(0)
    steps, slots = by_step(kept, t_all), late_slots(p, late)
    gathered = chunks(p, settings, kept, late, total)
    for t in reversed(range(t_all)):
        at, later = steps[t], slots[t % chunk]
        torch.add(carried[0], d_outputs[t], out=d_new)
        update = update_mask(p, settings, at.active, t)
        if update is not None:
            torch.where(update, zero, d_new, out=carried[0])
            torch.where(update, d_new, zero, out=d_new)
        elif settings.lstm:
            d_h.zero_()

        # what the forward pass did not keep
        make_candidates(settings, at, candidates)

        # Step 4
        if p.comm_out is not None:
            updated = later.updated
            torch.index_select(candidate_rows, 0, chosen_rows[t], out=later.updated_rows)
            if update is not None:
                torch.where(update, updated, at.before[0], out=updated)
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
                d_t = torch.bmm(updated, d_heard_columns)
                if d_talk is not None:
                    d_t += d_talk[t]
                d_scores = softmax_backward(d_t, at.talk, 1, d_t.dtype)
                torch.mm(at.h_rows, ask_weight, out=asked)
                asked_back.baddbmm_(d_scores, asked_by_reader)
                torch.bmm(d_scores.mT, updated, out=later.comm_query)
            if update is not None:
                carried[0].add_(torch.where(update, zero, d_read, out=work))
                d_new.add_(torch.where(update, d_read, zero, out=d_read))

        # Step 3
        dot(candidates[0], d_new_rows, product, out=d_weights)
        if settings.lstm:
            d_new_c.copy_(d_c[:, None])
            if update is None:
                d_c.zero_()
            else:
                torch.where(update, zero, carried[1], out=carried[1])
                d_new_c.sub_(d_c[:, None])
            dot(candidates[1], d_new_c, product, out=d_logits)
            d_weights += d_logits
        if d_probs is not None:
            d_weights += d_probs[t]
        softmax_backward(d_weights, at.probs, 0, d_weights.dtype, grad_input=d_logits)
        if settings.temperature != 1:
            d_logits.div_(settings.temperature)
        torch.mul(candidates[0], d_logits_columns, out=product)
        sum_schemata(product, out=later.query)
        # the chosen candidate gets the gradient of the state, each gets that of its logit
        torch.mul(chosen[t], d_new_rows, out=d_candidate).addcmul_(d_logits_columns, at.query)
        if settings.lstm:
            d_candidate_c = torch.mul(chosen[t], d_new_c, out=candidates[1])
            lstm_backward(d_candidate, d_candidate_c, at, later, d_c, d_gates)
        else:
            gru_backward(d_candidate, candidates[0], at, later, d_old)
            if update is None:
                sum_schemata(d_old, out=d_h)
            else:
                add_schemata(d_h, d_old)
        # these products are faster on a CPU transposed, with many columns
        torch.mm(weight_h, later.hidden_columns, out=d_h_columns)
        if ask_weight is not None:
            d_h_columns.addmm_(ask_weight, later.comm_query_columns)
        d_h.add_(d_h_rows)

        # Step 2
        if p.weight_ih is not None:
            torch.mm(later.input, p.weight_ih, out=later.z)
        if keys:
            d_s = d_attention_of(p, settings, mix[t], at.attention, later)
            if d_attention is not None:
                d_s = d_s + d_attention[t]
            softmax_backward(d_s, at.attention, 1, d_s.dtype, grad_input=later.scores)
            if not settings.detach:
                add = carried[0].addcmul_ if keys[t].shape[1] == 1 else carried[0].baddbmm_
                add(later.scores, keys[t])

        if p.reset is not None and p.restart is not None:
            reset = p.reset[t][:, None, None]
            for d_restart, d_carried in zip(total.restart, carried, strict=True):
                d_restart.add_(torch.where(reset, d_carried, zero))
                torch.where(reset, zero, d_carried, out=d_carried)
        if t % chunk == 0:
            gather_gradients(p, total, late, gathered[t // chunk])
    total = finish_gradients(p, total, late)._replace(state=torch.stack(carried))
    return Gradients(*(x.contiguous() for x in total))


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
    if x.is_cuda or x.shape[1] == 1:
        torch.sum(x, 1, out=out)
    else:
        first, second, *others = x.unbind(1)
        torch.add(first, second, out=out)
        for other in others:
            out.add_(other)


def add_schemata(total: Tensor, x: Tensor) -> None:
    """Adds the sum over the schemata of x [N, S, D]."""
    if x.is_cuda:
        total.add_(x.sum(1))
    else:
        for part in x.unbind(1):
            total.add_(part)


class Squashed(NamedTuple):
    """Gradients of the LSTM's gates after their nonlinearity, i f o g."""

    rows: Tensor  # [B * F, 4 * S * D]
    gate: tuple[Tensor, ...]  # [B * F, S, D] each

    @classmethod
    def allocate(cls, like: Tensor, rows: int, schemata: int, size: int, gates: int):
        whole = like.new_empty(rows, gates * schemata * size)
        return cls(whole, whole.view(rows, gates, schemata, size).unbind(1))


def gru_backward(
    d_candidate: Tensor, candidate: Tensor, at: Step, later: Slot, d_old: Tensor
) -> None:
    """Fills the gates of `later`, and `d_old` with every schema's direct path to the old state.

    Overwrites `d_candidate` and `candidate`.
    """
    r, u = at.gate
    torch.mul(d_candidate, u, out=d_old)
    d_candidate.sub_(d_old)
    # u (1 - u) (h - n), the way through u, is (1 - u) (candidate - n)
    candidate.sub_(at.extra_by_schema)
    torch.mul(d_candidate, candidate, out=later.u)
    tanh_backward(d_candidate, at.extra_by_schema, grad_input=later.n)
    torch.mul(later.n, r, out=later.m)
    d_r = torch.mul(later.n, at.m, out=candidate)
    sigmoid_backward(d_r, r, grad_input=later.r)


def lstm_backward(
    d_candidate: Tensor, d_new_c: Tensor, at: Step, later: Slot, d_c: Tensor, d_gates: Squashed
) -> None:
    """Fills the gates of `later`, and adds to `d_c`."""
    (i, f, o, g), tanh_c = at.gate, at.extra_by_schema
    d_i, d_f, d_o, d_g = d_gates.gate
    torch.mul(d_candidate, tanh_c, out=d_o)
    d_candidate.mul_(o)
    d_new_c.add_(tanh_backward(d_candidate, tanh_c, grad_input=d_candidate))
    torch.mul(d_new_c, g, out=d_i)
    torch.mul(d_new_c, i, out=d_g)
    torch.mul(d_new_c, at.old, out=d_f)
    sigmoid_backward(d_gates.rows, at.gates, grad_input=later.squashed)
    tanh_backward(d_g, g, grad_input=later.n)
    add_schemata(d_c, d_new_c.mul_(f))
