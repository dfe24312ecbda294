"""The Triton kernels of the `wide` backend: what lies between the matrix products of a step.

Rows are object files, B * F of them at a step. Those that compete or talk are of one sequence: a
program has all of them. Updates concern one object file alone: a program has one, with all of its
schemata, and goes through its features block by block.

What products take is padded with zeros to rows of whole multiples of 16 bytes, DP numbers for a
state of D. Of its padding the kernels read and write nothing.

Gates of all schemata lie gate by gate, S * DP numbers each: n r u m of the GRU, where
m = W_hn h + b_hn, and i f g o of the LSTM. The input adds to n r u and i f g o, called `given`; the
state to r u m and i f g o, called `hidden`, behind which is what it asks: the schema query, then
the queries of the communication and of the input.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import tanh


@triton.jit
def dot(a, b):
    """Of little, hence as exact as float32, on tensor cores all the same"""
    return tl.dot(a, b, input_precision="tf32x3", out_dtype=a.dtype)


@triton.jit
def softmax(scores, some, AXIS: tl.constexpr):
    """Among `some`; zero elsewhere."""
    scores = tl.where(some, scores, float("-inf"))
    e = tl.exp(scores - tl.expand_dims(tl.max(scores, AXIS), AXIS))
    return e / tl.expand_dims(tl.sum(e, AXIS), AXIS)


@triton.jit
def is_updated(active, valid, here, exists, F: tl.constexpr):
    """Whether object files change at this step"""
    update = exists
    if active is not None:
        update = update & (tl.load(active + here, mask=exists, other=0) != 0)
    if valid is not None:
        update = update & (tl.load(valid + here // F, mask=exists, other=0) != 0)
    return update


@triton.jit
def is_reset(reset, here, exists, F: tl.constexpr):
    anew = exists & (here < 0)
    if reset is not None:
        anew = tl.load(reset + here // F, mask=exists, other=0) != 0
    return anew


@triton.jit
def candidates(
    given,
    hidden,
    at,
    inside,
    h,
    c,
    GATE: tl.constexpr,
    LSTM: tl.constexpr,
    ADD: tl.constexpr,  # whether `given` and `hidden` are still to be added
):
    """Gates after their nonlinearity, i f g o or r u m n, and the new h and c"""
    gate_0 = tl.load(given + at, mask=inside, other=0.0)
    gate_1 = tl.load(given + GATE + at, mask=inside, other=0.0)
    gate_2 = tl.load(given + 2 * GATE + at, mask=inside, other=0.0)
    if LSTM:
        gate_3 = tl.load(given + 3 * GATE + at, mask=inside, other=0.0)
        if ADD:
            gate_0 += tl.load(hidden + at, mask=inside, other=0.0)
            gate_1 += tl.load(hidden + GATE + at, mask=inside, other=0.0)
            gate_2 += tl.load(hidden + 2 * GATE + at, mask=inside, other=0.0)
            gate_3 += tl.load(hidden + 3 * GATE + at, mask=inside, other=0.0)
        gate_0 = tl.sigmoid(gate_0)
        gate_1 = tl.sigmoid(gate_1)
        gate_2 = tanh(gate_2)
        gate_3 = tl.sigmoid(gate_3)
        new_c = gate_1 * c + gate_0 * gate_2
        new_h = gate_3 * tanh(new_c)
    else:
        gate_3 = gate_0
        gate_0 = gate_1
        gate_1 = gate_2
        if ADD:
            gate_0 += tl.load(hidden + at, mask=inside, other=0.0)
            gate_1 += tl.load(hidden + GATE + at, mask=inside, other=0.0)
        gate_2 = tl.load(hidden + 2 * GATE + at, mask=inside, other=0.0)
        gate_0 = tl.sigmoid(gate_0)
        gate_1 = tl.sigmoid(gate_1)
        gate_3 = tanh(gate_3 + gate_0 * gate_2)
        new_c = gate_3
        new_h = gate_3 + gate_1 * (h - gate_3)
    return gate_0, gate_1, gate_2, gate_3, new_h, new_c


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
    t,
    F: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROW: tl.constexpr,
    NEW: tl.constexpr,
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
    if CHOOSE:
        s = tl.arange(0, SP)
        merits = tl.zeros((SP,), given.dtype.element_ty)
        for start in range(0, D, DB):
            d = start + tl.arange(0, DB)
            inside = (s < S)[:, None] & (d < D)[None, :]
            at = s[:, None] * DP + d[None, :]
            h = tl.load(before_h + d, mask=d < D, other=0.0)
            c = h
            if LSTM:
                c = tl.load(before_c + d, mask=d < D, other=0.0)
            _, _, _, _, next_h, _ = candidates(
                given, hidden, at, inside, h[None, :], c[None, :], GATE, LSTM, ADD
            )
            query = tl.load(hidden + QUERY + d, mask=d < D, other=0.0)
            merits += tl.sum(next_h * query[None, :], 1)
        if noise is not None:
            merits += tl.load(noise + here * S + s, mask=s < S, other=0.0)
        merits = tl.where(merits == merits, merits, float("inf"))  # torch takes NaN, if any
        best = tl.argmax(tl.where(s < S, merits, float("-inf")), 0)
        tl.store(choice + here, best)
    else:
        best = tl.load(choice + here).to(tl.int32)
    exists = row >= 0
    update = is_updated(active, valid, here, exists, F)
    anew = is_reset(reset, here, exists, F)
    for start in range(0, D, DB):
        d = start + tl.arange(0, DB)
        inside = d < D
        h = tl.load(before_h + d, mask=inside, other=0.0)
        c = h
        if LSTM:
            c = tl.load(before_c + d, mask=inside, other=0.0)
        _, _, _, _, next_h, next_c = candidates(
            given, hidden, best * DP + d, inside, h, c, GATE, LSTM, ADD
        )
        next_h = tl.where(update, next_h, h)
        if output is not None:
            tl.store(output + here * D + d, next_h, mask=inside)
            if reset is not None:
                again = tl.load(restart + row * D + d, mask=inside, other=0.0)
                next_h = tl.where(anew, again, next_h)
        tl.store(new_h + row * NEW + d, next_h, mask=inside)
        if LSTM:
            next_c = tl.where(update, next_c, c)
            if reset is not None:
                again = tl.load(restart + (rows + row) * D + d, mask=inside, other=0.0)
                next_c = tl.where(anew, again, next_c)
            tl.store(new_c + row * DP + d, next_c, mask=inside)


@triton.jit
def arriving(later, d_output, anew, at_later, at_output, inside):
    """The gradient of a state: from the step after, unless that started anew, and the output"""
    d_new = tl.where(anew, 0.0, tl.load(later + at_later, mask=inside, other=0.0))
    if d_output is not None:
        d_new += tl.load(d_output + at_output, mask=inside, other=0.0)
    return d_new


@triton.jit(do_not_specialize=["t", "temperature"])
def update_back_kernel(
    work,  # [rows, WORK] gates and what is asked: gradients take their place
    before_h,  # [rows, ROW]
    before_c,  # [rows, DP]
    later_h,  # [rows, DP] the gradient from the step after, or from Step 4
    later_c,  # [rows, DP]
    d_output,  # [T, rows, D]; None: it is in `later_h`
    d_h,  # [rows, DP] gets what does not go through gates and queries
    d_c,  # [rows, DP] likewise
    choice,  # [T, rows]
    noise,  # [T, rows, S]
    active,  # [T, rows]
    valid,  # [T, rows / F]
    reset,  # [T, rows / F] whether the step after started anew
    t,
    temperature,
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
    GATE: tl.constexpr = S * DP
    QUERY: tl.constexpr = 4 * GATE
    row = tl.program_id(0).to(tl.int64)
    here = t * tl.num_programs(0) + row
    given = work + row * WORK
    hidden = given if LSTM else given + GATE
    exists = row >= 0
    update = is_updated(active, valid, here, exists, F)
    anew = is_reset(reset, here, exists, F)
    anew_h = anew
    if d_output is None:
        anew_h = exists & (row < 0)
    s = tl.arange(0, SP)

    # what each schema's weight in the choice would have to be
    merits = tl.zeros((SP,), work.dtype.element_ty)
    d_merits = tl.zeros((SP,), work.dtype.element_ty)
    for start in range(0, D, DB):
        d = start + tl.arange(0, DB)
        inside_d = d < D
        inside = (s < S)[:, None] & inside_d[None, :]
        at = s[:, None] * DP + d[None, :]
        at_d = row * DP + d
        h = tl.load(before_h + row * ROW + d, mask=inside_d, other=0.0)
        c = h
        if LSTM:
            c = tl.load(before_c + at_d, mask=inside_d, other=0.0)
        _, _, _, _, new_h, new_c = candidates(
            given, hidden, at, inside, h[None, :], c[None, :], GATE, LSTM, False
        )
        query = tl.load(given + QUERY + d, mask=inside_d, other=0.0)
        merits += tl.sum(new_h * query[None, :], 1)
        d_new = arriving(later_h, d_output, anew_h, at_d, here * D + d, inside_d)
        d_merits += tl.sum(new_h * d_new[None, :], 1)
        if LSTM:
            d_new_c = arriving(later_c, None, anew, at_d, at_d, inside_d)
            d_merits += tl.sum(new_c * d_new_c[None, :], 1)
    if noise is not None:
        merits += tl.load(noise + here * S + s, mask=s < S, other=0.0)
    p = softmax(merits / temperature, s < S, 0)
    d_logits = p * (d_merits - tl.sum(p * d_merits, 0)) / temperature
    d_logits = tl.where(update, d_logits, 0.0)
    taken = (s == tl.load(choice + here).to(tl.int32)) & update

    for start in range(0, D, DB):
        d = start + tl.arange(0, DB)
        inside_d = d < D
        inside = (s < S)[:, None] & inside_d[None, :]
        at = s[:, None] * DP + d[None, :]
        at_d = row * DP + d
        h = tl.load(before_h + row * ROW + d, mask=inside_d, other=0.0)
        c = h
        if LSTM:
            c = tl.load(before_c + at_d, mask=inside_d, other=0.0)
        gate_0, gate_1, gate_2, gate_3, new_h, new_c = candidates(
            given, hidden, at, inside, h[None, :], c[None, :], GATE, LSTM, False
        )
        query = tl.load(given + QUERY + d, mask=inside_d, other=0.0)
        d_new = arriving(later_h, d_output, anew_h, at_d, here * D + d, inside_d)
        d_before = tl.where(update, 0.0, d_new)
        d_candidate = tl.where(taken[:, None], d_new[None, :], 0.0)
        d_candidate += d_logits[:, None] * query[None, :]
        d_query = tl.sum(d_logits[:, None] * new_h, 0)
        tl.debug_barrier()  # all have read what is overwritten here
        if LSTM:  # i f g o
            d_new_c = arriving(later_c, None, anew, at_d, at_d, inside_d)
            bent = tanh(new_c)
            d_cell = tl.where(taken[:, None], d_new_c[None, :], 0.0)
            d_cell += d_candidate * gate_3 * (1 - bent * bent)
            d_0 = d_cell * gate_2 * gate_0 * (1 - gate_0)
            d_1 = d_cell * c[None, :] * gate_1 * (1 - gate_1)
            d_2 = d_cell * gate_0 * (1 - gate_2 * gate_2)
            d_3 = d_candidate * bent * gate_3 * (1 - gate_3)
            kept_c = tl.where(update, 0.0, d_new_c) + tl.sum(d_cell * gate_1, 0)
            tl.store(d_c + at_d, kept_c, mask=inside_d)
        else:  # r u m n, stored as n r u m
            d_before += tl.sum(d_candidate * gate_1, 0)
            d_0 = d_candidate * (1 - gate_1) * (1 - gate_3 * gate_3)
            d_1 = d_0 * gate_2 * gate_0 * (1 - gate_0)
            d_2 = d_candidate * (h[None, :] - gate_3) * gate_1 * (1 - gate_1)
            d_3 = d_0 * gate_0
        tl.store(given + at, d_0, mask=inside)
        tl.store(given + GATE + at, d_1, mask=inside)
        tl.store(given + 2 * GATE + at, d_2, mask=inside)
        tl.store(given + 3 * GATE + at, d_3, mask=inside)
        tl.store(given + QUERY + d, d_query, mask=inside_d)
        tl.store(d_h + at_d, d_before, mask=inside_d)


# --- the input


@triton.jit(do_not_specialize=["t"])
def look_kernel(
    asked,  # [rows, ASKED] A * E numbers of each row
    keys,  # [T, B, P, A * E]
    values,  # [T, B, P, V]
    look,  # [rows, A, P] gets the attention
    z,  # [rows, VP] gets what is read
    active,  # [T, rows]; None: not wanted
    t,
    epsilon: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    ASKED: tl.constexpr,
    ACTIVE: tl.constexpr,
    MEAN: tl.constexpr,
    FP: tl.constexpr,
    PB: tl.constexpr,
    EB: tl.constexpr,
    VB: tl.constexpr,
):
    """Step 2: the object files of a sequence compete for its positions"""
    W: tl.constexpr = V // A
    b = tl.program_id(0).to(tl.int64)
    sequence = t * tl.num_programs(0) + b
    line = sequence * P
    f = tl.arange(0, FP)
    exists = f < F
    row = b * F + f
    mass = tl.zeros((FP,), asked.dtype.element_ty)
    for a in range(A):
        head_mass = tl.zeros((FP,), asked.dtype.element_ty)
        for start in range(0, P, PB):
            p = start + tl.arange(0, PB)
            scores = tl.zeros((FP, PB), asked.dtype.element_ty)
            for first in range(0, E, EB):
                e = first + tl.arange(0, EB)
                q = tl.load(
                    asked + row[:, None] * ASKED + a * E + e[None, :],
                    mask=exists[:, None] & (e < E)[None, :],
                    other=0.0,
                )
                k = tl.load(
                    keys + (line + p)[None, :] * (A * E) + a * E + e[:, None],
                    mask=(p < P)[None, :] & (e < E)[:, None],
                    other=0.0,
                )
                scores += dot(q, k)
            some = exists[:, None] & (p < P)[None, :]
            share = tl.where(some, softmax(scores, exists[:, None], 0), 0.0)
            tl.store(look + (row[:, None] * A + a) * P + p[None, :], share, mask=some)
            head_mass += tl.sum(share, 1)
        mass += head_mass
        tl.debug_barrier()  # what one has stored, others load
        for first in range(0, W, VB):
            v = first + tl.arange(0, VB)
            seen = tl.zeros((FP, VB), asked.dtype.element_ty)
            for start in range(0, P, PB):
                p = start + tl.arange(0, PB)
                share = tl.load(
                    look + (row[:, None] * A + a) * P + p[None, :],
                    mask=exists[:, None] & (p < P)[None, :],
                    other=0.0,
                )
                value = tl.load(
                    values + (line + p)[:, None] * V + a * W + v[None, :],
                    mask=(p < P)[:, None] & (v < W)[None, :],
                    other=0.0,
                )
                seen += dot(share, value)
            if MEAN:
                seen = seen / (head_mass + epsilon)[:, None]
            inside = exists[:, None] & (v < W)[None, :]
            tl.store(z + row[:, None] * VP + a * W + v[None, :], seen, mask=inside)
    if active is not None:
        own = mass[:, None]
        other = mass[None, :]
        ahead = (other > own) | ((other == own) & (f[None, :] < f[:, None]))
        rank = tl.sum((ahead & exists[None, :]).to(tl.int32), 1)
        tl.store(active + sequence * F + f, rank < ACTIVE, mask=exists)


@triton.jit(do_not_specialize=["t"])
def look_back_kernel(
    asked,  # [rows, ASKED]: gradients take their place
    keys,  # [T, B, P, A * E]
    values,  # [T, B, P, V]
    look,  # [rows, A, P] the attention: the gradient of its scores takes its place
    z,  # [rows, VP]
    d_z,  # [rows, VP]
    d_keys,  # [T, B, P, A * E]
    d_values,  # [T, B, P, V]
    t,
    epsilon: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    ASKED: tl.constexpr,
    MEAN: tl.constexpr,
    FP: tl.constexpr,
    PB: tl.constexpr,
    EB: tl.constexpr,
    VB: tl.constexpr,
):
    """Step 2, back"""
    W: tl.constexpr = V // A
    b = tl.program_id(0).to(tl.int64)
    line = (t * tl.num_programs(0) + b) * P
    f = tl.arange(0, FP)
    exists = f < F
    row = b * F + f
    for a in range(A):
        at_look = look + (row[:, None] * A + a) * P
        at_z = row[:, None] * VP + a * W
        whole = tl.full((FP,), 1.0, asked.dtype.element_ty)
        fewer = tl.zeros((FP,), asked.dtype.element_ty)
        if MEAN:
            whole = tl.full((FP,), epsilon, asked.dtype.element_ty)
            for start in range(0, P, PB):
                p = start + tl.arange(0, PB)
                some = exists[:, None] & (p < P)[None, :]
                whole += tl.sum(tl.load(at_look + p[None, :], mask=some, other=0.0), 1)
            for first in range(0, W, VB):
                v = first + tl.arange(0, VB)
                inside = exists[:, None] & (v < W)[None, :]
                read = tl.load(z + at_z + v[None, :], mask=inside, other=0.0)
                d_read = tl.load(d_z + at_z + v[None, :], mask=inside, other=0.0)
                fewer += tl.sum(read * d_read, 1)
        for start in range(0, P, PB):
            p = start + tl.arange(0, PB)
            some = exists[:, None] & (p < P)[None, :]
            share = tl.load(at_look + p[None, :], mask=some, other=0.0)
            weight = tl.trans(share / whole[:, None])
            d_share = tl.zeros((FP, PB), asked.dtype.element_ty)
            for first in range(0, W, VB):
                v = first + tl.arange(0, VB)
                inside = exists[:, None] & (v < W)[None, :]
                d_read = tl.load(d_z + at_z + v[None, :], mask=inside, other=0.0)
                at = (line + p)[:, None] * V + a * W + v[None, :]
                inside = (p < P)[:, None] & (v < W)[None, :]
                value = tl.load(values + at, mask=inside, other=0.0)
                d_share += dot(d_read, tl.trans(value))
                tl.store(d_values + at, dot(weight, d_read), mask=inside)
            d_share = (d_share - fewer[:, None]) / whole[:, None]
            d_scores = share * (d_share - tl.sum(share * d_share, 0)[None, :])
            tl.debug_barrier()  # all have read what is overwritten here
            tl.store(at_look + p[None, :], d_scores, mask=some)
        tl.debug_barrier()  # what one has stored, others load
        for first in range(0, E, EB):
            e = first + tl.arange(0, EB)
            at_q = asked + row[:, None] * ASKED + a * E + e[None, :]
            inside_q = exists[:, None] & (e < E)[None, :]
            q = tl.load(at_q, mask=inside_q, other=0.0)
            d_q = tl.zeros((FP, EB), asked.dtype.element_ty)
            for start in range(0, P, PB):
                p = start + tl.arange(0, PB)
                some = exists[:, None] & (p < P)[None, :]
                d_scores = tl.load(at_look + p[None, :], mask=some, other=0.0)
                at = (line + p)[:, None] * (A * E) + a * E + e[None, :]
                inside = (p < P)[:, None] & (e < E)[None, :]
                d_q += dot(d_scores, tl.load(keys + at, mask=inside, other=0.0))
                tl.store(d_keys + at, dot(tl.trans(d_scores), q), mask=inside)
            tl.debug_barrier()
            tl.store(at_q, d_q, mask=inside_q)


# --- communication


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
):
    """Step 4: the object files of a sequence communicate"""
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
        if comm_mask is not None:
            message *= tl.load(comm_mask + at, mask=inside, other=0.0)
        h = tl.load(updated + row[:, None] * DP + d[None, :], mask=inside, other=0.0)
        change = message
        if GATED:
            change = tl.sigmoid(gate) * (tanh(message) - h)
        new_h = tl.where(update[:, None], h + change, h)
        tl.store(output + at, new_h, mask=inside)
        if reset is not None:
            again = tl.load(restart + row[:, None] * D + d[None, :], mask=inside, other=0.0)
            new_h = tl.where(anew[:, None], again, new_h)
        tl.store(new + row[:, None] * ROW + d[None, :], new_h, mask=inside)


@triton.jit(do_not_specialize=["t"])
def talk_back_kernel(
    asked,  # [rows, ASKED]: gradients take their place
    read,  # [rows, READ]: gradients take their place
    talk,  # [rows, H, F] gets the attention
    updated,  # [rows, DP] h after Step 3
    later,  # [rows, DP] the gradient from the step after
    d_output,  # [T, rows, D]
    d_updated,  # [rows, DP] gets what does not go through `read`
    d_message,  # [rows, MESSAGE] gets the gradients of the message and its gate; of one: `read`
    active,  # [T, rows]
    valid,  # [T, rows / F]
    comm_mask,  # [T, rows, D]
    reset,  # [T, rows / F] whether the step after started anew
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
        d_new = arriving(later, d_output, anew, at_row, at, inside)
        d_said = tl.where(update, d_new, 0.0)
        message, gate = hear(read + SAID, talk, row, exists, d, D, DP, F, H, READ, GATED, FP)
        if comm_mask is not None:
            mask = tl.load(comm_mask + at, mask=inside, other=0.0)
            message *= mask
        at_message = row[:, None] * MESSAGE + d[None, :]
        tl.debug_barrier()  # of one object file: all have read what is overwritten here
        if GATED:
            h = tl.load(updated + at_row, mask=inside, other=0.0)
            gate = tl.sigmoid(gate)
            message = tanh(message)
            d_gate = d_said * (message - h) * gate * (1 - gate)
            tl.store(d_message + DP + at_message, d_gate, mask=inside)
            d_new = tl.where(update, d_new * (1 - gate), d_new)
            d_said = d_said * gate * (1 - message * message)
        if comm_mask is not None:
            d_said *= mask
        tl.store(d_message + at_message, d_said, mask=inside)
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
