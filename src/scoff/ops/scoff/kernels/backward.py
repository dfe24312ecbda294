"""The backward kernel of the `fused` backend: one program runs all steps of a few sequences back.

It does what the step before depends on. What is a sum over steps, every weight gradient and the
gradient of the input, is made of what it writes here, in single large products outside. Gradients
take the place of what was kept, once it has been read.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    compete,
    dot,
    fit,
    listen,
    nearest,
    pull,
    spread,
    tanh,
    times,
    widen,
)


@triton.jit
def candidate(gates, h, c, inside, D: tl.constexpr, LSTM: tl.constexpr):
    """A schema's gates, and its new h and c"""
    gate_0 = tl.load(gates, mask=inside, other=0.0)
    gate_1 = tl.load(gates + D, mask=inside, other=0.0)
    gate_2 = tl.load(gates + 2 * D, mask=inside, other=0.0)
    gate_3 = tl.load(gates + 3 * D, mask=inside, other=0.0)
    new_c = c
    if LSTM:  # i f g o
        new_c = gate_1 * c + gate_0 * gate_2
        new_h = gate_3 * tanh(new_c)
    else:  # r u m n
        new_h = gate_3 + gate_1 * (h - gate_3)
    return gate_0, gate_1, gate_2, gate_3, new_h, new_c


