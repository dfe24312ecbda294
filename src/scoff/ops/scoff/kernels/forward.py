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

from scoff.ops.scoff.kernels.blocks import fit, power_below, scale_of, times, top, within
from scoff.ops.scoff.kernels.held import choose, hold, load_each
from scoff.ops.scoff.kernels.look import look_around
from scoff.ops.scoff.kernels.streamed import choose_streamed
from scoff.ops.scoff.kernels.talk import talk


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
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    P: tl.constexpr = shape.P
    S: tl.constexpr = shape.S
    KEY_ROW: tl.constexpr = shape.KEY_ROW
    VALUE_ROW: tl.constexpr = shape.VALUE_ROW
    SAYS: tl.constexpr = shape.SAYS
    KEPT: tl.constexpr = shape.KEPT
    QUERY: tl.constexpr = shape.QUERY
    UPDATED: tl.constexpr = shape.UPDATED
    ACTIVE: tl.constexpr = shape.ACTIVE
    LSTM: tl.constexpr = shape.LSTM
    SINGLE: tl.constexpr = shape.SINGLE
    HOLD: tl.constexpr = shape.HOLD
    SEQUENCES: tl.constexpr = shape.SEQUENCES
    R: tl.constexpr = shape.R
    DP: tl.constexpr = shape.DP
    AP: tl.constexpr = shape.AP
    TP: tl.constexpr = shape.TP
    STAGES: tl.constexpr = shape.STAGES
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    GATES: tl.constexpr = 4 if LSTM else 3
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
    says, reads = None, None
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
        row = kept
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

        # Step 2
        z, mass = look_around(
            h,
            h_in,
            h_scale,
            asked,
            t,
            first,
            here,
            row,
            d,
            inside,
            sequence,
            ok,
            keys,
            values,
            value,
            from_state,
            kept,
            kept_look,
            batch,
            shape,
        )

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
        c_before = h
        if LSTM:
            c_before = c
        if HOLD == 2:
            noises, chosen = None, None
            if noise is not None:
                noises = load_each(noise + here * S, ok, S, 1)
            if given_choice is not None:
                chosen = tl.load(given_choice + here, mask=ok, other=0).to(tl.int32)
            weights = (held_hh, held_ih, held_bias_hh, held_bias_ih)
            inputs = (h_in, h_scale, z_in, z_scale)
            best, new, new_c = choose(
                *weights, noises, chosen, query, h, c_before, *inputs, S, LSTM, ACC, PRECISION
            )
        else:
            best, new, new_c = choose_streamed(
                h,
                c_before,
                h_in,
                h_scale,
                z_in,
                z_scale,
                query,
                here,
                row,
                column,
                ok,
                weight_ih,
                weight_hh,
                bias_ih,
                bias_hh,
                noise,
                given_choice,
                kept,
                shape,
            )
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
            joined = talk(
                h,
                new,
                h_in,
                h_scale,
                new_in,
                new_scale,
                reads,
                says,
                t * all_files,
                first,
                here,
                row,
                d,
                inside,
                ok,
                comm_read,
                comm_say,
                comm_mask,
                comm_bias,
                kept,
                batch,
                shape,
            )
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
