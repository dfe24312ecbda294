"""The backward kernel of the `fused` backend: one program runs all steps of a few sequences back.

It does what the step before depends on, and the gradient of the input. The weight gradients, which
are sums over steps, are made of what it writes here, in a single large product outside. Gradients
take the place of what was kept, once it has been read.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.back_look import look_back
from scoff.ops.scoff.kernels.back_talk import talk_back
from scoff.ops.scoff.kernels.back_update import gates_back, merits_back


# one compilation for all lengths and batch sizes
@triton.jit(do_not_specialize=["batch", "steps", "begin"])
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
    # gradients; of gates, if they are to be of 16 bits: `kept` as words, and scales [.., B, F]
    halves,
    powers,
    d_output,  # [T, B, F, D]
    d_state,  # [Z, B, F, D] from the step after the last to the step before the first; in between,
    # of h, what products made
    d_restart,  # [Z, B, F, D], added to
    d_keys,  # [T, B, P, KEY_ROW]
    d_values,  # [T, B, P, VALUE_ROW]; None: the values are the keys
    d_z,  # [T, B, F, V]; None: not wanted
    coldness,  # [1] one over the temperature
    batch,
    steps,
    begin,  # the first of the steps; what was kept, and d_z, begin with it
    shape: tl.constexpr,
):
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    P: tl.constexpr = shape.P
    V: tl.constexpr = shape.V
    S: tl.constexpr = shape.S
    KEY_ROW: tl.constexpr = shape.KEY_ROW
    VALUE_ROW: tl.constexpr = shape.VALUE_ROW
    KEPT: tl.constexpr = shape.KEPT
    QUERY: tl.constexpr = shape.QUERY
    LOGITS: tl.constexpr = shape.LOGITS
    LSTM: tl.constexpr = shape.LSTM
    SEQUENCES: tl.constexpr = shape.SEQUENCES
    R: tl.constexpr = shape.R
    DP: tl.constexpr = shape.DP
    VP: tl.constexpr = shape.VP
    SP: tl.constexpr = shape.SP
    ACC: tl.constexpr = shape.ACC
    program = tl.program_id(0)
    column = tl.arange(0, R)
    sequence = column // F
    b = program * SEQUENCES + sequence
    ok = (sequence < SEQUENCES) & (b < batch)
    place = (b * F + column % F).to(tl.int64)
    d = tl.arange(0, DP)
    inside = (d < D)[:, None] & ok[None, :]
    at = place[None, :] * D + d[:, None]
    v_in = tl.arange(0, VP)
    s_in = tl.arange(0, SP)
    inside_v = (v_in < V)[:, None] & ok[None, :]
    inside_s = (s_in < S)[:, None] & ok[None, :]
    all_files = (batch * F).to(tl.int64)

    # The gradient of a state is in two parts. What is made element by element stays where loads put
    # it, from step to step. What comes out of products goes through memory: it is moved once, and
    # Triton does not lay out all that meets it as tensor cores leave it, which would move that
    # again and again.
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
            d_new, d_h = talk_back(
                d_new,
                changes,
                ok,
                inside,
                d,
                row,
                at_d,
                d_state + at,
                t * all_files,
                program,
                kept,
                comm_mask,
                comm_read_t,
                comm_say_t,
                batch,
                shape,
            )

        # Step 3
        d_logits = merits_back(
            logits, inside_s, row, d, inside, h, c, d_new, d_new_c, tl.load(coldness), shape
        )
        d_direct, d_c, d_query, d_through, d_read_z = gates_back(
            d_direct,
            d_c,
            d_new,
            d_new_c,
            d_logits,
            query,
            best,
            h,
            c,
            row,
            d,
            ok,
            inside,
            weight_ih_t,
            weight_hh_t,
            here,
            halves,
            powers,
            shape,
        )
        d_h += d_through
        tl.store(row + QUERY + d[:, None], d_query, mask=inside)
        if d_z is not None:
            tl.store(d_z + here[None, :] * V + v_in[:, None], d_read_z, mask=inside_v)

        # Step 2
        d_h = look_back(
            d_h,
            d_query,
            d_read_z,
            row,
            here,
            t,
            program,
            sequence,
            ok,
            keys,
            values,
            value,
            kept,
            look,
            d_keys,
            d_values,
            from_state_t,
            batch,
            shape,
        )

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
