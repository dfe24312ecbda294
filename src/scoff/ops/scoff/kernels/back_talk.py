"""Step 4 of the `fused` backend, back."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import (
    dot,
    larger,
    narrow,
    of_heads,
    power_below,
    scale_of,
    spread,
    talk_at,
    times,
    turned,
    widen,
    within,
)
from scoff.ops.scoff.kernels.elementary import nearest


@triton.jit
def talk_back(
    d_new,
    changes,
    ok,
    inside,
    d,
    row,
    at_d,
    scratch,  # where the kernel may leave [DP, R]
    step,  # where its object files begin, among those of all steps
    program,
    kept,
    comm_mask,
    comm_read_t,
    comm_say_t,
    batch,
    shape: tl.constexpr,
):
    """Step 4, back, to the gradients of h after Step 3 and of h before it, as far as that is read.
    Gradients take the place of what was asked, read and said."""
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    H: tl.constexpr = shape.H
    E: tl.constexpr = shape.E
    U: tl.constexpr = shape.U
    SAYS: tl.constexpr = shape.SAYS
    KEPT: tl.constexpr = shape.KEPT
    COMM_QUERY: tl.constexpr = shape.COMM_QUERY
    READ: tl.constexpr = shape.READ
    MESSAGE: tl.constexpr = shape.MESSAGE
    UPDATED: tl.constexpr = shape.UPDATED
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
    d_h = tl.zeros((DP, R), ACC)
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
    here_c = step + (program * SEQUENCES * F + column_c).to(tl.int64)
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
    tl.store(scratch, d_read, mask=inside)
    tl.debug_barrier()
    d_new += tl.load(scratch, mask=inside, other=0.0).to(ACC)
    return d_new, d_h
