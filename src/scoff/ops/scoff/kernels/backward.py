"""The backward kernel of the `fused` backend: one program runs all steps of a few sequences back.

It does what the step before depends on, and the gradient of the input. The weight gradients, which
are sums over steps, are made of what it writes here, in a single large product outside. Gradients
take the place of what was kept, once it has been read.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    above_zeros,
    beside,
    compete,
    dot,
    fit,
    larger,
    load_four,
    narrow,
    of_heads,
    parts,
    power_below,
    scale_of,
    spread,
    store_four,
    sums_of,
    talk_at,
    times,
    turned,
    widen,
    within,
)
from scoff.ops.scoff.kernels.elementary import inverse, nearest, tanh


@triton.jit
def candidate(gate_0, gate_1, gate_2, gate_3, h, c, LSTM: tl.constexpr, PRECISION: tl.constexpr):
    """A schema's new h and c"""
    new_c = c
    if LSTM:
        new_c = gate_1 * c + gate_0 * gate_2
        new_h = gate_3 * tanh(new_c, PRECISION)
    else:
        new_h = gate_3 + gate_1 * (h - gate_3)
    return new_h, new_c


@triton.jit
def look_back_at_one(
    a,
    t,
    program,
    here,
    ok,
    keys,
    values,
    look,
    d_keys,
    d_values,
    d_seen,
    fewer,
    ask,
    batch,
    shape: tl.constexpr,
):
    """The gradient of what is asked, of the only position of a program's only sequence, without
    products of matrices; stores those of its key and value."""
    ACC: tl.constexpr = shape.ACC
    c_in, w_in = tl.arange(0, shape.CP), tl.arange(0, shape.WP)
    some_c, some_w = c_in < shape.C, w_in < shape.W
    line = (t * batch + program).to(tl.int64)
    at_key = line * shape.KEY_ROW + a * shape.KEY_HEAD + c_in
    at_value = line * shape.VALUE_ROW + a * shape.VALUE_HEAD + w_in
    value = tl.load(values + at_value, mask=some_w, other=0.0).to(ACC)
    s = tl.load(look + here * shape.A + a, mask=ok, other=0.0).to(ACC)
    d_s = tl.sum(value[:, None] * d_seen, 0) - fewer
    d_s = s * (d_s - tl.sum(s * d_s, 0))
    through = d_s[None, :] * ask
    if shape.SHARED:
        key = value
        through += s[None, :] * d_seen
    else:
        key = tl.load(keys + at_key, mask=some_c, other=0.0).to(ACC)
        d_value = tl.sum(s[None, :] * d_seen, 1)
        if shape.A > 1 and shape.VALUE_HEAD == 0:
            others = some_w & (a > 0)
            d_value += tl.load(d_values + at_value, mask=others, other=0.0).to(ACC)
        tl.store(d_values + at_value, d_value, mask=some_w)
    d_key = tl.sum(through, 1)
    if shape.A > 1 and shape.KEY_HEAD == 0:  # all heads read the same
        d_key += tl.load(d_keys + at_key, mask=some_c & (a > 0), other=0.0).to(ACC)
    tl.store(d_keys + at_key, d_key, mask=some_c)
    return key[:, None] * d_s[None, :]


