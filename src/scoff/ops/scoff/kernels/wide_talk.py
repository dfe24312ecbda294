"""Step 4 of the `wide` backend, and back: rows are as `wide_blocks` says."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.elementary import sigmoid, tanh
from scoff.ops.scoff.kernels.wide_blocks import (
    dot,
    is_reset,
    is_updated,
    leave,
    scale_of,
    softmax,
    through_products,
    undone,
)


@triton.jit
def attend(
    asked,
    read,
    talk,
    row,
    exists,
    F: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    ASKED: tl.constexpr,
    READ: tl.constexpr,
    FP: tl.constexpr,
    EB: tl.constexpr,
):
    """Who reads whom, to `talk`"""
    f = tl.arange(0, FP)
    both = exists[:, None] & exists[None, :]
    for h in range(H):
        scores = tl.zeros((FP, FP), read.dtype.element_ty)
        for start in range(0, E, EB):
            e = start + tl.arange(0, EB)
            inside = exists[:, None] & (e < E)[None, :]
            at = h * E + e[None, :]
            q = tl.load(asked + row[:, None] * ASKED + at, mask=inside, other=0.0)
            k = tl.load(read + row[:, None] * READ + at, mask=inside, other=0.0)
            scores += dot(q, tl.trans(k))
        share = softmax(scores, exists[None, :], 1)
        tl.store(talk + (row[:, None] * H + h) * F + f[None, :], share, mask=both)
    tl.debug_barrier()  # what one has stored, others load


@triton.jit
def hear(
    read,  # from what is said on
    talk,
    row,
    exists,
    d,
    D: tl.constexpr,
    DP: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    READ: tl.constexpr,
    GATED: tl.constexpr,
    FP: tl.constexpr,
):
    """The message and its gate, before their nonlinearity  [FP, DB]"""
    MESSAGE: tl.constexpr = 2 * DP if GATED else DP
    f = tl.arange(0, FP)
    both = exists[:, None] & exists[None, :]
    inside = exists[:, None] & (d < D)[None, :]
    message = tl.zeros((FP, d.shape[0]), read.dtype.element_ty)
    gate = tl.zeros((FP, d.shape[0]), read.dtype.element_ty)
    for h in range(H):
        at = row[:, None] * READ + h * MESSAGE + d[None, :]
        said = tl.load(read + at, mask=inside, other=0.0)
        if F == 1:
            message += said
        else:
            share = tl.load(talk + (row[:, None] * H + h) * F + f[None, :], mask=both, other=0.0)
            message += dot(share, said)
        if GATED:
            said = tl.load(read + DP + at, mask=inside, other=0.0)
            if F == 1:
                gate += said
            else:
                gate += dot(share, said)
    return message, gate


@triton.jit(do_not_specialize=["t"])
def talk_kernel(
    asked,  # [rows, ASKED] H * E numbers of each row; None: one object file hears only itself
    read,  # [rows, READ] keys; from SAID on what each head says, and its gate, DP numbers each
    talk,  # [rows, H, F] gets the attention; None, likewise
    updated,  # [rows, DP] h after Step 3
    new,  # [rows, ROW] gets h after Step 4
    active,  # [T, rows]
    valid,  # [T, rows / F]
    comm_mask,  # [T, rows, D]
    output,  # [T, rows, D]
    reset,  # [T, rows / F] whether to start anew after this step
    restart,  # [Z, rows, D]
    scales,  # [T, rows] of one object file, if what was multiplied has 16 bits; otherwise None
    factor,  # [rows, FACTOR] gets the new h as well, to be multiplied; likewise
    factor_scales,  # [T + 1, rows] by that of the next step
    t,
    F: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    SAID: tl.constexpr,
    ASKED: tl.constexpr,
    READ: tl.constexpr,
    GATED: tl.constexpr,
    FP: tl.constexpr,
    DB: tl.constexpr,
    EB: tl.constexpr,
    ROW: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Step 4: the object files of a sequence communicate"""
    PRECISION: tl.constexpr = "ieee" if scales is None else "tf32"
    b = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, FP)
    exists = f < F
    row = b * F + f
    here = t * tl.num_programs(0) * F + row
    if F > 1:
        attend(asked, read, talk, row, exists, F, H, E, ASKED, READ, FP, EB)
    update = is_updated(active, valid, here, exists, F)
    anew = is_reset(reset, here, exists, F)
    for start in range(0, D, DB):
        d = start + tl.arange(0, DB)
        inside = exists[:, None] & (d < D)[None, :]
        at = here[:, None] * D + d[None, :]
        message, gate = hear(read + SAID, talk, row, exists, d, D, DP, F, H, READ, GATED, FP)
        if scales is not None:
            undo = undone(tl.load(scales + here))
            message *= undo[:, None]
            gate *= undo[:, None]
        if comm_mask is not None:
            message *= tl.load(comm_mask + at, mask=inside, other=0.0)
        h = tl.load(updated + row[:, None] * DP + d[None, :], mask=inside, other=0.0)
        change = message
        if GATED:
            change = sigmoid(gate, PRECISION) * (tanh(message, PRECISION) - h)
        new_h = tl.where(update[:, None], h + change, h)
        tl.store(output + at, new_h, mask=inside)
        if reset is not None:
            again = tl.load(restart + row[:, None] * D + d[None, :], mask=inside, other=0.0)
            new_h = tl.where(anew[:, None], again, new_h)
        tl.store(new + row[:, None] * ROW + d[None, :], new_h, mask=inside)
        if scales is not None:
            scale = tl.load(factor_scales + here + tl.num_programs(0))
            new_h *= scale[:, None]
            tl.store(factor + row[:, None] * FACTOR + d[None, :], new_h, mask=inside)


