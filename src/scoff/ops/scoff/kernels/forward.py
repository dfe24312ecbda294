"""The forward kernel of the `fused` backend: one program runs all steps of a few sequences.

Matrices lie on their side: columns are the object files of a program's sequences, one after the
other, so that column `s * F + f` is object file f of sequence s, and rows are features. Tensor
cores like it so: they take 64 rows or more of the weights at a time, and as few as 8 columns. What
concerns one sequence alone, the competition for its input and the communication, is done for all
columns at once and masked.

The state is in registers, and so is the best candidate so far. The weights are read at every step,
from the cache, in blocks of rows that are on their way while those before them are used. Products
that are needed in other pieces than they come in go through scratch memory, feature by feature
within a column.

The same kernel, on single steps, computes again from the states what the backward pass needs.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    compete,
    dot,
    fit,
    listen,
    narrow,
    nearest,
    parts,
    project,
    spread,
    tanh,
    times,
    whole,
)


# one compilation for all lengths and batch sizes
@triton.jit(do_not_specialize=["steps", "batch"])
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
    from_state,  # [X, D]: D rows of schema query, H * E of comm. queries, A * C of what is asked
    weight_ih,  # [S, G, D, V]
    weight_hh,  # [S, G, D, D]
    bias_ih,  # [S, G, D]
    bias_hh,  # [S, G, D]
    comm_read,  # [H * E + H * U, D]: keys and values
    comm_say,  # [D, H * U], gated: [2 D, H * U]
    comm_bias,  # [D]
    # what it writes; None: not wanted
    output,  # [T, B, F, D]
    cells,  # [T, B, F, D] the LSTM's c
    final,  # [Z, B, F, D]
    choice,  # [T, B, F]
    active,  # [T, B, F]
    kept,  # [T, B, F, KEPT]
    kept_look,  # [T, B, F, 2, A, P] the first: attention
    kept_what,  # [T, B, F, 2, A, WHAT] the second: what is asked
    scratch,  # [programs, SCRATCH]
    steps,
    batch,
    comm_scale: tl.constexpr,
    epsilon: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    U: tl.constexpr,
    KEY_ROW: tl.constexpr,
    KEY_HEAD: tl.constexpr,  # from one head's key to the next; 0: they share it
    VALUE_ROW: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    SHARED: tl.constexpr,  # whether keys and values are the same tensor
    SAY: tl.constexpr,
    WHAT: tl.constexpr,
    KEPT: tl.constexpr,  # a row of what is kept, and where in it things are
    MASS: tl.constexpr,
    SEEN: tl.constexpr,
    RIGHT: tl.constexpr,
    LOGITS: tl.constexpr,
    UPDATED: tl.constexpr,
    READ: tl.constexpr,
    HEARD: tl.constexpr,
    MESSAGE: tl.constexpr,
    ACTIVE: tl.constexpr,
    MEAN: tl.constexpr,
    LSTM: tl.constexpr,
    SINGLE: tl.constexpr,
    SEQUENCES: tl.constexpr,  # of a program
    R: tl.constexpr,  # its columns
    DP: tl.constexpr,  # D, C, W, V, H, H * E, H * U, S padded
    CP: tl.constexpr,
    WP: tl.constexpr,
    VP: tl.constexpr,
    HP: tl.constexpr,
    EP: tl.constexpr,
    UP: tl.constexpr,
    SP: tl.constexpr,
    NB: tl.constexpr,  # rows of a block of weights
    ROWS: tl.constexpr,  # of a block of a gate's weights: all of them or half
    RC: tl.constexpr,  # columns of the communication, whose products want 16
    PB: tl.constexpr,  # positions of a block
    STAGES: tl.constexpr,
    SCRATCH: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    GATES: tl.constexpr = 4 if LSTM else 3
    HE: tl.constexpr = H * E
    HU: tl.constexpr = H * U
    X: tl.constexpr = D + HE + A * C
    ASKED: tl.constexpr = S * 4 * D  # where it starts in what is kept; before it, the gates
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
    p_in = tl.arange(0, PB)
    n_in = tl.arange(0, ROWS)
    all_files = (batch * F).to(tl.int64)

    own = scratch + program.to(tl.int64) * SCRATCH
    asked = own + column[None, :] * (X + NB)
    read = own + RC * (X + NB)
    said = read + RC * (HE + HU + NB)

    h = tl.load(state + at, mask=inside, other=0.0).to(ACC)
    if LSTM:
        c = tl.load(state + all_files * D + at, mask=inside, other=0.0).to(ACC)
    for turn in range(steps):
        t = turn
        if SINGLE:  # a step is a sequence of its own, and each turn has others
            t = 0
            first = (turn * tl.num_programs(0) + program) * SEQUENCES
            b = first + sequence
            ok = (sequence < SEQUENCES) & (b < batch)
            place = (b * F + column % F).to(tl.int64)
            inside = (d < D)[:, None] & ok[None, :]
            at = place[None, :] * D + d[:, None]
            h = tl.load(state + at, mask=inside, other=0.0).to(ACC)
            if LSTM:
                c = tl.load(state + all_files * D + at, mask=inside, other=0.0).to(ACC)
        here = t * all_files + place  # of a column among all object files
        if kept is not None:
            row = kept + here[None, :] * KEPT
        if reset is not None:
            anew = tl.load(reset + t * batch + b, mask=ok, other=0)[None, :] != 0
            h = tl.where(anew, tl.load(restart + at, mask=inside, other=0.0).to(ACC), h)
            if LSTM:
                again = tl.load(restart + all_files * D + at, mask=inside, other=0.0).to(ACC)
                c = tl.where(anew, again, c)
        tl.debug_barrier()  # the step before has read what is overwritten here
        project(from_state, h, asked, X, NB, STAGES, ACC, PRECISION)
        tl.debug_barrier()

        # Step 2: rows are the positions of all sequences; columns compete where they are at home
        z = tl.zeros((VP, R), ACC)
        mass = tl.zeros((R,), ACC)
        for a in range(A):
            ask = tl.load(asked + D + HE + a * C + c_in[:, None], (c_in < C)[:, None], 0.0)
            seen = tl.zeros((WP, R), ACC)
            head_mass = tl.zeros((R,), ACC)
            for start in tl.range(0, SEQUENCES * P, PB, num_stages=STAGES):
                position = start + p_in
                home = position // P
                there = first + home
                exists = (position < SEQUENCES * P) & (there < batch)
                line = (t * batch + there).to(tl.int64) * P + position % P
                key = tl.load(
                    keys + line[:, None] * KEY_ROW + a * KEY_HEAD + c_in[None, :],
                    mask=exists[:, None] & (c_in < C)[None, :],
                    other=0.0,
                )
                key = nearest(key.to(ACC), PRECISION)
                mine = (home[:, None] == sequence[None, :]) & exists[:, None] & ok[None, :]
                s = compete(dot(key, ask, ACC, PRECISION), mine)
                head_mass += tl.sum(s, 0)
                if kept_look is not None:
                    look = kept_look + (here[None, :] * 2 * A + a) * P + (position % P)[:, None]
                    tl.store(look, s, mask=mine)
                if SHARED:
                    read_here = tl.trans(key)
                else:
                    read_here = tl.load(
                        values + line[None, :] * VALUE_ROW + a * VALUE_HEAD + w_in[:, None],
                        mask=exists[None, :] & (w_in < W)[:, None],
                        other=0.0,
                    )
                    read_here = nearest(read_here.to(ACC), PRECISION)
                seen += dot(read_here, s, ACC, PRECISION)
            if MEAN:
                seen = seen / (head_mass + epsilon)[None, :]
            if kept is not None:
                inside_c = (c_in < C)[:, None] & ok[None, :]
                inside_w = (w_in < W)[:, None] & ok[None, :]
                what = kept_what + (here[None, :] * 2 * A + A + a) * WHAT + c_in[:, None]
                tl.store(what, ask, mask=inside_c)
                tl.store(row + SEEN + a * W + w_in[:, None], seen, mask=inside_w)
                tl.store(kept + here * KEPT + MASS + a, head_mass, mask=ok)
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

        inside_s = (s_in < S)[:, None] & ok[None, :]
        extra = tl.zeros((SP, R), ACC)
        if noise is not None:
            extra = tl.load(noise + here[None, :] * S + s_in[:, None], mask=inside_s, other=0.0)
            extra = extra.to(ACC)
        given_best = tl.zeros((R,), tl.int32)
        if given_choice is not None:
            given_best = tl.load(given_choice + here, mask=ok, other=0).to(tl.int32)
        query = tl.load(asked + d[:, None], mask=inside, other=0.0)

        # Step 3: schema by schema, gate by gate; with the last gate the candidate is complete
        h_in, h_scale = fit(h, weight_hh.dtype, PRECISION)
        z_in, z_scale = fit(z, weight_ih.dtype, PRECISION)
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
            bias_given = tl.load(bias_ih + n_in, mask=n_in < D, other=0.0).to(ACC)
            bias_hidden = tl.load(bias_hh + n_in, mask=n_in < D, other=0.0).to(ACC)
        for i in tl.range(S * PARTS * GATES, num_stages=STAGES):
            g = i % GATES
            part = i // GATES % PARTS
            j = i // (GATES * PARTS)
            start = (j * GATES + g) * DP + part * ROWS
            hidden = times(weight_hh.load([start, 0]), h_in, ACC, PRECISION) * h_scale[None, :]
            given = times(weight_ih.load([start, 0]), z_in, ACC, PRECISION) * z_scale[None, :]
            if bias_ih is not None:
                given += bias_given[:, None]
                hidden += bias_hidden[:, None]
                # the next, which is on its way until it is needed
                k = tl.minimum(i + 1, S * PARTS * GATES - 1)
                n = k // GATES % PARTS * ROWS + n_in
                at_bias = (k // (GATES * PARTS) * GATES + k % GATES) * D + n
                bias_given = tl.load(bias_ih + at_bias, mask=n < D, other=0.0).to(ACC)
                bias_hidden = tl.load(bias_hh + at_bias, mask=n < D, other=0.0).to(ACC)
            opened = tl.sigmoid(hidden + given)
            gate_0 = tl.where(g == 0, opened, gate_0)
            gate_1 = tl.where(g == 1, opened, gate_1)
            if LSTM:
                gate_2 = tl.where(g == 2, tanh(hidden + given), gate_2)
            if g == GATES - 1:
                if LSTM:  # i f g o
                    last = opened
                    cell = gate_1 * tl.where(part == 0, c_0, c_1) + gate_0 * gate_2
                    candidate = last * tanh(cell)
                else:  # r u m, and n
                    last = tanh(given + gate_0 * hidden)
                    gate_2 = hidden
                    candidate = last + gate_1 * (tl.where(part == 0, h_0, h_1) - last)
                merit = tl.where(part == 0, 0.0, merit)
                merit += tl.sum(tl.where(part == 0, query_0, query_1) * candidate, 0)
                logit = merit + tl.sum(tl.where((s_in == j)[:, None], extra, 0.0), 0)
                if given_choice is not None:
                    take = given_best == j
                else:  # NaN is the largest, and of equals the first counts
                    beyond = (logit > best_logit) | ((logit != logit) & (best_logit == best_logit))
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
        if choice is not None:
            tl.store(choice + here, best, mask=ok)
        new = tl.where(update[None, :], new, h)
        if LSTM:
            c = tl.where(update[None, :], whole(new_c_0, new_c_1, PARTS), c)
        if kept is not None:
            tl.store(row + ASKED + d[:, None], query, mask=inside)
            tl.store(row + UPDATED + d[:, None], new, mask=inside)

        # Step 4
        if comm_say is not None:
            e_in = tl.arange(0, EP)
            u_in = tl.arange(0, UP)
            column_c = tl.arange(0, RC)
            sequence_c = column_c // F
            ok_c = (sequence_c < SEQUENCES) & (first + sequence_c < batch)
            together_c = (
                (sequence_c[:, None] == sequence_c[None, :]) & ok_c[:, None] & ok_c[None, :]
            )
            some_e = (e_in < HE)[:, None] & ok_c[None, :]
            some_u = (u_in < HU)[:, None] & ok_c[None, :]
            read_new = read + column[None, :] * (HE + HU + NB)
            project(comm_read, new, read_new, HE + HU, NB, STAGES, ACC, PRECISION)
            tl.debug_barrier()
            read_c = read + column_c[None, :] * (HE + HU + NB)
            asked_c = own + column_c[None, :] * (X + NB) + D
            q = tl.load(asked_c + e_in[:, None], mask=some_e, other=0.0)
            k = tl.load(read_c + e_in[:, None], mask=some_e, other=0.0)
            v = tl.load(read_c + HE + u_in[:, None], mask=some_u, other=0.0)
            talk = listen(spread(q, e_in, E, HP), k, together_c, comm_scale, HP, ACC, PRECISION)
            heard = dot(nearest(v, PRECISION), tl.trans(talk), ACC, PRECISION)  # [HU, heads * RC]
            heard = heard.reshape(UP, HP, RC)
            of_head = (u_in // U)[:, None] == tl.arange(0, HP)[None, :]
            heard = tl.sum(tl.where(of_head[:, :, None], heard, 0.0), 1)
            heard = tl.where((u_in < HU)[:, None], heard, 0.0)
            if kept is not None:
                here_c = t * all_files + (first * F + column_c).to(tl.int64)
                row_c = kept + here_c[None, :] * KEPT
                tl.store(row_c + ASKED + D + e_in[:, None], q, mask=some_e)
                tl.store(row_c + READ + e_in[:, None], k, mask=some_e)
                tl.store(row_c + READ + HE + u_in[:, None], v, mask=some_u)
                tl.store(row_c + HEARD + u_in[:, None], heard, mask=some_u)
                tl.store(kept + here_c * KEPT + HEARD + HU, 1.0, mask=ok_c)
            said_new = said + column[None, :] * (2 * D + NB)
            heard = narrow(heard, R)
            project(comm_say, heard, said_new, SAY, NB, STAGES, ACC, PRECISION)
            tl.debug_barrier()
            message = tl.load(said_new + d[:, None], mask=inside, other=0.0)
            if comm_mask is not None:
                at_d = here[None, :] * D + d[:, None]
                message *= tl.load(comm_mask + at_d, mask=inside, other=0.0).to(ACC)
            if comm_bias is not None:
                bias = tl.load(comm_bias + d, mask=d < D, other=0.0).to(ACC)
                gate = tl.load(said_new + D + d[:, None], mask=inside, other=0.0) + bias[:, None]
                message = tanh(message)
                gate = tl.sigmoid(gate)
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
