"""Step 3 of the `fused` backend, back."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    compete,
    larger,
    load_four,
    parts,
    power_below,
    scale_of,
    store_four,
    store_halves,
    sums_of,
    times,
    within,
)
from scoff.ops.scoff.kernels.elementary import tanh


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
def merits_back(
    logits,
    inside_s,
    row,
    d,
    inside,
    h,
    c,
    d_new,
    d_new_c,
    coldness,
    shape: tl.constexpr,
):
    """The gradients of logits, from what each schema's weight in the choice would have to be"""
    S: tl.constexpr = shape.S
    D: tl.constexpr = shape.D
    SP: tl.constexpr = shape.SP
    R: tl.constexpr = shape.R
    LSTM: tl.constexpr = shape.LSTM
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    s_in = tl.arange(0, SP)
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
            u, n, last_u, last_n = load_four(at_gates + D, inside, 2 * D, (last - j) * 4 * D)
            first_h, _ = candidate(u, u, u, n, h, c, LSTM, PRECISION)
            last_h, _ = candidate(last_u, last_u, last_u, last_n, h, c, LSTM, PRECISION)
            first_h *= d_new
            last_h *= d_new
        merit, last_merit = sums_of(first_h, last_h)
        d_merit += tl.where((s_in == j)[:, None], merit[None, :], 0.0)
        beyond = (s_in == last)[:, None] & (last > j)
        d_merit += tl.where(beyond, last_merit[None, :], 0.0)
    p = tl.trans(compete(tl.trans(logits * coldness), tl.trans(inside_s), PRECISION))
    return p * (d_merit - tl.sum(p * d_merit, 0)[None, :]) * coldness


@triton.jit
def gates_back(
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
    halves,  # the same rows, for two numbers of 16 bits in one place; None: they have all digits
    powers,  # gets their scales
    shape: tl.constexpr,
):
    """Schema by schema, gate by gate, to the gradients of h and c that need no products, of the
    query, and of h and what was read through weights. Those of gates take the place of gates."""
    S: tl.constexpr = shape.S
    D: tl.constexpr = shape.D
    SP: tl.constexpr = shape.SP
    R: tl.constexpr = shape.R
    DP: tl.constexpr = shape.DP
    VP: tl.constexpr = shape.VP
    ROWS: tl.constexpr = shape.ROWS
    LSTM: tl.constexpr = shape.LSTM
    KEPT: tl.constexpr = shape.KEPT
    STAGES: tl.constexpr = shape.STAGES
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    GATES: tl.constexpr = 4 if LSTM else 3
    PARTS: tl.constexpr = DP // ROWS
    s_in = tl.arange(0, SP)
    d_query = tl.zeros((DP, R), ACC)
    d_before = tl.zeros((DP, R), ACC)
    d_read_z = tl.zeros((VP, R), ACC)
    # of candidates, a little above 1: gradients of gates that are almost shut are far smaller,
    # and none are larger by as much as the range of a type leaves
    largest = larger(d_new, query * tl.max(tl.abs(d_logits), 0)[None, :])
    if LSTM:
        largest = larger(largest, d_new_c)
    power = power_below(largest / 8, weight_hh_t.dtype)
    if halves is not None:
        # where all are zero, or as good as zero, their scale is not to count
        some = tl.max(largest, 0) >= 8 * 2.0**-126
        tl.store(powers + here, tl.where(some, power, 0.0), mask=ok)
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
            hidden_0 = within(d_0, power, weight_hh_t.dtype, PRECISION)
            hidden_1 = within(d_1, power, weight_hh_t.dtype, PRECISION)
            hidden_2 = within(d_2, power, weight_hh_t.dtype, PRECISION)
            hidden_3 = within(d_3, power, weight_hh_t.dtype, PRECISION)
            given_0, given_1, given_2, given_3 = hidden_0, hidden_1, hidden_2, hidden_3
            if halves is None:
                store_four(gates_here, d_0, d_1, d_2, d_3, inside, D)
            else:  # in the place of what this schema, or one before it, has read
                to = halves + here[None, :] * KEPT + j * 2 * D + d[:, None]
                store_halves(to, power, d_0, d_1, d_2, d_3, inside, D)
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
    return d_direct, d_c, d_query, d_before * scale[None, :], d_read_z * scale[None, :]