@triton.jit(do_not_specialize=["t"])
def talk_back_kernel(
    asked,  # [rows, ASKED]: gradients take their place
    read,  # [rows, READ]: gradients take their place
    talk,  # [rows, H, F] gets the attention
    updated,  # [rows, DP] h after Step 3
    later,  # [rows, DP] the gradient from the step after; gets `products` if one may start anew
    d_output,  # [T, rows, D]
    d_updated,  # [rows, DP] gets what does not go through `read`
    d_message,  # [rows, MESSAGE] gets the gradients of the message and its gate; of one: `read`
    active,  # [T, rows]
    valid,  # [T, rows / F]
    comm_mask,  # [T, rows, D]
    reset,  # [T, rows / F] whether the step after started anew
    scales,  # [T, rows] of one object file, if what was multiplied has 16 bits; otherwise None:
    factor,  # [rows, 2 * READ] gets the gradients of `read` instead, and may be where that is
    undo_new,  # [T, rows] gets what undoes their scale
    largest_share,  # [1] gets the largest of that over `scales`, if it has less
    products,  # [rows, DP] what has come through weights, to be added to `later`
    undo_products,  # [T + 1, rows] what undoes its scale
    t,
    F: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    SAID: tl.constexpr,
    ASKED: tl.constexpr,
    READ: tl.constexpr,
    GATED: tl.constexpr,
    FP: tl.constexpr,
    DB: tl.constexpr,
    EB: tl.constexpr,
):
    """Step 4, back"""
    PRECISION: tl.constexpr = "ieee" if scales is None else "tf32"
    MESSAGE: tl.constexpr = 2 * DP if GATED else DP
    b = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, FP)
    exists = f < F
    row = b * F + f
    here = t * tl.num_programs(0) * F + row
    if F > 1:
        attend(asked, read, talk, row, exists, F, H, E, ASKED, READ, FP, EB)
    update = is_updated(active, valid, here, exists, F)[:, None]
    anew = is_reset(reset, here, exists, F)[:, None]
    for start in range(0, D, DB):
        d = start + tl.arange(0, DB)
        inside = exists[:, None] & (d < D)[None, :]
        at_row = row[:, None] * DP + d[None, :]
        at = here[:, None] * D + d[None, :]
        d_later = tl.load(later + at_row, mask=inside, other=0.0)
        if scales is not None:
            after = (here + tl.num_programs(0))[:, None]
            d_later += through_products(products, undo_products, after, at_row, inside)
            if reset is not None:  # the gradient of each step is wanted
                tl.store(later + at_row, d_later, mask=inside)
        d_new = tl.where(anew, 0.0, d_later)
        d_new += tl.load(d_output + at, mask=inside, other=0.0)
        d_said = tl.where(update, d_new, 0.0)
        message, gate = hear(read + SAID, talk, row, exists, d, D, DP, F, H, READ, GATED, FP)
        if scales is not None:
            undo = undone(tl.load(scales + here))
            message *= undo[:, None]
            gate *= undo[:, None]
        if comm_mask is not None:
            mask = tl.load(comm_mask + at, mask=inside, other=0.0)
            message *= mask
        at_message = row[:, None] * MESSAGE + d[None, :]
        tl.debug_barrier()  # of one object file: all have read what is overwritten here
        if GATED:
            h = tl.load(updated + at_row, mask=inside, other=0.0)
            gate = sigmoid(gate, PRECISION)
            message = tanh(message, PRECISION)
            d_gate = d_said * (message - h) * gate * (1 - gate)
            if scales is None:
                tl.store(d_message + DP + at_message, d_gate, mask=inside)
            d_new = tl.where(update, d_new * (1 - gate), d_new)
            d_said = d_said * gate * (1 - message * message)
        if comm_mask is not None:
            d_said *= mask
        if scales is None:
            tl.store(d_message + at_message, d_said, mask=inside)
        else:  # with a gate, and D <= DB
            scale = scale_of(tl.max(tl.maximum(tl.abs(d_said), tl.abs(d_gate)), 1))
            leave(scale, undo_new + here, largest_share + here * 0, tl.load(scales + here))
            at_factor = factor + row[:, None] * 2 * READ
            tl.store(at_factor + d[None, :], d_said * scale[:, None], mask=inside)
            tl.store(at_factor + DP + d[None, :], d_gate * scale[:, None], mask=inside)
            # the padding, where halves of larger numbers were
            pad = D + tl.arange(0, 8)[None, :]
            none = tl.zeros((1, 8), d_said.dtype)
            tl.store(at_factor + pad, none, mask=pad < DP)
            tl.store(at_factor + DP + pad, none, mask=pad < DP)
        tl.store(d_updated + at_row, d_new, mask=inside)
    if F > 1:
        both = exists[:, None] & exists[None, :]
        tl.debug_barrier()  # what one has stored, others load
        for head in range(H):
            share = tl.load(talk + (row[:, None] * H + head) * F + f[None, :], mask=both, other=0.0)
            d_share = tl.zeros((FP, FP), read.dtype.element_ty)
            for part in range(MESSAGE // DP):
                for start in range(0, D, DB):
                    d = start + tl.arange(0, DB)
                    inside = exists[:, None] & (d < D)[None, :]
                    at_message = row[:, None] * MESSAGE + part * DP + d[None, :]
                    d_said = tl.load(d_message + at_message, mask=inside, other=0.0)
                    at = row[:, None] * READ + SAID + head * MESSAGE + part * DP + d[None, :]
                    said = tl.load(read + at, mask=inside, other=0.0)
                    d_share += dot(d_said, tl.trans(said))
                    tl.debug_barrier()  # all have read what is overwritten here
                    tl.store(read + at, dot(tl.trans(share), d_said), mask=inside)
            d_scores = share * (d_share - tl.sum(share * d_share, 1)[:, None])
            for start in range(0, E, EB):
                e = start + tl.arange(0, EB)
                inside = exists[:, None] & (e < E)[None, :]
                at_q = asked + row[:, None] * ASKED + head * E + e[None, :]
                at_k = read + row[:, None] * READ + head * E + e[None, :]
                q = tl.load(at_q, mask=inside, other=0.0)
                k = tl.load(at_k, mask=inside, other=0.0)
                tl.debug_barrier()
                tl.store(at_q, dot(d_scores, k), mask=inside)
                tl.store(at_k, dot(tl.trans(d_scores), q), mask=inside)
