"""The forward kernel of the `fused` backend: one program runs all steps of a few sequences.

Matrices lie on their side: columns are the object files of a program's sequences, one after the
other, so that column `s * F + f` is object file f of sequence s, and rows are features. Tensor
cores like it so: they take 64 rows or more of the weights at a time, and as few as 8 columns. What
concerns one sequence alone, the competition for its input and the communication, is done for all
columns at once and masked.

The state is in registers. The weights are read at every step, from the cache, in blocks of rows
that are on their way while those before them are used. What is needed in blocks of rows goes
through scratch memory, feature by feature within a column; so do the candidates, of which each
column then loads the one that it has chosen.

The same kernel, on single steps, computes again from the states what the backward pass needs.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    block,
    compete,
    dot,
    fit,
    listen,
    nearest,
    project,
    spread,
    tanh,
    times,
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
    from_state,  # [X, D]: D rows of schema query, H * E of comm. queries, A * C of what is asked
    value,  # [V, W]; None: z is what is seen
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
    kept_gates,  # rows of work [T, B, F, WORK]: S, 4, D of gates, then as in from_state
    kept_look,  # [T, B, F, 2, A, P] the first: attention
    kept_what,  # [T, B, F, 2, A, WHAT] the second: what is asked
    kept_mass,  # [T, B, F, A]
    kept_seen,  # [T, B, F, A, W]
    kept_right,  # [T, B, F, RIGHT] h, z
    kept_query,  # [T, B, F, D]
    kept_logits,  # [T, B, F, S]
    kept_updated,  # [T, B, F, D]
    kept_read,  # [T, B, F, H * E + H * U]
    kept_heard,  # [T, B, F, HEARD]
    kept_message,  # [T, B, F, SAY] what is said, and its gate
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
    WORK: tl.constexpr,
    SAY: tl.constexpr,
    WHAT: tl.constexpr,
    RIGHT: tl.constexpr,
    HEARD: tl.constexpr,
    ACTIVE: tl.constexpr,
    MEAN: tl.constexpr,
    LSTM: tl.constexpr,
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
    PB: tl.constexpr,  # positions of a block
    STAGES: tl.constexpr,
    SCRATCH: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    GATES: tl.constexpr = 4 if LSTM else 3
    BLOCKS: tl.constexpr = (D + NB - 1) // NB
    HE: tl.constexpr = H * E
    HU: tl.constexpr = H * U
    X: tl.constexpr = D + HE + A * C
    TRIED: tl.constexpr = S if given_choice is None else 1  # candidates that are stored
    program = tl.program_id(0)
    column = tl.arange(0, R)
    sequence = column // F
    b = program * SEQUENCES + sequence
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
    together = (sequence[:, None] == sequence[None, :]) & ok[:, None] & ok[None, :]
    all_files = (batch * F).to(tl.int64)

    own = scratch + program.to(tl.int64) * SCRATCH
    state_h = own + column[None, :] * DP
    state_c = state_h + R * DP
    tried_h = state_c + R * DP
    tried_c = tried_h + TRIED * R * DP
    asked = own + (2 + 2 * TRIED) * R * DP + column[None, :] * (X + NB)
    read = own + (2 + 2 * TRIED) * R * DP + R * (X + NB) + column[None, :] * (HE + HU + NB)
    said = (
        own + (2 + 2 * TRIED) * R * DP + R * (X + HE + HU + 2 * NB) + column[None, :] * (2 * D + NB)
    )

    h = tl.load(state + at, mask=inside, other=0.0).to(ACC)
    if LSTM:
        c = tl.load(state + all_files * D + at, mask=inside, other=0.0).to(ACC)
    for t in range(steps):
        here = t * all_files + place  # of a column among all object files
        if reset is not None:
            anew = tl.load(reset + t * batch + b, mask=ok, other=0)[None, :] != 0
            h = tl.where(anew, tl.load(restart + at, mask=inside, other=0.0).to(ACC), h)
            if LSTM:
                again = tl.load(restart + all_files * D + at, mask=inside, other=0.0).to(ACC)
                c = tl.where(anew, again, c)
        tl.debug_barrier()  # the step before has read what is overwritten here
        tl.store(state_h + d[:, None], h)
        if LSTM:
            tl.store(state_c + d[:, None], c)
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
                there = program * SEQUENCES + home
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
            if kept_seen is not None:
                inside_c = (c_in < C)[:, None] & ok[None, :]
                inside_w = (w_in < W)[:, None] & ok[None, :]
                what = kept_what + (here[None, :] * 2 * A + A + a) * WHAT + c_in[:, None]
                tl.store(what, ask, mask=inside_c)
                at_w = (here[None, :] * A + a) * W + w_in[:, None]
                tl.store(kept_seen + at_w, seen, mask=inside_w)
                tl.store(kept_mass + here * A + a, head_mass, mask=ok)
            if value is None:
                z = seen
            else:
                weights = block(value, v_in, w_in, WP)
                if A > 1:
                    own_v = (v_in >= a * (V // A)) & (v_in < (a + 1) * (V // A))
                    weights = tl.where(own_v[:, None], weights, 0.0)
                z += dot(weights, seen, ACC, PRECISION)
            mass += head_mass
        if kept_right is not None:
            inside_v = (v_in < V)[:, None] & ok[None, :]
            right = kept_right + here[None, :] * RIGHT
            tl.store(right + d[:, None], h, mask=inside)
            tl.store(right + D + v_in[:, None], z, mask=inside_v)

        update = ok
        if given_active is not None:
            update = tl.load(given_active + here, mask=ok, other=0) != 0
        elif ACTIVE < F:
            other = tl.sum(tl.where(column[:, None] == column[None, :], mass[None, :], 0.0), 1)
            tie = (other[:, None] == mass[None, :]) & (column[:, None] < column[None, :])
            ahead = together & ((other[:, None] > mass[None, :]) | tie)
            update = ok & (tl.sum(ahead.to(tl.int32), 0) < ACTIVE)
        if active is not None:
            tl.store(active + here, update, mask=ok)
        if valid is not None:
            update = update & (tl.load(valid + t * batch + b, mask=ok, other=0) != 0)

        if given_choice is not None:
            best = tl.load(given_choice + here, mask=ok, other=0).to(tl.int32)

        # Step 3: gate by gate, schema by schema; with the last gate the candidate is complete
        h_in, h_scale = fit(h, weight_hh.dtype, PRECISION)
        z_in, z_scale = fit(z, weight_ih.dtype, PRECISION)
        logits = tl.zeros((SP, R), ACC)
        gate_0 = tl.zeros((NB, R), ACC)
        gate_1 = tl.zeros((NB, R), ACC)
        gate_2 = tl.zeros((NB, R), ACC)
        for i in tl.range(BLOCKS * S * GATES, num_stages=STAGES):
            g = i % GATES
            j = (i // GATES) % S
            start = (i // (GATES * S)) * NB
            n = start + tl.arange(0, NB)
            jg = j * GATES + g
            hidden = times(weight_hh.load([jg * DP + start, 0]), h_in, ACC, PRECISION)
            given = times(weight_ih.load([jg * DP + start, 0]), z_in, ACC, PRECISION)
            hidden *= h_scale[None, :]
            given *= z_scale[None, :]
            if bias_ih is not None:
                given += tl.load(bias_ih + jg * D + n, mask=n < D, other=0.0)[:, None].to(ACC)
                hidden += tl.load(bias_hh + jg * D + n, mask=n < D, other=0.0)[:, None].to(ACC)
            old = tl.load((state_c if LSTM else state_h) + n[:, None])
            query = tl.load(asked + n[:, None], mask=(n < D)[:, None], other=0.0)
            opened = tl.sigmoid(hidden + given)
            gate_0 = tl.where(g == 0, opened, gate_0)
            gate_1 = tl.where(g == 1, opened, gate_1)
            if LSTM:
                gate_2 = tl.where(g == 2, tanh(hidden + given), gate_2)
            if g == GATES - 1:
                if LSTM:  # i f g o
                    last = opened
                    new_c = gate_1 * old + gate_0 * gate_2
                    candidate = last * tanh(new_c)
                    if given_choice is None:
                        tl.store(tried_c + j * R * DP + n[:, None], new_c)
                    else:  # the only one that is looked at
                        tl.store(tried_c + n[:, None], new_c, mask=(best == j)[None, :])
                else:  # r u m, and n
                    last = tanh(given + gate_0 * hidden)
                    gate_2 = hidden
                    candidate = last + gate_1 * (old - last)
                if given_choice is None:
                    tl.store(tried_h + j * R * DP + n[:, None], candidate)
                else:
                    tl.store(tried_h + n[:, None], candidate, mask=(best == j)[None, :])
                merit = tl.sum(query * candidate, 0)
                logits += tl.where((s_in == j)[:, None], merit[None, :], 0.0)
                if kept_gates is not None:
                    inside_n = (n < D)[:, None] & ok[None, :]
                    gates = kept_gates + here[None, :] * WORK + j * 4 * D + n[:, None]
                    tl.store(gates, gate_0, mask=inside_n)
                    tl.store(gates + D, gate_1, mask=inside_n)
                    tl.store(gates + 2 * D, gate_2, mask=inside_n)
                    tl.store(gates + 3 * D, last, mask=inside_n)
        inside_s = (s_in < S)[:, None] & ok[None, :]
        at_s = here[None, :] * S + s_in[:, None]
        if noise is not None:
            logits += tl.load(noise + at_s, mask=inside_s, other=0.0).to(ACC)
        if kept_logits is not None:
            tl.store(kept_logits + at_s, logits, mask=inside_s)
            query = tl.load(asked + d[:, None], mask=inside, other=0.0)
            tl.store(kept_query + here[None, :] * D + d[:, None], query, mask=inside)
        slot = tl.zeros((R,), tl.int32)
        if given_choice is None:
            best = tl.argmax(tl.where((s_in < S)[:, None], logits, float("-inf")), 0)
            slot = best
        if choice is not None:
            tl.store(choice + here, best, mask=ok)
        tl.debug_barrier()
        chosen = slot[None, :] * R * DP + d[:, None]
        new = tl.load(tried_h + chosen, mask=inside, other=0.0)
        new = tl.where(update[None, :], new, h)
        if LSTM:
            c = tl.where(update[None, :], tl.load(tried_c + chosen, mask=inside, other=0.0), c)
        if kept_updated is not None:
            tl.store(kept_updated + here[None, :] * D + d[:, None], new, mask=inside)

        # Step 4
        if comm_say is not None:
            e_in = tl.arange(0, EP)
            u_in = tl.arange(0, UP)
            some_e = (e_in < HE)[:, None]
            some_u = (u_in < HU)[:, None]
            project(comm_read, new, read, HE + HU, NB, STAGES, ACC, PRECISION)
            tl.debug_barrier()
            q = tl.load(asked + D + e_in[:, None], mask=some_e, other=0.0)
            k = tl.load(read + e_in[:, None], mask=some_e, other=0.0)
            v = tl.load(read + HE + u_in[:, None], mask=some_u, other=0.0)
            talk = listen(spread(q, e_in, E, HP), k, together, comm_scale, HP, ACC, PRECISION)
            heard = dot(nearest(v, PRECISION), tl.trans(talk), ACC, PRECISION)  # [HU, heads * R]
            heard = heard.reshape(UP, HP, R)
            of_head = (u_in // U)[:, None] == tl.arange(0, HP)[None, :]
            heard = tl.sum(tl.where(of_head[:, :, None], heard, 0.0), 1)
            heard = tl.where(some_u, heard, 0.0)
            if kept_heard is not None:
                tl.store(
                    kept_gates + here[None, :] * WORK + S * 4 * D + D + e_in[:, None],
                    q,
                    mask=some_e & ok[None, :],
                )
                at_read = kept_read + here[None, :] * (HE + HU)
                tl.store(at_read + e_in[:, None], k, mask=some_e & ok[None, :])
                tl.store(at_read + HE + u_in[:, None], v, mask=some_u & ok[None, :])
                tl.store(
                    kept_heard + here[None, :] * HEARD + u_in[:, None],
                    heard,
                    mask=some_u & ok[None, :],
                )
            project(comm_say, heard, said, SAY, NB, STAGES, ACC, PRECISION)
            tl.debug_barrier()
            message = tl.load(said + d[:, None], mask=inside, other=0.0)
            if comm_mask is not None:
                at_d = here[None, :] * D + d[:, None]
                message *= tl.load(comm_mask + at_d, mask=inside, other=0.0).to(ACC)
            if comm_bias is not None:
                bias = tl.load(comm_bias + d, mask=d < D, other=0.0).to(ACC)
                gate = tl.load(said + D + d[:, None], mask=inside, other=0.0) + bias[:, None]
                message = tanh(message)
                gate = tl.sigmoid(gate)
                if kept_message is not None:
                    at_m = here[None, :] * SAY + d[:, None]
                    tl.store(kept_message + at_m, message, mask=inside)
                    tl.store(kept_message + at_m + D, gate, mask=inside)
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
