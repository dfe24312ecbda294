"""Step 4 of the `fused` backend."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    dot,
    fit,
    listen,
    narrow,
    of_heads,
    spread,
    talk_at,
    times,
    turned,
    widen,
)
from scoff.ops.scoff.kernels.elementary import nearest, sigmoid, tanh


@triton.jit
def talk(
    h,
    new,
    h_in,
    h_scale,
    new_in,
    new_scale,
    reads,  # weights that stay; or None
    says,
    step,
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
    shape: tl.constexpr,
):
    """Step 4: the states after it"""
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    H: tl.constexpr = shape.H
    E: tl.constexpr = shape.E
    U: tl.constexpr = shape.U
    HOLD: tl.constexpr = shape.HOLD
    SAYS: tl.constexpr = shape.SAYS
    KEPT: tl.constexpr = shape.KEPT
    COMM_QUERY: tl.constexpr = shape.COMM_QUERY
    READ: tl.constexpr = shape.READ
    MESSAGE: tl.constexpr = shape.MESSAGE
    HEARD: tl.constexpr = shape.HEARD
    TALK: tl.constexpr = shape.TALK
    SEQUENCES: tl.constexpr = shape.SEQUENCES
    R: tl.constexpr = shape.R
    DP: tl.constexpr = shape.DP
    TP: tl.constexpr = shape.TP
    HP: tl.constexpr = shape.HP
    RC: tl.constexpr = shape.RC
    STAGES: tl.constexpr = shape.STAGES
    ACC: tl.constexpr = shape.ACC
    PRECISION: tl.constexpr = shape.PRECISION
    comm_scale: tl.constexpr = shape.comm_scale
    HE: tl.constexpr = H * E
    HU: tl.constexpr = H * U
    q = tl.zeros((TP, R), ACC)
    k, v = q, q
    if HOLD == 2:
        q = times(reads[0], h_in, ACC, PRECISION) * h_scale[None, :]
        k = times(reads[1], new_in, ACC, PRECISION) * new_scale[None, :]
        v = times(reads[2], new_in, ACC, PRECISION) * new_scale[None, :]
    else:
        x_in, x_scale = h_in, h_scale
        for i in tl.range(3, num_stages=STAGES):
            product = times(comm_read.load([i * TP, 0]), x_in, ACC, PRECISION)
            v = product * x_scale[None, :]
            q = tl.where(i == 0, v, q)
            k = tl.where(i == 1, v, k)
            x_in, x_scale = new_in, new_scale
    t_in = tl.arange(0, TP)
    column_c = tl.arange(0, RC)
    sequence_c = column_c // F
    ok_c = (sequence_c < SEQUENCES) & (first + sequence_c < batch)
    together = (sequence_c[:, None] == sequence_c[None, :]) & ok_c[:, None] & ok_c[None, :]
    q_in = widen(nearest(q, PRECISION), RC)
    attention = listen(q_in, widen(k, RC), t_in, together, comm_scale, E, HP, ACC, PRECISION)
    v_of_heads = spread(widen(nearest(v, PRECISION), RC), t_in, U, HP)
    heard = narrow(dot(v_of_heads, turned(attention, HP), ACC, PRECISION), R)
    if kept is not None:
        some_e = (t_in < HE)[:, None] & ok[None, :]
        some_u = (t_in < HU)[:, None] & ok[None, :]
        tl.store(row + COMM_QUERY + t_in[:, None], q, mask=some_e)
        tl.store(row + READ + t_in[:, None], k, mask=some_e)
        tl.store(row + READ + HE + t_in[:, None], v, mask=some_u)
        here_c = step + (first * F + column_c).to(tl.int64)
        at_talk = kept + TALK + talk_at(here_c * KEPT, column_c, F, HP)
        tl.store(at_talk, attention, mask=of_heads(together, H, HP))
        tl.store(row + HEARD + t_in[:, None], heard, mask=some_u)
    heard_in, heard_scale = fit(heard, comm_say.dtype, PRECISION)
    message = h
    gate = h
    if HOLD > 0:
        message = times(says[0], heard_in, ACC, PRECISION) * heard_scale[None, :]
        gate = times(says[SAYS - 1], heard_in, ACC, PRECISION) * heard_scale[None, :]
    else:
        for i in tl.range(SAYS, num_stages=STAGES):
            gate = times(comm_say.load([i * DP, 0]), heard_in, ACC, PRECISION)
            gate *= heard_scale[None, :]
            message = tl.where(i == 0, gate, message)
    if comm_mask is not None:
        at_d = here[None, :] * D + d[:, None]
        message *= tl.load(comm_mask + at_d, mask=inside, other=0.0).to(ACC)
    if comm_bias is not None:
        bias = tl.load(comm_bias + d, mask=d < D, other=0.0).to(ACC)
        message = tanh(message, PRECISION)
        gate = sigmoid(gate + bias[:, None], PRECISION)
        if kept is not None:
            tl.store(row + MESSAGE + d[:, None], message, mask=inside)
            tl.store(row + MESSAGE + D + d[:, None], gate, mask=inside)
        joined = new + gate * (message - new)
    else:
        joined = new + message
    return joined
