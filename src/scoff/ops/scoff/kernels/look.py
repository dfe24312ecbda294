"""Step 2 of the `fused` backend."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import compete, dot, times, top
from scoff.ops.scoff.kernels.elementary import inverse, nearest


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


@triton.jit
def look_around(
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
    shape: tl.constexpr,
):
    """Step 2: what each object file reads, and how much attention it has. Rows are the positions of
    all sequences; columns compete where they are at home."""
    P: tl.constexpr = shape.P
    A: tl.constexpr = shape.A
    C: tl.constexpr = shape.C
    W: tl.constexpr = shape.W
    V: tl.constexpr = shape.V
    D: tl.constexpr = shape.D
    KEPT: tl.constexpr = shape.KEPT
    ASK: tl.constexpr = shape.ASK
    MASS: tl.constexpr = shape.MASS
    SEEN: tl.constexpr = shape.SEEN
    RIGHT: tl.constexpr = shape.RIGHT
    MEAN: tl.constexpr = shape.MEAN
    SEQUENCES: tl.constexpr = shape.SEQUENCES
    R: tl.constexpr = shape.R
    VP: tl.constexpr = shape.VP
    AP: tl.constexpr = shape.AP
    CP: tl.constexpr = shape.CP
    WP: tl.constexpr = shape.WP
    PB: tl.constexpr = shape.PB
    STAGES: tl.constexpr = shape.STAGES
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    epsilon: tl.constexpr = shape.epsilon
    c_in = tl.arange(0, CP)
    w_in = tl.arange(0, WP)
    v_in = tl.arange(0, VP)
    ask = top(asked, CP)
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
    return z, mass
