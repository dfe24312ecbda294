"""Step 3 of the `wide` backend, and back: rows are as `wide_blocks` says."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.elementary import tanh
from scoff.ops.scoff.kernels.wide_blocks import (
    candidates,
    is_reset,
    is_updated,
    leave,
    scale_of,
    softmax,
    through_products,
    undone,
)


@triton.jit
def choose(merits, noise, choice, here, S: tl.constexpr, SP: tl.constexpr):
    s = tl.arange(0, SP)
    if noise is not None:
        merits += tl.load(noise + here * S + s, mask=s < S, other=0.0)
    merits = tl.where(merits == merits, merits, float("inf"))  # torch takes NaN, if any
    best = tl.argmax(tl.where(s < S, merits, float("-inf")), 0)
    tl.store(choice + here, best)
    return best


@triton.jit
def settle(
    next_h,
    next_c,
    h,
    c,
    new_h,
    new_c,
    output,
    reset,
    restart,
    update,
    anew,
    here,
    row,
    rows,
    factor,
    scales,
    d,
    D: tl.constexpr,
    DP: tl.constexpr,
    NEW: tl.constexpr,
    FACTOR: tl.constexpr,
    LSTM: tl.constexpr,
):
    """Stores features d of the state, which changes only where there is an update."""
    inside = d < D
    next_h = tl.where(update, next_h, h)
    if output is not None:
        tl.store(output + here * D + d, next_h, mask=inside)
        if reset is not None:
            again = tl.load(restart + row * D + d, mask=inside, other=0.0)
            next_h = tl.where(anew, again, next_h)
    tl.store(new_h + row * NEW + d, next_h, mask=inside)
    if factor is not None:
        if output is not None:  # the next step multiplies it
            scales += rows
        tl.store(factor + row * FACTOR + d, next_h * tl.load(scales + here), mask=inside)
    if LSTM:
        next_c = tl.where(update, next_c, c)
        if reset is not None:
            again = tl.load(restart + (rows + row) * D + d, mask=inside, other=0.0)
            next_c = tl.where(anew, again, next_c)
        tl.store(new_c + row * DP + d, next_c, mask=inside)


# one compilation for all steps
@triton.jit(do_not_specialize=["t"])
def update_kernel(
    given,  # [rows, GIVEN]
    hidden,  # [rows, HIDDEN]
    before_h,  # [rows, ROW]
    before_c,  # [rows, DP] of the LSTM, like all that is called c
    new_h,  # [rows, NEW]
    new_c,  # [rows, DP]
    choice,  # [T, rows]
    noise,  # [T, rows, S]
    active,  # [T, rows]; None: all
    valid,  # [T, rows / F]
    output,  # [T, rows, D]; None: Step 4 is to come
    reset,  # [T, rows / F] whether to start anew after this step
    restart,  # [Z, rows, D]
    scales,  # [T + 1, rows] of what was multiplied, if it has 16 bits; otherwise None
    factor,  # [rows, FACTOR] gets the new h as well, to be multiplied; likewise
    factor_scales,  # [T or T + 1, rows] by that of this step, or if Step 4 is not to come, the next
    t,
    F: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROW: tl.constexpr,
    NEW: tl.constexpr,
    FACTOR: tl.constexpr,
    S: tl.constexpr,
    GIVEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    LSTM: tl.constexpr,
    ADD: tl.constexpr,
    CHOOSE: tl.constexpr,  # otherwise the choice is read
    SP: tl.constexpr,
    DB: tl.constexpr,
):
    """Step 3: candidates, their merits, the choice, the new state"""
    GATE: tl.constexpr = S * DP
    QUERY: tl.constexpr = 4 * GATE if LSTM else 3 * GATE
    rows = tl.num_programs(0)
    row = tl.program_id(0).to(tl.int64)
    here = t * rows + row
    given += row * GIVEN
    hidden += row * HIDDEN
    before_h += row * ROW
    if LSTM:
        before_c += row * DP
    exists = row >= 0
    update = is_updated(active, valid, here, exists, F)
    anew = is_reset(reset, here, exists, F)
    undo = None
    if scales is not None:
        undo = undone(tl.load(scales + here))
    to_store = (new_h, new_c, output, reset, restart, update, anew, here, row, rows)
    to_multiply = (factor, factor_scales)
    s = tl.arange(0, SP)
    merits = tl.zeros((SP,), given.dtype.element_ty)
    if CHOOSE:
        for start in range(0, D, DB):
            d = start + tl.arange(0, DB)
            inside = (s < S)[:, None] & (d < DP)[None, :]
            at = s[:, None] * DP + d[None, :]
            h = tl.load(before_h + d, mask=d < D, other=0.0)
            c = h
            if LSTM:
                c = tl.load(before_c + d, mask=d < D, other=0.0)
            _, _, _, _, all_h, all_c = candidates(
                given, hidden, at, inside, h[None, :], c[None, :], GATE, LSTM, ADD, undo
            )
            query = tl.load(hidden + QUERY + d, mask=d < D, other=0.0)
            if undo is not None:
                query *= undo
            merits += tl.sum(all_h * query[None, :], 1)
            if D <= DB:  # all there is, and at hand
                mine = (s == choose(merits, noise, choice, here, S, SP))[:, None]
                next_h = tl.sum(tl.where(mine, all_h, 0.0), 0)
                next_c = tl.sum(tl.where(mine, all_c, 0.0), 0)
                settle(next_h, next_c, h, c, *to_store, *to_multiply, d, D, DP, NEW, FACTOR, LSTM)
    if not CHOOSE or D > DB:
        if CHOOSE:
            best = choose(merits, noise, choice, here, S, SP)
        else:
            best = tl.load(choice + here).to(tl.int32)
        for start in range(0, D, DB):
            d = start + tl.arange(0, DB)
            inside = d < D
            h = tl.load(before_h + d, mask=inside, other=0.0)
            c = h
            if LSTM:
                c = tl.load(before_c + d, mask=inside, other=0.0)
            _, _, _, _, next_h, next_c = candidates(
                given, hidden, best * DP + d, d < DP, h, c, GATE, LSTM, ADD, undo
            )
            settle(next_h, next_c, h, c, *to_store, *to_multiply, d, D, DP, NEW, FACTOR, LSTM)


@triton.jit
def recall(
    given,
    before_h,
    before_c,
    later_h,
    later_c,
    d_output,
    anew_h,
    anew,
    scales,
    products,
    undo_products,
    reset,
    here,
    d,
    D: tl.constexpr,
    DP: tl.constexpr,
    S: tl.constexpr,
    LSTM: tl.constexpr,
    SP: tl.constexpr,
):
    """Of a row's features d: h and c before, gates, candidates, what is asked of them, and the
    gradients that arrive"""
    GATE: tl.constexpr = S * DP
    inside = d < D
    s = tl.arange(0, SP)
    h = tl.load(before_h + d, mask=inside, other=0.0)
    c = h
    undo = None
    if scales is not None:
        undo = undone(tl.load(scales + here))
    d_later = tl.load(later_h + d, mask=inside, other=0.0)
    if products is not None:
        d_later += through_products(products, undo_products, here, d, inside)
        if reset is not None and d_output is not None:  # the gradient of each step is wanted
            tl.store(later_h + d, d_later, mask=inside)
    # from the step after, unless that started anew
    d_new = tl.where(anew_h, 0.0, d_later)
    if d_output is not None:
        d_new += tl.load(d_output + d, mask=inside, other=0.0)
    d_new_c = d_new
    if LSTM:
        c = tl.load(before_c + d, mask=inside, other=0.0)
        d_new_c = tl.where(anew, 0.0, tl.load(later_c + d, mask=inside, other=0.0))
    gates = candidates(
        given,
        given if LSTM else given + GATE,
        s[:, None] * DP + d[None, :],
        (s < S)[:, None] & (d < DP)[None, :],
        h[None, :],
        c[None, :],
        GATE,
        LSTM,
        False,
        undo,
    )
    query = tl.load(given + 4 * GATE + d, mask=inside, other=0.0)
    if undo is not None:
        query *= undo
    return h, c, gates, query, d_new, d_new_c


@triton.jit
def weigh(recalled, LSTM: tl.constexpr):
    """The merits of all schemata, and the gradients of their weights in the choice"""
    _, _, gates, query, d_new, d_new_c = recalled
    d_weights = tl.sum(gates[4] * d_new[None, :], 1)
    if LSTM:
        d_weights += tl.sum(gates[5] * d_new_c[None, :], 1)
    return tl.sum(gates[4] * query[None, :], 1), d_weights


@triton.jit
def choice_back(
    merits,
    d_weights,
    noise,
    choice,
    here,
    update,
    coldness,
    S: tl.constexpr,
    SP: tl.constexpr,
):
    """The gradients of merits, and which schema was taken"""
    s = tl.arange(0, SP)
    if noise is not None:
        merits += tl.load(noise + here * S + s, mask=s < S, other=0.0)
    p = softmax(merits * coldness, s < S, 0)
    d_merits = p * (d_weights - tl.sum(p * d_weights, 0)) * coldness
    d_merits = tl.where(update, d_merits, 0.0)
    return d_merits, (s == tl.load(choice + here).to(tl.int32)) & update


@triton.jit
def gates_back(
    recalled,
    given,
    d_h,
    d_c,
    d_merits,
    taken,
    update,
    factor,
    undo_new,
    largest_share,
    scales,
    here,
    d,
    D: tl.constexpr,
    DP: tl.constexpr,
    S: tl.constexpr,
    LSTM: tl.constexpr,
    SP: tl.constexpr,
):
    """Puts gradients in the place of gates and query, and the rest into d_h and d_c."""
    PRECISION: tl.constexpr = "ieee" if scales is None else "tf32"
    h, c, gates, query, d_new, d_new_c = recalled
    gate_0, gate_1, gate_2, gate_3, new_h, new_c = gates
    GATE: tl.constexpr = S * DP
    s = tl.arange(0, SP)
    inside_d = d < D
    inside = (s < S)[:, None] & (d < DP)[None, :]
    d_before = tl.where(update, 0.0, d_new)
    d_candidate = tl.where(taken[:, None], d_new[None, :], 0.0)
    d_candidate += d_merits[:, None] * query[None, :]
    d_query = tl.sum(d_merits[:, None] * new_h, 0)
    tl.debug_barrier()  # all have read what is overwritten here
    if LSTM:  # i f g o
        bent = tanh(new_c, PRECISION)
        d_cell = tl.where(taken[:, None], d_new_c[None, :], 0.0)
        d_cell += d_candidate * gate_3 * (1 - bent * bent)
        d_0 = d_cell * gate_2 * gate_0 * (1 - gate_0)
        d_1 = d_cell * c[None, :] * gate_1 * (1 - gate_1)
        d_2 = d_cell * gate_0 * (1 - gate_2 * gate_2)
        d_3 = d_candidate * bent * gate_3 * (1 - gate_3)
        kept_c = tl.where(update, 0.0, d_new_c) + tl.sum(d_cell * gate_1, 0)
        tl.store(d_c + d, kept_c, mask=inside_d)
    else:  # r u m n, stored as n r u m
        d_before += tl.sum(d_candidate * gate_1, 0)
        d_0 = d_candidate * (1 - gate_1) * (1 - gate_3 * gate_3)
        d_1 = d_0 * gate_2 * gate_0 * (1 - gate_0)
        d_2 = d_candidate * (h[None, :] - gate_3) * gate_1 * (1 - gate_1)
        d_3 = d_0 * gate_0
    if factor is not None:
        largest = tl.maximum(tl.maximum(tl.abs(d_0), tl.abs(d_1)), tl.abs(d_2))
        largest = tl.max(tl.maximum(largest, tl.abs(d_3)), 0)
        scale = scale_of(tl.max(tl.maximum(largest, tl.abs(d_query)), 0))
        leave(scale, undo_new, largest_share, tl.load(scales + here))
        d_0 *= scale
        d_1 *= scale
        d_2 *= scale
        d_3 *= scale
        d_query *= scale
        given = factor
        # the padding, where halves of larger numbers were
        pad = D + tl.arange(0, 8)
        none = tl.zeros((SP, 8), d_0.dtype)
        at_pad = given + s[:, None] * DP + pad[None, :]
        padded = (s < S)[:, None] & (pad < DP)[None, :]
        for gate in tl.static_range(4):
            tl.store(at_pad + gate * GATE, none, mask=padded)
        tl.store(given + 4 * GATE + pad, tl.zeros((8,), d_0.dtype), mask=pad < DP)
    tl.store(given + 4 * GATE + d, d_query, mask=inside_d)
    given += s[:, None] * DP + d[None, :]
    tl.store(given, d_0, mask=inside)
    tl.store(given + GATE, d_1, mask=inside)
    tl.store(given + 2 * GATE, d_2, mask=inside)
    tl.store(given + 3 * GATE, d_3, mask=inside)
    tl.store(d_h + d, d_before, mask=inside_d)


@triton.jit(do_not_specialize=["t"])
def update_back_kernel(
    work,  # [rows, WORK] gates and what is asked: gradients take their place
    before_h,  # [rows, ROW]
    before_c,  # [rows, DP]
    later_h,  # [rows, DP] the gradient from the step after, or from Step 4; with `products`, if one
    # may start anew, it gets those too
    later_c,  # [rows, DP]
    d_output,  # [T, rows, D]; None: it is in `later_h`
    d_h,  # [rows, DP] gets what does not go through gates and queries
    d_c,  # [rows, DP] likewise
    choice,  # [T, rows]
    noise,  # [T, rows, S]
    active,  # [T, rows]
    valid,  # [T, rows / F]
    reset,  # [T, rows / F] whether the step after started anew
    scales,  # [T + 1, rows] of what was multiplied, if it has 16 bits; otherwise these are None:
    factor,  # [rows, 2 * WORK] gets the gradients instead, and may be where `work` is
    undo_new,  # [T, rows] gets what undoes their scale
    largest_share,  # [1] gets the largest of that over `scales`, if it has less
    products,  # [rows, DP] what has come through weights, to be added to `later_h`
    undo_products,  # [T or T + 1, rows] what undoes its scale
    coldness,  # [1] one over the temperature
    t,
    F: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROW: tl.constexpr,
    S: tl.constexpr,
    WORK: tl.constexpr,
    LSTM: tl.constexpr,
    SP: tl.constexpr,
    DB: tl.constexpr,
):
    """Step 3, back"""
    row = tl.program_id(0).to(tl.int64)
    here = t * tl.num_programs(0) + row
    coldness = tl.load(coldness)
    given = work + row * WORK
    before_h += row * ROW
    later_h += row * DP
    d_h += row * DP
    if LSTM:
        before_c += row * DP
        later_c += row * DP
        d_c += row * DP
    exists = row >= 0
    update = is_updated(active, valid, here, exists, F)
    anew = is_reset(reset, here, exists, F)
    anew_h = anew
    if d_output is None:
        anew_h = exists & (row < 0)
    else:
        d_output += here * D
    if scales is not None:
        factor += row * 2 * WORK
        undo_new += here
        products += row * DP
        if d_output is not None:  # they come from the step after
            undo_products += tl.num_programs(0)
    merits = tl.zeros((SP,), work.dtype.element_ty)
    d_weights = tl.zeros((SP,), work.dtype.element_ty)
    state = (before_h, before_c, later_h, later_c, d_output, anew_h, anew)
    through = (scales, products, undo_products, reset, here)
    to_store = (update, factor, undo_new, largest_share, scales, here)
    for start in range(0, D, DB):
        d = start + tl.arange(0, DB)
        recalled = recall(given, *state, *through, d, D, DP, S, LSTM, SP)
        more_merits, more_weights = weigh(recalled, LSTM)
        merits += more_merits
        d_weights += more_weights
        if D <= DB:  # all there is, and at hand
            d_merits, taken = choice_back(
                merits, d_weights, noise, choice, here, update, coldness, S, SP
            )
            gates_back(recalled, given, d_h, d_c, d_merits, taken, *to_store, d, D, DP, S, LSTM, SP)
    if D > DB:
        d_merits, taken = choice_back(
            merits, d_weights, noise, choice, here, update, coldness, S, SP
        )
        for start in range(0, D, DB):
            d = start + tl.arange(0, DB)
            recalled = recall(given, *state, *through, d, D, DP, S, LSTM, SP)
            gates_back(recalled, given, d_h, d_c, d_merits, taken, *to_store, d, D, DP, S, LSTM, SP)