# one compilation for all lengths and batch sizes, and for a temperature that changes
@triton.jit(do_not_specialize=["temperature", "steps", "batch"])
def backward_kernel(
    # what the forward kernel read; weights, but for the first, transposed
    keys,
    values,
    reset,
    valid,
    comm_mask,
    value,  # [V, W]
    from_state_t,  # [D, X]
    weight_ih_t,  # [S, G, V, D]
    weight_hh_t,  # [S, G, D, D]
    comm_read_t,  # [D, H * E + H * U]
    comm_say_t,  # [H * U, SAY]
    # what it kept
    before,  # [Z, T, B, F, D]
    choice,
    active,
    kept,  # gradients of gates, of what is asked, read and said take their place
    look,  # attention; gets the gradients of its scores
    what,  # gets the gradients of what is seen
    # gradients
    d_output,  # [T, B, F, D]
    d_state,  # [Z, B, F, D] comes from the step after the last, goes to the step before the first
    d_restart,  # [Z, B, F, D], added to
    d_z,  # [T, B, F, V]
    scratch,  # [programs, SCRATCH]
    temperature,
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
    KEY_HEAD: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    SHARED: tl.constexpr,
    SAY: tl.constexpr,
    WHAT: tl.constexpr,
    KEPT: tl.constexpr,
    MASS: tl.constexpr,
    SEEN: tl.constexpr,
    LOGITS: tl.constexpr,
    UPDATED: tl.constexpr,
    READ: tl.constexpr,
    MESSAGE: tl.constexpr,
    MEAN: tl.constexpr,
    LSTM: tl.constexpr,
    SEQUENCES: tl.constexpr,
    R: tl.constexpr,
    DP: tl.constexpr,
    CP: tl.constexpr,
    WP: tl.constexpr,
    VP: tl.constexpr,
    HP: tl.constexpr,
    EP: tl.constexpr,
    UP: tl.constexpr,
    SP: tl.constexpr,
    NB: tl.constexpr,
    RC: tl.constexpr,
    PB: tl.constexpr,
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
    ASKED: tl.constexpr = S * 4 * D
    program = tl.program_id(0)
    column = tl.arange(0, R)
    sequence = column // F
    b = program * SEQUENCES + sequence
    ok = (sequence < SEQUENCES) & (b < batch)
    place = (b * F + column % F).to(tl.int64)
    d = tl.arange(0, DP)
    inside = (d < D)[:, None] & ok[None, :]
    at = place[None, :] * D + d[:, None]
    c_in = tl.arange(0, CP)
    w_in = tl.arange(0, WP)
    v_in = tl.arange(0, VP)
    s_in = tl.arange(0, SP)
    p_in = tl.arange(0, PB)
    inside_c = (c_in < C)[:, None] & ok[None, :]
    inside_w = (w_in < W)[:, None] & ok[None, :]
    inside_v = (v_in < V)[:, None] & ok[None, :]
    inside_s = (s_in < S)[:, None] & ok[None, :]
    all_files = (batch * F).to(tl.int64)

    own = scratch + program.to(tl.int64) * SCRATCH
    asked_here = own + column[None, :] * X
    read_here = own + RC * X + column[None, :] * (HE + HU)
    said_here = own + RC * (X + HE + HU) + column[None, :] * SAY

    d_h = tl.load(d_state + at, mask=inside, other=0.0).to(ACC)
    d_c = d_h
    if LSTM:
        d_c = tl.load(d_state + all_files * D + at, mask=inside, other=0.0).to(ACC)
    for back in range(steps):
        t = steps - 1 - back
        here = t * all_files + place
        at_d = here[None, :] * D + d[:, None]
        row = kept + here[None, :] * KEPT
        h = tl.load(before + at_d, mask=inside, other=0.0).to(ACC)
        c = h
        if LSTM:
            c = tl.load(before + steps * all_files * D + at_d, mask=inside, other=0.0).to(ACC)
        update = (tl.load(active + here, mask=ok, other=0) != 0) & ok
        if valid is not None:
            update = update & (tl.load(valid + t * batch + b, mask=ok, other=0) != 0)
        changes = update[None, :]
        d_new = d_h + tl.load(d_output + at_d, mask=inside, other=0.0).to(ACC)
        d_h = tl.where(changes, 0.0, d_new)
        d_new = tl.where(changes, d_new, 0.0)
        d_new_c = d_c
        if LSTM:
            d_new_c = tl.where(changes, d_c, 0.0)
            d_c = tl.where(changes, 0.0, d_c)
        tl.debug_barrier()  # the step after has read what is overwritten in scratch

        # Step 4
        if comm_say_t is not None:
            e_in = tl.arange(0, EP)
            u_in = tl.arange(0, UP)
            column_c = tl.arange(0, RC)
            sequence_c = column_c // F
            ok_c = (sequence_c < SEQUENCES) & (program * SEQUENCES + sequence_c < batch)
            together_c = (
                (sequence_c[:, None] == sequence_c[None, :]) & ok_c[:, None] & ok_c[None, :]
            )
            some_e = (e_in < HE)[:, None] & ok_c[None, :]
            some_u = (u_in < HU)[:, None] & ok_c[None, :]
            here_c = t * all_files + (program * SEQUENCES * F + column_c).to(tl.int64)
            row_c = kept + here_c[None, :] * KEPT
            asked_c = own + column_c[None, :] * X
            read_c = own + RC * X + column_c[None, :] * (HE + HU)
            at_message = row + MESSAGE + d[:, None]
            d_said = d_new
            if SAY == 2 * D:
                updated = tl.load(row + UPDATED + d[:, None], mask=inside, other=0.0)
                said = tl.load(at_message, mask=inside, other=0.0)
                gate = tl.load(at_message + D, mask=inside, other=0.0)
                d_gate = d_new * (said - updated) * gate * (1 - gate)
                d_said = d_new * gate * (1 - said * said)
                d_new = d_new * (1 - gate)
                tl.store(said_here + D + d[:, None], d_gate, mask=(d < D)[:, None])
            if comm_mask is not None:
                d_said *= tl.load(comm_mask + at_d, mask=inside, other=0.0).to(ACC)
            tl.store(said_here + d[:, None], d_said, mask=(d < D)[:, None])
            q = tl.load(row_c + ASKED + D + e_in[:, None], mask=some_e, other=0.0)
            k = tl.load(row_c + READ + e_in[:, None], mask=some_e, other=0.0)
            v = tl.load(row_c + READ + HE + u_in[:, None], mask=some_u, other=0.0)
            tl.debug_barrier()
            tl.store(at_message, d_said, mask=inside)
            if SAY == 2 * D:
                tl.store(at_message + D, d_gate, mask=inside)
            d_heard = pull(
                tl.zeros((UP, R), ACC),
                comm_say_t,
                said_here,
                ok,
                SAY,
                NB,
                STAGES,
                ACC,
                PRECISION,
            )
            d_heard = widen(d_heard, RC)
            wide_q = nearest(spread(q, e_in, E, HP), PRECISION)
            talk = listen(wide_q, k, together_c, comm_scale, HP, ACC, PRECISION)
            wide = nearest(spread(d_heard, u_in, U, HP), PRECISION)  # [HU, heads * R]
            d_talk = dot(tl.trans(wide), v, ACC, PRECISION)
            d_v = dot(wide, talk, ACC, PRECISION)
            d_talk = talk * (d_talk - tl.sum(talk * d_talk, 1)[:, None]) * comm_scale
            d_k = dot(wide_q, d_talk, ACC, PRECISION)
            d_q = dot(nearest(k, PRECISION), tl.trans(d_talk), ACC, PRECISION).reshape(EP, HP, RC)
            of_head = (e_in // E)[:, None] == tl.arange(0, HP)[None, :]
            d_q = tl.sum(tl.where(of_head[:, :, None], d_q, 0.0), 1)
            tl.store(asked_c + D + e_in[:, None], d_q, mask=(e_in < HE)[:, None])
            tl.store(read_c + e_in[:, None], d_k, mask=(e_in < HE)[:, None])
            tl.store(read_c + HE + u_in[:, None], d_v, mask=(u_in < HU)[:, None])
            tl.store(row_c + ASKED + D + e_in[:, None], d_q, mask=some_e)
            tl.store(row_c + READ + e_in[:, None], d_k, mask=some_e)
            tl.store(row_c + READ + HE + u_in[:, None], d_v, mask=some_u)
            tl.debug_barrier()
            d_read = pull(
                tl.zeros((DP, R), ACC),
                comm_read_t,
                read_here,
                ok,
                HE + HU,
                NB,
                STAGES,
                ACC,
                PRECISION,
            )
            # who is not updated is read as he was before
            d_h += tl.where(changes, 0.0, d_read)
            d_new += tl.where(changes, d_read, 0.0)

        # Step 3: what each schema's weight in the choice would have to be
        d_merit = tl.zeros((SP, R), ACC)
        for j in range(S):
            gates = row + j * 4 * D + d[:, None]
            _, _, _, _, new_h, new_c = candidate(gates, h, c, inside, D, LSTM)
            merit = tl.sum(d_new * new_h, 0)
            if LSTM:
                merit += tl.sum(d_new_c * new_c, 0)
            d_merit += tl.where((s_in == j)[:, None], merit[None, :], 0.0)
        logits = tl.load(row + LOGITS + s_in[:, None], mask=inside_s, other=0.0)
        p = tl.trans(compete(tl.trans(logits / temperature), tl.trans(inside_s)))
        d_logits = p * (d_merit - tl.sum(p * d_merit, 0)[None, :]) / temperature
        best = tl.load(choice + here, mask=ok, other=0).to(tl.int32)
        query = tl.load(row + ASKED + d[:, None], mask=inside, other=0.0)
        d_query = tl.zeros((DP, R), ACC)
        for j in range(S):
            gates = row + j * 4 * D + d[:, None]
            gate_0, gate_1, gate_2, gate_3, new_h, new_c = candidate(gates, h, c, inside, D, LSTM)
            d_logit = tl.sum(tl.where((s_in == j)[:, None], d_logits, 0.0), 0)[None, :]
            taken = (best == j)[None, :]
            d_candidate = tl.where(taken, d_new, 0.0) + d_logit * query
            d_query += d_logit * new_h
            if LSTM:  # i f g o
                bent = tanh(new_c)
                d_cell = tl.where(taken, d_new_c, 0.0) + d_candidate * gate_3 * (1 - bent * bent)
                d_c += d_cell * gate_1
                d_0 = d_cell * gate_2 * gate_0 * (1 - gate_0)
                d_1 = d_cell * c * gate_1 * (1 - gate_1)
                d_2 = d_cell * gate_0 * (1 - gate_2 * gate_2)
                d_3 = d_candidate * bent * gate_3 * (1 - gate_3)
            else:  # r u m n
                d_h += d_candidate * gate_1
                d_3 = d_candidate * (1 - gate_1) * (1 - gate_3 * gate_3)
                d_2 = d_3 * gate_0
                d_1 = d_candidate * (h - gate_3) * gate_1 * (1 - gate_1)
                d_0 = d_3 * gate_2 * gate_0 * (1 - gate_0)
            tl.debug_barrier()  # all have read what is overwritten here
            tl.store(gates, d_0, mask=inside)
            tl.store(gates + D, d_1, mask=inside)
            tl.store(gates + 2 * D, d_2, mask=inside)
            tl.store(gates + 3 * D, d_3, mask=inside)
        tl.store(row + ASKED + d[:, None], d_query, mask=inside)
        tl.store(asked_here + d[:, None], d_query, mask=(d < D)[:, None])
        tl.debug_barrier()
        d_read_z = tl.zeros((VP, R), ACC)
        for i in tl.range(S * GATES * BLOCKS, num_stages=STAGES):
            start = (i % BLOCKS) * NB
            g = i // BLOCKS % GATES
            j = i // (BLOCKS * GATES)
            n = start + tl.arange(0, NB)
            inside_n = (n < D)[:, None] & ok[None, :]
            at_gate = row + (j * 4 + g) * D + n[:, None]
            d_hidden = tl.load(at_gate, mask=inside_n, other=0.0)
            # GRU's m is in the hidden part alone, and n, which comes after it, in the other
            d_given = tl.load(at_gate + (0 if LSTM else g // 2 * D), mask=inside_n, other=0.0)
            d_hidden, h_scale = fit(d_hidden, weight_hh_t.dtype, PRECISION)
            d_given, z_scale = fit(d_given, weight_ih_t.dtype, PRECISION)
            jg = j * GATES + g
            w_h = weight_hh_t.load([jg * DP, start])
            w_i = weight_ih_t.load([jg * VP, start])
            d_h += times(w_h, d_hidden, ACC, PRECISION) * h_scale[None, :]
            d_read_z += times(w_i, d_given, ACC, PRECISION) * z_scale[None, :]
        at_v = here[None, :] * V + v_in[:, None]
        tl.store(d_z + at_v, d_read_z, mask=inside_v)

        # Step 2
        for a in range(A):
            if value is None:
                d_seen = d_read_z
            else:
                own_v = (v_in >= a * (V // A)) & (v_in < (a + 1) * (V // A))
                weights = tl.load(
                    value + v_in[None, :] * W + w_in[:, None],
                    mask=own_v[None, :] & (w_in < W)[:, None],
                    other=0.0,
                )
                d_seen = dot(nearest(weights.to(ACC), PRECISION), d_read_z, ACC, PRECISION)
            fewer = tl.zeros((R,), ACC)
            if MEAN:
                seen = tl.load(row + SEEN + a * W + w_in[:, None], mask=inside_w, other=0.0)
                whole = tl.load(kept + here * KEPT + MASS + a, mask=ok, other=1.0) + epsilon
                d_seen = d_seen / whole[None, :]
                fewer = tl.sum(d_seen * seen, 0)
            at_what = (here[None, :] * 2 * A + a) * WHAT + w_in[:, None]
            tl.store(what + at_what, d_seen, mask=inside_w)
            d_ask = tl.zeros((CP, R), ACC)
            for start in tl.range(0, SEQUENCES * P, PB, num_stages=STAGES):
                position = start + p_in
                home = position // P
                there = program * SEQUENCES + home
                exists = (position < SEQUENCES * P) & (there < batch)
                line = (t * batch + there).to(tl.int64) * P + position % P
                mine = (home[:, None] == sequence[None, :]) & exists[:, None] & ok[None, :]
                at_look = look + (here[None, :] * 2 * A + a) * P + (position % P)[:, None]
                s = tl.load(at_look, mask=mine, other=0.0).to(ACC)
                value_here = tl.load(
                    values + line[:, None] * VALUE_ROW + a * VALUE_HEAD + w_in[None, :],
                    mask=exists[:, None] & (w_in < W)[None, :],
                    other=0.0,
                )
                value_here = nearest(value_here.to(ACC), PRECISION)
                d_s = dot(value_here, d_seen, ACC, PRECISION) - fewer[None, :]
                d_s = s * (d_s - tl.sum(s * d_s, 1)[:, None])
                tl.store(at_look + A * P, d_s, mask=mine)
                if SHARED:
                    key = tl.trans(value_here)
                else:
                    key = tl.load(
                        keys + line[None, :] * KEY_ROW + a * KEY_HEAD + c_in[:, None],
                        mask=exists[None, :] & (c_in < C)[:, None],
                        other=0.0,
                    )
                    key = nearest(key.to(ACC), PRECISION)
                d_ask += dot(key, d_s, ACC, PRECISION)
            at_ask = D + HE + a * C + c_in[:, None]
            tl.store(row + ASKED + at_ask, d_ask, mask=inside_c)
            tl.store(asked_here + at_ask, d_ask, mask=(c_in < C)[:, None])
        tl.debug_barrier()
        d_h = pull(d_h, from_state_t, asked_here, ok, X, NB, STAGES, ACC, PRECISION)

        if reset is not None:
            anew = tl.load(reset + t * batch + b, mask=ok, other=0)[None, :] != 0
            total = tl.load(d_restart + at, mask=inside, other=0.0).to(ACC)
            tl.store(d_restart + at, total + tl.where(anew, d_h, 0.0), mask=inside)
            d_h = tl.where(anew, 0.0, d_h)
            if LSTM:
                total = tl.load(d_restart + all_files * D + at, mask=inside, other=0.0).to(ACC)
                total += tl.where(anew, d_c, 0.0)
                tl.store(d_restart + all_files * D + at, total, mask=inside)
                d_c = tl.where(anew, 0.0, d_c)
    tl.store(d_state + at, d_h, mask=inside)
    if LSTM:
        tl.store(d_state + all_files * D + at, d_c, mask=inside)