# one compilation for all lengths and batch sizes, and for a temperature that changes
@triton.jit(do_not_specialize=["temperature", "batch", "steps", "begin"])
def backward_kernel(
    # what the forward kernel read; all weights but the first are padded and transposed
    keys,
    values,
    reset,
    valid,
    comm_mask,
    value,  # [V, W]
    from_state_t,  # [1 + A, DP, AP]
    weight_ih_t,  # [S, G, VP, DP]
    weight_hh_t,  # [S, G, DP, DP]
    comm_read_t,  # [3, DP, TP]
    comm_say_t,  # [1 or 2, TP, DP]
    # what it kept
    state,  # [Z, B, F, D]
    restart,  # [Z, B, F, D]
    history,  # [T, B, F, D] states after each step
    history_c,
    choice,
    active,
    kept,  # gradients of gates, of what is asked, read and said take their place
    look,  # attention
    # gradients
    d_output,  # [T, B, F, D]
    d_state,  # [Z, B, F, D] comes from the step after the last, goes to the step before the first
    d_restart,  # [Z, B, F, D], added to
    d_keys,  # [T, B, P, KEY_ROW]
    d_values,  # [T, B, P, VALUE_ROW]; None: the values are the keys
    d_z,  # [T, B, F, V]; None: not wanted
    temperature,
    batch,
    steps,
    begin,  # the first of the steps; what was kept, and d_z, begin with it
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
    KEY_HEAD: tl.constexpr = shape.KEY_HEAD
    VALUE_ROW: tl.constexpr = shape.VALUE_ROW
    VALUE_HEAD: tl.constexpr = shape.VALUE_HEAD
    SHARED: tl.constexpr = shape.SHARED
    SAYS: tl.constexpr = shape.SAYS
    KEPT: tl.constexpr = shape.KEPT
    QUERY: tl.constexpr = shape.QUERY
    COMM_QUERY: tl.constexpr = shape.COMM_QUERY
    ASK: tl.constexpr = shape.ASK
    READ: tl.constexpr = shape.READ
    MESSAGE: tl.constexpr = shape.MESSAGE
    UPDATED: tl.constexpr = shape.UPDATED
    LOGITS: tl.constexpr = shape.LOGITS
    TALK: tl.constexpr = shape.TALK
    MASS: tl.constexpr = shape.MASS
    SEEN: tl.constexpr = shape.SEEN
    MEAN: tl.constexpr = shape.MEAN
    LSTM: tl.constexpr = shape.LSTM
    DETACH: tl.constexpr = shape.DETACH
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
    PARTS: tl.constexpr = DP // ROWS
    WIDE: tl.constexpr = max(16, R)  # columns of products that sum over them
    HE: tl.constexpr = H * E
    HU: tl.constexpr = H * U
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

    # The gradient of a state is in two parts. What is made element by element stays where loads put
    # it, from step to step. What comes out of products, where tensor cores leave it, goes through
    # memory: or else all that meets it would be moved to its place, again and again.
    d_direct = tl.zeros((DP, R), ACC)
    d_c = d_direct
    if LSTM:
        d_c = tl.load(d_state + all_files * D + at, mask=inside, other=0.0).to(ACC)
    begun = begin * all_files
    keys += begun // F * P * KEY_ROW
    values += begun // F * P * VALUE_ROW
    d_keys += begun // F * P * KEY_ROW
    if d_values is not None:
        d_values += begun // F * P * VALUE_ROW
    choice += begun
    active += begun
    history += begun * D
    d_output += begun * D
    if LSTM:
        history_c += begun * D
    if reset is not None:
        reset += begin * batch
    if valid is not None:
        valid += begin * batch
    if comm_mask is not None:
        comm_mask += begun * D
    for back in range(steps):
        t = steps - 1 - back
        here = t * all_files + place
        at_d = here[None, :] * D + d[:, None]
        row = kept + here[None, :] * KEPT
        later = inside & (column * 0 + begin + t > 0)[None, :]
        earlier = at_d - all_files * D
        h = tl.load(history + earlier, mask=later, other=0.0)
        h += tl.load(state + at, mask=inside & ~later, other=0.0).to(ACC)
        c = h
        if LSTM:
            c = tl.load(history_c + earlier, mask=later, other=0.0)
            c += tl.load(state + all_files * D + at, mask=inside & ~later, other=0.0).to(ACC)
        if reset is not None:
            anew = tl.load(reset + t * batch + b, mask=ok, other=0)[None, :] != 0
            h = tl.where(anew, tl.load(restart + at, mask=inside, other=0.0).to(ACC), h)
            if LSTM:
                again = tl.load(restart + all_files * D + at, mask=inside, other=0.0).to(ACC)
                c = tl.where(anew, again, c)
        update = (tl.load(active + here, mask=ok, other=0) != 0) & ok
        if valid is not None:
            update = update & (tl.load(valid + t * batch + b, mask=ok, other=0) != 0)
        changes = update[None, :]
        d_new = d_direct + tl.load(d_state + at, mask=inside, other=0.0).to(ACC)
        d_new += tl.load(d_output + at_d, mask=inside, other=0.0).to(ACC)
        d_direct = tl.where(changes, 0.0, d_new)
        d_new = tl.where(changes, d_new, 0.0)
        d_h = tl.zeros((DP, R), ACC)
        d_new_c = d_c
        if LSTM:
            d_new_c = tl.where(changes, d_c, 0.0)
            d_c = tl.where(changes, 0.0, d_c)
        query = tl.load(row + QUERY + d[:, None], mask=inside, other=0.0)
        best = tl.load(choice + here, mask=ok, other=0).to(tl.int32)
        logits = tl.load(row + LOGITS + s_in[:, None], mask=inside_s, other=0.0)

        # Step 4
        if comm_say_t is not None:
            t_in = tl.arange(0, TP)
            column_c = tl.arange(0, RC)
            sequence_c = column_c // F
            ok_c = (sequence_c < SEQUENCES) & (program * SEQUENCES + sequence_c < batch)
            together = (sequence_c[:, None] == sequence_c[None, :]) & ok_c[:, None] & ok_c[None, :]
            some_e = (t_in < HE)[:, None] & ok[None, :]
            some_u = (t_in < HU)[:, None] & ok[None, :]
            at_q = row + COMM_QUERY + t_in[:, None]
            at_k = row + READ + t_in[:, None]
            at_v = row + READ + HE + t_in[:, None]
            q = tl.load(at_q, mask=some_e, other=0.0)
            k = tl.load(at_k, mask=some_e, other=0.0)
            v = tl.load(at_v, mask=some_u, other=0.0)
            here_c = t * all_files + (program * SEQUENCES * F + column_c).to(tl.int64)
            at_talk = kept + TALK + talk_at(here_c * KEPT, column_c, F, HP)
            talk = tl.load(at_talk, mask=of_heads(together, H, HP), other=0.0)
            at_message = row + MESSAGE + d[:, None]
            d_said = d_new
            d_gate = d_new
            if SAYS == 2:
                updated = tl.load(row + UPDATED + d[:, None], mask=inside, other=0.0)
                said = tl.load(at_message, mask=inside, other=0.0)
                gate = tl.load(at_message + D, mask=inside, other=0.0)
                d_gate = d_new * (said - updated) * gate * (1 - gate)
                d_said = d_new * gate * (1 - said * said)
                d_new = d_new * (1 - gate)
                tl.store(at_message + D, d_gate, mask=inside)
            if comm_mask is not None:
                d_said *= tl.load(comm_mask + at_d, mask=inside, other=0.0).to(ACC)
            tl.store(at_message, d_said, mask=inside)
            d_heard = tl.zeros((TP, R), ACC)
            if SAYS == 1:
                d_gate = d_said
            power = power_below(larger(d_said, d_gate), comm_say_t.dtype)
            said_in = within(d_said, power, comm_say_t.dtype, PRECISION)
            gate_in = within(d_gate, power, comm_say_t.dtype, PRECISION)
            # what is next has the same name, here and below: so Triton lays it out as numbers of 16
            # bits, whatever they were made of
            for i in tl.range(SAYS, num_stages=STAGES):
                d_heard += times(comm_say_t.load([i * TP, 0]), said_in, ACC, PRECISION)
                said_in = gate_in
            d_heard *= scale_of(power, comm_say_t.dtype)[None, :]
            wide_q = spread(nearest(widen(q, RC), PRECISION), t_in, E, HP)
            wide = spread(nearest(widen(d_heard, RC), PRECISION), t_in, U, HP)  # [HU, heads * RC]
            d_talk = dot(tl.trans(wide), widen(v, RC), ACC, PRECISION)
            d_v = dot(wide, talk, ACC, PRECISION)
            d_talk = talk * (d_talk - tl.sum(talk * d_talk, 1)[:, None]) * comm_scale
            d_k = dot(wide_q, d_talk, ACC, PRECISION)
            wide_k = spread(nearest(widen(k, RC), PRECISION), t_in, E, HP)
            d_q = dot(wide_k, turned(d_talk, HP), ACC, PRECISION)
            d_q = narrow(d_q, R)
            d_k = narrow(d_k, R)
            d_v = narrow(d_v, R)
            tl.store(at_q, d_q, mask=some_e)
            tl.store(at_k, d_k, mask=some_e)
            tl.store(at_v, d_v, mask=some_u)
            d_read = tl.zeros((DP, R), ACC)
            power = power_below(larger(larger(d_q, d_k), d_v), comm_read_t.dtype)
            scale = scale_of(power, comm_read_t.dtype)
            x_in = within(d_q, power, comm_read_t.dtype, PRECISION)
            d_k_in = within(d_k, power, comm_read_t.dtype, PRECISION)
            d_v_in = within(d_v, power, comm_read_t.dtype, PRECISION)
            for i in tl.range(3, num_stages=STAGES):
                product = times(comm_read_t.load([i * DP, 0]), x_in, ACC, PRECISION)
                product *= scale[None, :]
                x_in = tl.where(i == 0, d_k_in, d_v_in)
                # who is not updated is read as he was before
                earlier_state = changes & (i > 0)
                d_h += tl.where(earlier_state, 0.0, product)
                d_read += tl.where(earlier_state, product, 0.0)
            tl.debug_barrier()  # all have read what is overwritten here
            tl.store(d_state + at, d_read, mask=inside)
            tl.debug_barrier()
            d_new += tl.load(d_state + at, mask=inside, other=0.0).to(ACC)

        # Step 3: what each schema's weight in the choice would have to be
        d_merit = tl.zeros((SP, R), ACC)
        for j in range(0, S, 2):
            at_gates = row + j * 4 * D + d[:, None]
            last = tl.minimum(j + 1, S - 1)
            if LSTM:
                at_last = row + last * 4 * D + d[:, None]
                gates = load_four(at_gates, inside, D, 2 * D)
                last_gates = load_four(at_last, inside, D, 2 * D)
                first_h, first_c = candidate(*gates, h, c, LSTM, PRECISION)
                last_h, last_c = candidate(*last_gates, h, c, LSTM, PRECISION)
                first_h = first_h * d_new + d_new_c * first_c
                last_h = last_h * d_new + d_new_c * last_c
            else:
                both = load_four(at_gates + D, inside, 2 * D, (last - j) * 4 * D)
                u, n, last_u, last_n = both
                first_h = d_new * (n + u * (h - n))
                last_h = d_new * (last_n + last_u * (h - last_n))
            merit, last_merit = sums_of(first_h, last_h)
            d_merit += tl.where((s_in == j)[:, None], merit[None, :], 0.0)
            beyond = (s_in == last)[:, None] & (last > j)
            d_merit += tl.where(beyond, last_merit[None, :], 0.0)
        p = tl.trans(compete(tl.trans(logits / temperature), tl.trans(inside_s), PRECISION))
        d_logits = p * (d_merit - tl.sum(p * d_merit, 0)[None, :]) / temperature
        d_query = tl.zeros((DP, R), ACC)
        d_before = tl.zeros((DP, R), ACC)
        d_read_z = tl.zeros((VP, R), ACC)
        # of candidates, a little above 1: gradients of gates that are almost shut are far smaller,
        # and none are larger by as much as the range of a type leaves
        largest = larger(d_new, query * tl.max(tl.abs(d_logits), 0)[None, :])
        if LSTM:
            largest = larger(largest, d_new_c)
        power = power_below(largest / 8, weight_hh_t.dtype)
        # what is led back through the weights of the state, and through those of what is read:
        # that of this gate, and of those to come
        hidden_0 = within(d_new, power, weight_hh_t.dtype, PRECISION)
        hidden_1, hidden_2, hidden_3 = hidden_0, hidden_0, hidden_0
        given_0, given_1, given_2, given_3 = hidden_0, hidden_0, hidden_0, hidden_0
        for i in tl.range(S * GATES * PARTS, num_stages=STAGES):
            part = i % PARTS
            g = i // PARTS % GATES
            j = i // (PARTS * GATES)
            if i % (PARTS * GATES) == 0:  # a schema begins
                # once more, from the nearest cache: to have them in registers all along takes more
                gates_here = row + j * 4 * D + d[:, None]
                gate_0, gate_1, gate_2, gate_3 = load_four(gates_here, inside, D, 2 * D)
                new_h, new_c = candidate(gate_0, gate_1, gate_2, gate_3, h, c, LSTM, PRECISION)
                d_logit = tl.sum(tl.where((s_in == j)[:, None], d_logits, 0.0), 0)[None, :]
                taken = (best == j)[None, :]
                d_candidate = tl.where(taken, d_new, 0.0) + d_logit * query
                d_query += d_logit * new_h
                if LSTM:  # i f g o
                    bent = tanh(new_c, PRECISION)
                    d_cell = tl.where(taken, d_new_c, 0.0)
                    d_cell += d_candidate * gate_3 * (1 - bent * bent)
                    d_c += d_cell * gate_1
                    d_0 = d_cell * gate_2 * gate_0 * (1 - gate_0)
                    d_1 = d_cell * c * gate_1 * (1 - gate_1)
                    d_2 = d_cell * gate_0 * (1 - gate_2 * gate_2)
                    d_3 = d_candidate * bent * gate_3 * (1 - gate_3)
                else:  # r u m n
                    d_direct += d_candidate * gate_1
                    d_3 = d_candidate * (1 - gate_1) * (1 - gate_3 * gate_3)
                    d_2 = d_3 * gate_0
                    d_1 = d_candidate * (h - gate_3) * gate_1 * (1 - gate_1)
                    d_0 = d_3 * gate_2 * gate_0 * (1 - gate_0)
                store_four(gates_here, d_0, d_1, d_2, d_3, inside, D)
                hidden_0 = within(d_0, power, weight_hh_t.dtype, PRECISION)
                hidden_1 = within(d_1, power, weight_hh_t.dtype, PRECISION)
                hidden_2 = within(d_2, power, weight_hh_t.dtype, PRECISION)
                hidden_3 = within(d_3, power, weight_hh_t.dtype, PRECISION)
                given_0, given_1, given_2, given_3 = hidden_0, hidden_1, hidden_2, hidden_3
                if not LSTM:  # m is in the hidden part alone, and n, which comes after it, here
                    given_2 = hidden_3
            d_hidden, d_given = hidden_0, given_0
            if PARTS == 2:
                upper, lower = parts(d_hidden, PARTS)
                d_hidden = tl.where(part == 0, upper, lower)
                upper, lower = parts(d_given, PARTS)
                d_given = tl.where(part == 0, upper, lower)
            matrix = j * GATES + g
            w_h = weight_hh_t.load([matrix * DP, part * ROWS])
            w_i = weight_ih_t.load([matrix * VP, part * ROWS])
            d_before += times(w_h, d_hidden, ACC, PRECISION)
            d_read_z += times(w_i, d_given, ACC, PRECISION)
            if part == PARTS - 1:
                hidden_0, hidden_1, hidden_2 = hidden_1, hidden_2, hidden_3
                given_0, given_1, given_2 = given_1, given_2, given_3
        scale = scale_of(power, weight_hh_t.dtype)
        d_h += d_before * scale[None, :]
        d_read_z *= scale[None, :]
        tl.store(row + QUERY + d[:, None], d_query, mask=inside)
        if d_z is not None:
            tl.store(d_z + here[None, :] * V + v_in[:, None], d_read_z, mask=inside_v)

        # Step 2
        tall_ask = tl.zeros((AP, R), ACC)
        for a in tl.range(A, num_stages=1):
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
                d_seen = d_seen * inverse(whole, PRECISION)[None, :]
                fewer = tl.sum(d_seen * seen, 0)
            at_ask = row + ASK + a * C + c_in[:, None]
            ask = tl.load(at_ask, mask=inside_c, other=0.0)
            d_ask = tl.zeros((CP, R), ACC)
            if SEQUENCES * P == 1:
                d_ask = look_back_at_one(
                    a,
                    t,
                    program,
                    here,
                    ok,
                    keys,
                    values,
                    look,
                    d_keys,
                    d_values,
                    d_seen,
                    fewer,
                    ask,
                    batch,
                    shape,
                )
            else:
                for start in tl.range(0, SEQUENCES * P, PB, num_stages=STAGES):
                    position = start + p_in
                    home = position // P
                    there = program * SEQUENCES + home
                    exists = (position < SEQUENCES * P) & (there < batch)
                    line = (t * batch + there).to(tl.int64) * P + position % P
                    mine = (home[:, None] == sequence[None, :]) & exists[:, None] & ok[None, :]
                    at_look = look + (here[None, :] * A + a) * P + (position % P)[:, None]
                    s = tl.load(at_look, mask=mine, other=0.0).to(ACC)
                    value_here = tl.load(
                        values + line[:, None] * VALUE_ROW + a * VALUE_HEAD + w_in[None, :],
                        mask=exists[:, None] & (w_in < W)[None, :],
                        other=0.0,
                    )
                    value_here = nearest(value_here.to(ACC), PRECISION)
                    d_s = dot(value_here, d_seen, ACC, PRECISION) - fewer[None, :]
                    d_s = s * (d_s - tl.sum(s * d_s, 1)[:, None])
                    at_key = line[:, None] * KEY_ROW + a * KEY_HEAD + c_in[None, :]
                    some_key = exists[:, None] & (c_in < C)[None, :]
                    if SHARED:
                        key = tl.trans(value_here)
                        through = nearest(beside(s, d_s), PRECISION)
                        d_key = dot(through, tl.trans(beside(d_seen, ask)), ACC, PRECISION)
                    else:
                        d_key = dot(
                            nearest(widen(d_s, WIDE), PRECISION),
                            tl.trans(widen(ask, WIDE)),
                            ACC,
                            PRECISION,
                        )
                        through = nearest(widen(s, WIDE), PRECISION)
                        d_value = dot(through, tl.trans(widen(d_seen, WIDE)), ACC, PRECISION)
                        at_value = line[:, None] * VALUE_ROW + a * VALUE_HEAD + w_in[None, :]
                        some_value = exists[:, None] & (w_in < W)[None, :]
                        if A > 1 and VALUE_HEAD == 0:
                            others = some_value & (a > 0)
                            d_value += tl.load(d_values + at_value, mask=others, other=0.0).to(ACC)
                        tl.store(d_values + at_value, d_value, mask=some_value)
                        key = tl.load(
                            keys + line[None, :] * KEY_ROW + a * KEY_HEAD + c_in[:, None],
                            mask=exists[None, :] & (c_in < C)[:, None],
                            other=0.0,
                        )
                        key = nearest(key.to(ACC), PRECISION)
                    if A > 1 and KEY_HEAD == 0:  # all heads read the same
                        others = some_key & (a > 0)
                        d_key += tl.load(d_keys + at_key, mask=others, other=0.0).to(ACC)
                    tl.store(d_keys + at_key, d_key, mask=some_key)
                    d_ask += dot(key, d_s, ACC, PRECISION)
            tl.store(at_ask, d_ask, mask=inside_c)
            tall_ask = above_zeros(d_ask, AP)
            if A > 1 and not DETACH:
                x, scale = fit(tall_ask, from_state_t.dtype, PRECISION)
                product = times(from_state_t.load([(1 + a) * DP, 0]), x, ACC, PRECISION)
                d_h += product * scale[None, :]
        if A > 1:
            x, scale = fit(above_zeros(d_query, AP), from_state_t.dtype, PRECISION)
            d_h += times(from_state_t.load([0, 0]), x, ACC, PRECISION) * scale[None, :]
        else:
            tall_query = above_zeros(d_query, AP)
            if DETACH:
                tall_ask = tall_query
            power = power_below(larger(tall_query, tall_ask), from_state_t.dtype)
            scale = scale_of(power, from_state_t.dtype)
            x_in = within(tall_query, power, from_state_t.dtype, PRECISION)
            ask_in = within(tall_ask, power, from_state_t.dtype, PRECISION)
            asked = tl.zeros((DP, R), ACC)
            for i in tl.range(1 if DETACH else 2, num_stages=STAGES):
                asked += times(from_state_t.load([i * DP, 0]), x_in, ACC, PRECISION)
                x_in = ask_in
            d_h += asked * scale[None, :]

        if reset is not None:
            anew = tl.load(reset + t * batch + b, mask=ok, other=0)[None, :] != 0
            total = tl.load(d_restart + at, mask=inside, other=0.0).to(ACC)
            tl.store(d_restart + at, total + tl.where(anew, d_h + d_direct, 0.0), mask=inside)
            d_h = tl.where(anew, 0.0, d_h)
            d_direct = tl.where(anew, 0.0, d_direct)
            if LSTM:
                total = tl.load(d_restart + all_files * D + at, mask=inside, other=0.0).to(ACC)
                total += tl.where(anew, d_c, 0.0)
                tl.store(d_restart + all_files * D + at, total, mask=inside)
                d_c = tl.where(anew, 0.0, d_c)
        tl.debug_barrier()
        tl.store(d_state + at, d_h, mask=inside)
        tl.debug_barrier()
    d_h = d_direct + tl.load(d_state + at, mask=inside, other=0.0).to(ACC)
    tl.store(d_state + at, d_h, mask=inside)
    if LSTM:
        tl.store(d_state + all_files * D + at, d_c, mask=inside)
