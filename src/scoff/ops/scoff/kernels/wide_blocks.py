"""The Triton kernels of the `wide` backend: what lies between the matrix products of a step.

Rows are object files, B * F of them at a step. Those that compete or talk are of one sequence: a
program has all of them. Updates concern one object file alone: a program has one, with all of its
schemata, and goes through its features block by block.

What products take is padded with zeros to rows of whole multiples of 16 bytes, DP numbers for a
state of D. The kernels leave the padding as it is, but for rows of 16 bits. That of gates they read
and write too, as zeros, for a row is then in whole vectors.

Gates of all schemata lie gate by gate, S * DP numbers each: n r u m of the GRU, where
m = W_hn h + b_hn, and i f g o of the LSTM. The input adds to n r u and i f g o, called `given`; the
state to r u m and i f g o, called `hidden`, behind which is what it asks: the schema query, then
the queries of the communication and of the input.

Of one object file products may be of 16-bit numbers, which have as many digits as tf32 and less
range. Each row then has a scale: those of states one that is known beforehand, for states stay
within bounds; those of gradients one that the kernel finds that makes them, and leaves, as what it
takes to undo it, to those that read the product.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import WEIGHT_SCALE
from scoff.ops.scoff.kernels.elementary import sigmoid, tanh

LARGEST = tl.constexpr(2.0**14)  # the largest of a row is brought to this, or to less than twice
SMALLEST = tl.constexpr(2.0**-80)  # rows that are smaller are brought to less


@triton.jit
def dot(a, b):
    """Of little, hence as exact as float32, on tensor cores all the same"""
    return tl.dot(a, b, input_precision="tf32x3", out_dtype=a.dtype)


@triton.jit
def scale_of(largest):
    """By what to multiply a row, of which this is the largest number, for 16 bits"""
    power = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return 1 / tl.maximum(power.to(tl.float32, bitcast=True), SMALLEST) * LARGEST


@triton.jit
def undone(scale):
    """By what to multiply the product of weights and a row with that scale"""
    return 1 / (scale * WEIGHT_SCALE)


@triton.jit
def leave(scale, undo, largest, own_scale):
    """What undoes the scale of a row of gradients, and how much the row counts in sums over rows,
    if that is the most so far; `own_scale`: of what they are multiplied with"""
    undo_it = undone(scale)
    tl.store(undo, undo_it)
    tl.atomic_max(largest, undo_it / own_scale)


@triton.jit
def through_products(products, undo, here, at, inside):
    """What comes back through weights; of numbers of 32 bits it has been added already."""
    return tl.load(products + at, mask=inside, other=0.0) * tl.load(undo + here)


@triton.jit
def softmax(scores, some, AXIS: tl.constexpr):
    """Among `some`; zero elsewhere."""
    scores = tl.where(some, scores, float("-inf"))
    e = tl.exp(scores - tl.expand_dims(tl.max(scores, AXIS), AXIS))
    return e / tl.expand_dims(tl.sum(e, AXIS), AXIS)


@triton.jit
def is_updated(active, valid, here, exists, F: tl.constexpr):
    """Whether object files change at this step"""
    update = exists
    if active is not None:
        update = update & (tl.load(active + here, mask=exists, other=0) != 0)
    if valid is not None:
        update = update & (tl.load(valid + here // F, mask=exists, other=0) != 0)
    return update


@triton.jit
def is_reset(reset, here, exists, F: tl.constexpr):
    anew = exists & (here < 0)
    if reset is not None:
        anew = tl.load(reset + here // F, mask=exists, other=0) != 0
    return anew


@triton.jit
def candidates(
    given,
    hidden,
    at,
    inside,
    h,
    c,
    GATE: tl.constexpr,
    LSTM: tl.constexpr,
    ADD: tl.constexpr,  # whether `given` and `hidden` are still to be added
    undo,  # of products of 16-bit numbers; of others None
):
    """Gates after their nonlinearity, i f g o or r u m n, and the new h and c"""
    PRECISION: tl.constexpr = "ieee" if undo is None else "tf32"
    gate_0 = tl.load(given + at, mask=inside, other=0.0)
    gate_1 = tl.load(given + GATE + at, mask=inside, other=0.0)
    gate_2 = tl.load(given + 2 * GATE + at, mask=inside, other=0.0)
    gate_3 = gate_0
    if LSTM:
        gate_3 = tl.load(given + 3 * GATE + at, mask=inside, other=0.0)
    if undo is not None:
        gate_0 *= undo
        gate_1 *= undo
        gate_2 *= undo
        gate_3 *= undo
    if LSTM:
        if ADD:
            gate_0 += tl.load(hidden + at, mask=inside, other=0.0)
            gate_1 += tl.load(hidden + GATE + at, mask=inside, other=0.0)
            gate_2 += tl.load(hidden + 2 * GATE + at, mask=inside, other=0.0)
            gate_3 += tl.load(hidden + 3 * GATE + at, mask=inside, other=0.0)
        gate_0 = sigmoid(gate_0, PRECISION)
        gate_1 = sigmoid(gate_1, PRECISION)
        gate_2 = tanh(gate_2, PRECISION)
        gate_3 = sigmoid(gate_3, PRECISION)
        new_c = gate_1 * c + gate_0 * gate_2
        new_h = gate_3 * tanh(new_c, PRECISION)
    else:
        gate_3 = gate_0
        gate_0 = gate_1
        gate_1 = gate_2
        if ADD:
            gate_0 += tl.load(hidden + at, mask=inside, other=0.0)
            gate_1 += tl.load(hidden + GATE + at, mask=inside, other=0.0)
        gate_2 = tl.load(hidden + 2 * GATE + at, mask=inside, other=0.0)
        if undo is not None:
            gate_2 *= undo
        gate_0 = sigmoid(gate_0, PRECISION)
        gate_1 = sigmoid(gate_1, PRECISION)
        gate_3 = tanh(gate_3 + gate_0 * gate_2, PRECISION)
        new_c = gate_3
        new_h = gate_3 + gate_1 * (h - gate_3)
    return gate_0, gate_1, gate_2, gate_3, new_h, new_c
