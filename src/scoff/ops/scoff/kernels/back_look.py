"""Step 2 of the `fused` backend, back."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    above_zeros,
    beside,
    dot,
    fit,
    larger,
    power_below,
    scale_of,
    times,
    widen,
    within,
)
from scoff.ops.scoff.kernels.elementary import inverse, nearest


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


@triton.jit
def look_back(
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
    shape: tl.constexpr,
):
    """Step 2, back, to the gradient of h before the step, which gets what is asked of schemata too.
    Stores those of what is asked, and of keys and values."""
    P: tl.constexpr = shape.P
    A: tl.constexpr = shape.A
    C: tl.constexpr = shape.C
    W: tl.constexpr = shape.W
    V: tl.constexpr = shape.V
    KEY_ROW: tl.constexpr = shape.KEY_ROW
    KEY_HEAD: tl.constexpr = shape.KEY_HEAD
    VALUE_ROW: tl.constexpr = shape.VALUE_ROW
    VALUE_HEAD: tl.constexpr = shape.VALUE_HEAD
    SHARED: tl.constexpr = shape.SHARED
    KEPT: tl.constexpr = shape.KEPT
    ASK: tl.constexpr = shape.ASK
    MASS: tl.constexpr = shape.MASS
    SEEN: tl.constexpr = shape.SEEN
    MEAN: tl.constexpr = shape.MEAN
    DETACH: tl.constexpr = shape.DETACH
    SEQUENCES: tl.constexpr = shape.SEQUENCES
    R: tl.constexpr = shape.R
    DP: tl.constexpr = shape.DP
    VP: tl.constexpr = shape.VP
    AP: tl.constexpr = shape.AP
    CP: tl.constexpr = shape.CP
    WP: tl.constexpr = shape.WP
    PB: tl.constexpr = shape.PB
    STAGES: tl.constexpr = shape.STAGES
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    epsilon: tl.constexpr = shape.epsilon
    WIDE: tl.constexpr = max(16, R)  # columns of products that sum over them
    c_in = tl.arange(0, CP)
    w_in = tl.arange(0, WP)
    v_in = tl.arange(0, VP)
    p_in = tl.arange(0, PB)
    inside_c = (c_in < C)[:, None] & ok[None, :]
    inside_w = (w_in < W)[:, None] & ok[None, :]
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
    return d_h
