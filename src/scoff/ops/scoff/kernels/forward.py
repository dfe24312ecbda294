"""The forward kernel of the `fused` backend: one program runs all steps of a few sequences.

Matrices lie on their side: columns are the object files of a program's sequences, one after the
other, so that column `s * F + f` is object file f of sequence s, and rows are features. Tensor
cores like it so: they take 64 rows or more of the weights at a time, and as few as 8 columns. What
concerns one sequence alone, the competition for its input and the communication, is done for all
columns at once and masked.

The state is in registers, and so is the best candidate so far. Weights stay in shared memory, all
or some, where there is space for them. The others are read at every step, from the cache, matrix by
matrix, of which some are on their way while others are used.

What the backward pass needs is kept of some steps, on the way. Of others the same kernel, on single
steps, computes it again from the states.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    compete,
    dot,
    fit,
    listen,
    load_halves,
    narrow,
    of_heads,
    parts,
    plus_halves,
    power_below,
    scale_of,
    spread,
    talk_at,
    times,
    top,
    turned,
    whole,
    widen,
    within,
)
from scoff.ops.scoff.kernels.elementary import inverse, nearest, sigmoid, tanh
from scoff.ops.scoff.kernels.held import choose, hold, load_each


@triton.jit
def look(start, a, t, keys, values, ask, first, batch, sequence, ok, shape: tl.constexpr):
    """A block of positions: how they are shared out, to whom they belong, where they are in their
    sequence, and what is seen of them."""
    P: tl.constexpr = shape.P
    C: tl.constexpr = shape.C
    W: tl.constexpr = shape.W
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    c_in = tl.arange(0, shape.CP)
    position = start + tl.arange(0, shape.PB)
    home = position // P
    there = first + home
    exists = (position < shape.SEQUENCES * P) & (there < batch)
    line = (t * batch + there).to(tl.int64) * P + position % P
    key = tl.load(
        keys + line[:, None] * shape.KEY_ROW + a * shape.KEY_HEAD + c_in[None, :],
        mask=exists[:, None] & (c_in < C)[None, :],
        other=0.0,
    )
    key = nearest(key.to(ACC), PRECISION)
    mine = (home[:, None] == sequence[None, :]) & exists[:, None] & ok[None, :]
    s = compete(dot(key, ask, ACC, PRECISION), mine, PRECISION)
    if shape.SHARED:
        read = tl.trans(key)
    else:
        w_in = tl.arange(0, shape.WP)
        read = tl.load(
            values + line[None, :] * shape.VALUE_ROW + a * shape.VALUE_HEAD + w_in[:, None],
            mask=exists[None, :] & (w_in < W)[:, None],
            other=0.0,
        )
        read = nearest(read.to(ACC), PRECISION)
    return s, mine, position, dot(read, s, ACC, PRECISION)


@triton.jit
def look_at_one(a, t, keys, values, ask, first, batch, ok, shape: tl.constexpr):
    """The only position of a program's only sequence, without products of matrices: how it is
    shared out, and what is seen of it."""
    PRECISION: tl.constexpr = shape.PRECISION
    c_in, w_in = tl.arange(0, shape.CP), tl.arange(0, shape.WP)
    line = (t * batch + first).to(tl.int64)
    at_key = keys + line * shape.KEY_ROW + a * shape.KEY_HEAD + c_in
    key = tl.load(at_key, mask=c_in < shape.C, other=0.0).to(shape.ACC)
    s = compete(tl.sum(key[:, None] * ask, 0)[None, :], ok[None, :], PRECISION)
    if shape.SHARED:
        read = key
    else:
        at_value = values + line * shape.VALUE_ROW + a * shape.VALUE_HEAD + w_in
        read = tl.load(at_value, mask=w_in < shape.W, other=0.0).to(shape.ACC)
    return tl.sum(s, 0), read[:, None] * s


# one compilation for all lengths and batch sizes
@triton.jit(do_not_specialize=["each", "steps", "batch", "begin"])
def forward_kernel(
    # what it reads; None: there is none
    keys,  # [T, B, P, KEY_ROW]
    values,  # [T, B, P, VALUE_ROW]
    state,  # [Z, B, F, D]
    restart,  # [Z, B, F, D]
    reset,  # [T, B]
    valid,  # [T, B]
    noise,  # [T, B, F, S]
    comm_mask,  # [T, B, F, D]
    given_choice,  # [T, B, F]
    given_active,  # [T, B, F]
    value,  # [V, W]; None: z is what is seen
    from_state,  # [1 + A, AP, DP]: the schema query, what each head asks; all these are padded
    weight_ih,  # [S, G, DP, VP]
    weight_hh,  # [S, G, DP, DP]
    bias_ih,  # [S, G, D]
    bias_hh,  # [S, G, D]
    comm_read,  # [3, TP, DP]: queries, keys and values
    comm_say,  # [1 or 2, DP, TP]: what is said, and its gate
    comm_bias,  # [D]
    # what it writes; None: not wanted
    output,  # [T, B, F, D]
    cells,  # [T, B, F, D] the LSTM's c
    final,  # [Z, B, F, D]
    choice,  # [T, B, F]
    active,  # [T, B, F]
    kept,  # [.., B, F, KEPT]
    kept_look,  # [.., B, F, A, P] attention
    # single steps: the states after each [T, B, F, D], and how many are a step's
    history,
    history_c,
    each,
    steps,
    batch,
    begin,  # where something is kept: the first step, times the sequences
    shape: tl.constexpr,
):
    comm_scale: tl.constexpr = shape.comm_scale
    epsilon: tl.constexpr = shape.epsilon
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    P: tl.constexpr = shape.P
    A: tl.constexpr = shape.A
    C: tl.constexpr = shape.C
    W: tl.constexpr = shape.W
    V: tl.constexpr = shape.V
    S: tl.constexpr = shape.S
    H: tl.constexpr = shape.H
    E: tl.constexpr = shape.E
    U: tl.constexpr = shape.U
    KEY_ROW: tl.constexpr = shape.KEY_ROW
    VALUE_ROW: tl.constexpr = shape.VALUE_ROW
    SAYS: tl.constexpr = shape.SAYS
    KEPT: tl.constexpr = shape.KEPT
    QUERY: tl.constexpr = shape.QUERY
    COMM_QUERY: tl.constexpr = shape.COMM_QUERY
    ASK: tl.constexpr = shape.ASK
    READ: tl.constexpr = shape.READ
    MESSAGE: tl.constexpr = shape.MESSAGE
    RIGHT: tl.constexpr = shape.RIGHT
    UPDATED: tl.constexpr = shape.UPDATED
    HEARD: tl.constexpr = shape.HEARD
    LOGITS: tl.constexpr = shape.LOGITS
    TALK: tl.constexpr = shape.TALK
    MASS: tl.constexpr = shape.MASS
    SEEN: tl.constexpr = shape.SEEN
    ACTIVE: tl.constexpr = shape.ACTIVE
    MEAN: tl.constexpr = shape.MEAN
    LSTM: tl.constexpr = shape.LSTM
    SINGLE: tl.constexpr = shape.SINGLE
    HOLD: tl.constexpr = shape.HOLD
    SEQUENCES: tl.constexpr = shape.SEQUENCES
    R: tl.constexpr = shape.R
    DP: tl.constexpr = shape.DP
    VP: tl.constexpr = shape.VP
    AP: tl.constexpr = shape.AP
    TP: tl.constexpr = shape.TP
    CP: tl.constexpr = shape.CP
    WP: tl.constexpr = shape.WP
    HP: tl.constexpr = shape.HP
    SP: tl.constexpr = shape.SP
    ROWS: tl.constexpr = shape.ROWS
    RC: tl.constexpr = shape.RC
    PB: tl.constexpr = shape.PB
    STAGES: tl.constexpr = shape.STAGES
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    GATES: tl.constexpr = 4 if LSTM else 3
    HE: tl.constexpr = H * E
    HU: tl.constexpr = H * U
    PARTS: tl.constexpr = DP // ROWS
    program = tl.program_id(0)
    column = tl.arange(0, R)
    sequence = column // F
    first = program * SEQUENCES
    b = first + sequence
    ok = (sequence < SEQUENCES) & (b < batch)
    place = (b * F + column % F).to(tl.int64)  # of a column among all object files of a step
    d = tl.arange(0, DP)
    inside = (d < D)[:, None] & ok[None, :]
    at = place[None, :] * D + d[:, None]
    c_in = tl.arange(0, CP)
    w_in = tl.arange(0, WP)
    v_in = tl.arange(0, VP)
    s_in = tl.arange(0, SP)
    n_in = tl.arange(0, ROWS)
    all_files = (batch * F).to(tl.int64)

    h = tl.load(state + at, mask=inside, other=0.0).to(ACC)
    if LSTM:
        c = tl.load(state + all_files * D + at, mask=inside, other=0.0).to(ACC)
    if kept is not None:
        tl.static_assert(HOLD < 2)  # what chooses then keeps nothing
        keys += begin.to(tl.int64) * P * KEY_ROW
        values += begin.to(tl.int64) * P * VALUE_ROW
        if given_choice is not None:
            given_choice += begin.to(tl.int64) * F
        if given_active is not None:
            given_active += begin.to(tl.int64) * F
        if output is not None:
            output += begin.to(tl.int64) * F * D
            choice += begin.to(tl.int64) * F
            active += begin.to(tl.int64) * F
            if LSTM:
                cells += begin.to(tl.int64) * F * D
        if reset is not None:
            reset += begin
        if valid is not None:
            valid += begin
        if noise is not None:
            noise += begin.to(tl.int64) * F * S
        if comm_mask is not None:
            comm_mask += begin.to(tl.int64) * F * D
    if HOLD > 0:
        asks = hold(from_state, 2, AP)
        if comm_say is not None:
            says = hold(comm_say, SAYS, DP)
    if HOLD == 2:
        held_hh, held_ih = hold(weight_hh, S * GATES, DP), hold(weight_ih, S * GATES, DP)
        held_bias_hh, held_bias_ih = None, None
        if bias_ih is not None:
            held_bias_hh = load_each(bias_hh + d, d < D, S * GATES, D)
            held_bias_ih = load_each(bias_ih + d, d < D, S * GATES, D)
        if comm_say is not None:
            reads = hold(comm_read, 3, TP)
    # of states that stay within bounds (what is said, they take a share of) one scale is enough
    BOUNDED: tl.constexpr = SAYS != 1 and not SINGLE
    if BOUNDED:
        bound = power_below(tl.maximum(tl.abs(h), 1.0), weight_hh.dtype)
        if reset is not None:
            again = tl.load(restart + at, mask=inside, other=0.0).to(ACC)
            bound_again = power_below(tl.maximum(tl.abs(again), 1.0), weight_hh.dtype)
    # without loops inside, what the next step reads is on its way in good time
    for turn in tl.range(steps, num_stages=2 if HOLD == 2 else 1):
        t = turn
        if SINGLE:  # a step is a sequence of its own, and each turn has others
            t = 0
            first = (turn * tl.num_programs(0) + program) * SEQUENCES
            b = first + sequence
            ok = (sequence < SEQUENCES) & (b < batch)
            place = (b * F + column % F).to(tl.int64)
            inside = (d < D)[:, None] & ok[None, :]
            # in which sequence, and where in the history its state is, if the step is not the first
            own_b = (begin + b) % each
            at = (own_b * F + column % F).to(tl.int64)[None, :] * D + d[:, None]
            earlier = ((begin + b - each) * F + column % F).to(tl.int64)[None, :] * D + d[:, None]
            later = inside & (begin + b >= each)[None, :]
            h = tl.load(history + earlier, mask=later, other=0.0)
            h += tl.load(state + at, mask=inside & ~later, other=0.0).to(ACC)
            if LSTM:
                at_c = (each * F).to(tl.int64) * D + at
                c = tl.load(history_c + earlier, mask=later, other=0.0)
                c += tl.load(state + at_c, mask=inside & ~later, other=0.0).to(ACC)
        here = t * all_files + place  # of a column among all object files
        if kept is not None:
            row = kept + here[None, :] * KEPT
        if reset is not None:
            starts = tl.load(reset + t * batch + b, mask=ok, other=0) != 0
            anew = starts[None, :]
            h = tl.where(anew, tl.load(restart + at, mask=inside, other=0.0).to(ACC), h)
            if BOUNDED:  # the state that is replaced may have been anything
                bound = tl.where(starts, bound_again, bound)
            if LSTM:
                at_c = (each * F).to(tl.int64) * D + at
                again = tl.load(restart + at_c, mask=inside, other=0.0).to(ACC)
                c = tl.where(anew, again, c)
        if BOUNDED:
            h_in = within(h, bound, weight_hh.dtype, PRECISION)
            h_scale = scale_of(bound, weight_hh.dtype)
        else:
            h_in, h_scale = fit(h, weight_hh.dtype, PRECISION)
        if HOLD > 0:
            asked_first = times(asks[0], h_in, ACC, PRECISION) * h_scale[None, :]
            asked = times(asks[1], h_in, ACC, PRECISION) * h_scale[None, :]
        else:
            asked = tl.zeros((AP, R), ACC)
            asked_first = asked
            for i in tl.range(2, num_stages=STAGES):
                asked = times(from_state.load([i * AP, 0]), h_in, ACC, PRECISION) * h_scale[None, :]
                asked_first = tl.where(i == 0, asked, asked_first)
        query = top(asked_first, DP)
        ask = top(asked, CP)

        # Step 2: rows are the positions of all sequences; columns compete where they are at home
        z = tl.zeros((VP, R), ACC)
        mass = tl.zeros((R,), ACC)
        for a in tl.range(A, num_stages=1):
            seen = tl.zeros((WP, R), ACC)
            head_mass = tl.zeros((R,), ACC)
            if SEQUENCES * P == 1:
                head_mass, seen = look_at_one(a, t, keys, values, ask, first, batch, ok, shape)
                if kept is not None:
                    tl.store(kept_look + here * A + a, head_mass, mask=ok)
            else:
                for start in tl.range(0, SEQUENCES * P, PB, num_stages=STAGES):
                    s, mine, position, seen_here = look(
                        start, a, t, keys, values, ask, first, batch, sequence, ok, shape
                    )
                    head_mass += tl.sum(s, 0)
                    seen += seen_here
                    if kept is not None:
                        at_look = kept_look + (here[None, :] * A + a) * P + (position % P)[:, None]
                        tl.store(at_look, s, mask=mine)
            if MEAN:
                seen = seen * inverse(head_mass + epsilon, PRECISION)[None, :]
            if kept is not None:
                inside_c = (c_in < C)[:, None] & ok[None, :]
                tl.store(row + ASK + a * C + c_in[:, None], ask, mask=inside_c)
                if MEAN:
                    tl.store(kept + here * KEPT + MASS + a, head_mass, mask=ok)
                if MEAN or value is not None:
                    inside_w = (w_in < W)[:, None] & ok[None, :]
                    tl.store(row + SEEN + a * W + w_in[:, None], seen, mask=inside_w)
            if value is None:
                z = seen
            else:
                own_v = (v_in >= a * (V // A)) & (v_in < (a + 1) * (V // A))
                weights = tl.load(
                    value + v_in[:, None] * W + w_in[None, :],
                    mask=own_v[:, None] & (w_in < W)[None, :],
                    other=0.0,
                )
                z += dot(nearest(weights.to(ACC), PRECISION), seen, ACC, PRECISION)
            mass += head_mass
            if A > 1:  # the next head's, or the last's again
                of_next = from_state.load([tl.minimum(a + 2, A) * AP, 0])
                asked = times(of_next, h_in, ACC, PRECISION)
                ask = top(asked * h_scale[None, :], CP)
        if kept is not None:  # both as one factor of the weights' gradients, and 1 of the biases'
            inside_v = (v_in < V)[:, None] & ok[None, :]
            tl.store(row + RIGHT + d[:, None], h, mask=inside)
            tl.store(row + RIGHT + D + v_in[:, None], z, mask=inside_v)
            tl.store(kept + here * KEPT + RIGHT + D + V, 1.0, mask=ok)

        update = ok
        if given_active is not None:
            update = tl.load(given_active + here, mask=ok, other=0) != 0
        elif ACTIVE < F:
            other = tl.sum(tl.where(column[:, None] == column[None, :], mass[None, :], 0.0), 1)
            tie = (other[:, None] == mass[None, :]) & (column[:, None] < column[None, :])
            together = (sequence[:, None] == sequence[None, :]) & ok[:, None] & ok[None, :]
            ahead = together & ((other[:, None] > mass[None, :]) | tie)
            update = ok & (tl.sum(ahead.to(tl.int32), 0) < ACTIVE)
        if active is not None:
            tl.store(active + here, update, mask=ok)
        if valid is not None:
            update = update & (tl.load(valid + t * batch + b, mask=ok, other=0) != 0)

        # Step 3: schema by schema, gate by gate; with the last gate the candidate is complete
        z_in, z_scale = fit(z, weight_ih.dtype, PRECISION)
        if HOLD == 2:
            noises, chosen = None, None
            if noise is not None:
                noises = load_each(noise + here * S, ok, S, 1)
            if given_choice is not None:
                chosen = tl.load(given_choice + here, mask=ok, other=0).to(tl.int32)
            c_before = h
            if LSTM:
                c_before = c
            weights = (held_hh, held_ih, held_bias_hh, held_bias_ih)
            inputs = (h_in, h_scale, z_in, z_scale)
            best, new, new_c = choose(
                *weights, noises, chosen, query, h, c_before, *inputs, S, LSTM, ACC, PRECISION
            )
        else:
            inside_s = (s_in < S)[:, None] & ok[None, :]
            extra = tl.zeros((SP, R), ACC)
            if noise is not None:
                extra = tl.load(noise + here[None, :] * S + s_in[:, None], mask=inside_s, other=0.0)
                extra = extra.to(ACC)
            given_best = tl.zeros((R,), tl.int32)
            if given_choice is not None:
                given_best = tl.load(given_choice + here, mask=ok, other=0).to(tl.int32)

            best = tl.zeros((R,), tl.int32)
            best_logit = tl.full((R,), float("-inf"), ACC)
            # what is combined element by element comes in blocks like those of the weights
            h_0, h_1 = parts(h, PARTS)
            query_0, query_1 = parts(query, PARTS)
            gate_0, gate_1, gate_2, done_0, new_0, new_1 = h_0, h_0, h_0, h_0, h_0, h_0
            merit = tl.zeros((R,), ACC)
            if LSTM:
                c_0, c_1 = parts(c, PARTS)
                done_c, new_c_0, new_c_1 = c_0, c_0, c_0
            if bias_ih is not None:
                given_0, given_1 = load_halves(bias_ih, 0, D, ROWS)
                hidden_0, hidden_1 = load_halves(bias_hh, 0, D, ROWS)
            for i in tl.range(S * PARTS * GATES, num_stages=STAGES):
                g = i % GATES
                part = i // GATES % PARTS
                j = i // (GATES * PARTS)
                start = (j * GATES + g) * DP + part * ROWS
                hidden = times(weight_hh.load([start, 0]), h_in, ACC, PRECISION)
                given = times(weight_ih.load([start, 0]), z_in, ACC, PRECISION)
                if bias_ih is not None:
                    hidden = plus_halves(hidden, h_scale, hidden_0, hidden_1)
                    given = plus_halves(given, z_scale, given_0, given_1)
                    # the next, which is on its way until it is needed
                    k = tl.minimum(i + 1, S * PARTS * GATES - 1)
                    first_row = k // GATES % PARTS * ROWS
                    at_bias = (k // (GATES * PARTS) * GATES + k % GATES) * D
                    given_0, given_1 = load_halves(bias_ih + at_bias, first_row, D, ROWS)
                    hidden_0, hidden_1 = load_halves(bias_hh + at_bias, first_row, D, ROWS)
                else:
                    hidden, given = hidden * h_scale[None, :], given * z_scale[None, :]
                opened = sigmoid(hidden + given, PRECISION)
                gate_0 = tl.where(g == 0, opened, gate_0)
                gate_1 = tl.where(g == 1, opened, gate_1)
                if LSTM:
                    gate_2 = tl.where(g == 2, tanh(hidden + given, PRECISION), gate_2)
                if g == GATES - 1:
                    if LSTM:  # i f g o
                        last = opened
                        cell = gate_1 * tl.where(part == 0, c_0, c_1) + gate_0 * gate_2
                        candidate = last * tanh(cell, PRECISION)
                    else:  # r u m, and n
                        last = tanh(given + gate_0 * hidden, PRECISION)
                        gate_2 = hidden
                        candidate = last + gate_1 * (tl.where(part == 0, h_0, h_1) - last)
                    merit = tl.where(part == 0, 0.0, merit)
                    merit += tl.sum(tl.where(part == 0, query_0, query_1) * candidate, 0)
                    logit = merit + tl.sum(tl.where((s_in == j)[:, None], extra, 0.0), 0)
                    if given_choice is not None:
                        take = given_best == j
                    else:  # NaN is the largest, and of equals the first counts
                        beyond = (logit > best_logit) | (
                            (logit != logit) & (best_logit == best_logit)
                        )
                        take = beyond | (j == 0)
                    complete = column * 0 + part == PARTS - 1
                    take = take & complete
                    best = tl.where(take, j, best)
                    best_logit = tl.where(take, logit, best_logit)
                    done_0 = tl.where(part == 0, candidate, done_0)
                    new_0 = tl.where(take[None, :], done_0, new_0)
                    new_1 = tl.where(take[None, :], candidate, new_1)
                    if LSTM:
                        done_c = tl.where(part == 0, cell, done_c)
                        new_c_0 = tl.where(take[None, :], done_c, new_c_0)
                        new_c_1 = tl.where(take[None, :], cell, new_c_1)
                    if kept is not None:
                        tl.store(kept + here * KEPT + LOGITS + j, logit, mask=ok & complete)
                        n = part * ROWS + n_in
                        inside_n = (n < D)[:, None] & ok[None, :]
                        gates = row + j * 4 * D + n[:, None]
                        tl.store(gates, gate_0, mask=inside_n)
                        tl.store(gates + D, gate_1, mask=inside_n)
                        tl.store(gates + 2 * D, gate_2, mask=inside_n)
                        tl.store(gates + 3 * D, last, mask=inside_n)
            new = whole(new_0, new_1, PARTS)
            new_c = new
            if LSTM:
                new_c = whole(new_c_0, new_c_1, PARTS)
        if choice is not None:
            tl.store(choice + here, best, mask=ok)
        new = tl.where(update[None, :], new, h)
        if LSTM:
            c = tl.where(update[None, :], new_c, c)
        if kept is not None:
            tl.store(row + QUERY + d[:, None], query, mask=inside)
            tl.store(row + UPDATED + d[:, None], new, mask=inside)

        # Step 4
        if comm_say is not None:
            if BOUNDED:
                new_in, new_scale = within(new, bound, comm_read.dtype, PRECISION), h_scale
            else:
                new_in, new_scale = fit(new, comm_read.dtype, PRECISION)
            q = tl.zeros((TP, R), ACC)
            k, v = q, q
            if HOLD == 2:
                q = times(reads[0], h_in, ACC, PRECISION) * h_scale[None, :]
                k = times(reads[1], new_in, ACC, PRECISION) * new_scale[None, :]
                v = times(reads[2], new_in, ACC, PRECISION) * new_scale[None, :]
            else:
                x_in, x_scale = h_in, h_scale
                for i in tl.range(3, num_stages=STAGES):
                    product = times(comm_read.load([i * TP, 0]), x_in, ACC, PRECISION)
                    v = product * x_scale[None, :]
                    q = tl.where(i == 0, v, q)
                    k = tl.where(i == 1, v, k)
                    x_in, x_scale = new_in, new_scale
            t_in = tl.arange(0, TP)
            column_c = tl.arange(0, RC)
            sequence_c = column_c // F
            ok_c = (sequence_c < SEQUENCES) & (first + sequence_c < batch)
            together = (sequence_c[:, None] == sequence_c[None, :]) & ok_c[:, None] & ok_c[None, :]
            q_in = widen(nearest(q, PRECISION), RC)
            talk = listen(q_in, widen(k, RC), t_in, together, comm_scale, E, HP, ACC, PRECISION)
            v_of_heads = spread(widen(nearest(v, PRECISION), RC), t_in, U, HP)
            heard = narrow(dot(v_of_heads, turned(talk, HP), ACC, PRECISION), R)
            if kept is not None:
                some_e = (t_in < HE)[:, None] & ok[None, :]
                some_u = (t_in < HU)[:, None] & ok[None, :]
                tl.store(row + COMM_QUERY + t_in[:, None], q, mask=some_e)
                tl.store(row + READ + t_in[:, None], k, mask=some_e)
                tl.store(row + READ + HE + t_in[:, None], v, mask=some_u)
                here_c = t * all_files + (first * F + column_c).to(tl.int64)
                at_talk = kept + TALK + talk_at(here_c * KEPT, column_c, F, HP)
                tl.store(at_talk, talk, mask=of_heads(together, H, HP))
                tl.store(row + HEARD + t_in[:, None], heard, mask=some_u)
            heard_in, heard_scale = fit(heard, comm_say.dtype, PRECISION)
            message = h
            gate = h
            if HOLD > 0:
                message = times(says[0], heard_in, ACC, PRECISION) * heard_scale[None, :]
                gate = times(says[SAYS - 1], heard_in, ACC, PRECISION) * heard_scale[None, :]
            else:
                for i in tl.range(SAYS, num_stages=STAGES):
                    gate = times(comm_say.load([i * DP, 0]), heard_in, ACC, PRECISION)
                    gate *= heard_scale[None, :]
                    message = tl.where(i == 0, gate, message)
            if comm_mask is not None:
                at_d = here[None, :] * D + d[:, None]
                message *= tl.load(comm_mask + at_d, mask=inside, other=0.0).to(ACC)
            if comm_bias is not None:
                bias = tl.load(comm_bias + d, mask=d < D, other=0.0).to(ACC)
                message = tanh(message, PRECISION)
                gate = sigmoid(gate + bias[:, None], PRECISION)
                if kept is not None:
                    tl.store(row + MESSAGE + d[:, None], message, mask=inside)
                    tl.store(row + MESSAGE + D + d[:, None], gate, mask=inside)
                joined = new + gate * (message - new)
            else:
                joined = new + message
            new = tl.where(update[None, :], joined, h)
        h = tl.where(inside, new, 0.0)
        if output is not None:
            tl.store(output + here[None, :] * D + d[:, None], h, mask=inside)
            if LSTM:
                tl.store(cells + here[None, :] * D + d[:, None], c, mask=inside)
    if final is not None:
        tl.store(final + at, h, mask=inside)
        if LSTM:
            tl.store(final + all_files * D + at, c, mask=inside)
