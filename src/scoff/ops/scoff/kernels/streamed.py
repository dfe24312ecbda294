"""Weights that are read at every step: some are on their way while others are used."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import load_halves, parts, plus_halves, times, whole
from scoff.ops.scoff.kernels.elementary import sigmoid, tanh


@triton.jit
def choose_streamed(
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
    shape: tl.constexpr,
):
    """Step 3, schema by schema, gate by gate; with the last gate the candidate is complete: which
    schema it is, and the new h and c"""
    S: tl.constexpr = shape.S
    D: tl.constexpr = shape.D
    SP: tl.constexpr = shape.SP
    R: tl.constexpr = shape.R
    DP: tl.constexpr = shape.DP
    ROWS: tl.constexpr = shape.ROWS
    LSTM: tl.constexpr = shape.LSTM
    KEPT: tl.constexpr = shape.KEPT
    LOGITS: tl.constexpr = shape.LOGITS
    STAGES: tl.constexpr = shape.STAGES
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    GATES: tl.constexpr = 4 if LSTM else 3
    PARTS: tl.constexpr = DP // ROWS
    s_in = tl.arange(0, SP)
    n_in = tl.arange(0, ROWS)
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
        c_0, c_1 = parts(c_before, PARTS)
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
    new_c = new
    if LSTM:
        new_c = whole(new_c_0, new_c_1, PARTS)
    return best, new, new_c
