"""Weights that stay in shared memory while all steps go by.

What is loaded before the loop over time stays where the copy engine puts it, if products take it
from there (`fused_layout.held` says which do): they wait for nothing but their other factor, and
those that do not depend on each other run side by side.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import times
from scoff.ops.scoff.kernels.elementary import sigmoid, tanh


@triton.jit
def hold(stack, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """All matrices of a stack"""
    found = (stack.load([0, 0]),)
    for i in tl.static_range(1, COUNT):
        found = found + (stack.load([i * ROWS, 0]),)  # noqa: RUF005
    return found


@triton.jit
def load_each(start, mask, COUNT: tl.constexpr, STEP: tl.constexpr):
    """What is at `start`, and so on every STEP numbers"""
    found = (tl.load(start, mask=mask, other=0.0),)
    for i in tl.static_range(1, COUNT):
        found = found + (tl.load(start + i * STEP, mask=mask, other=0.0),)  # noqa: RUF005
    return found


@triton.jit
def gate(
    number: tl.constexpr,
    weight_hh,
    weight_ih,
    bias_hh,
    bias_ih,
    h_in,
    h_scale,
    z_in,
    z_scale,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state's part of it, and the input's"""
    hidden = times(weight_hh[number], h_in, ACC, PRECISION) * h_scale[None, :]
    given = times(weight_ih[number], z_in, ACC, PRECISION) * z_scale[None, :]
    if bias_hh is not None:
        hidden += bias_hh[number].to(ACC)[:, None]
        given += bias_ih[number].to(ACC)[:, None]
    return hidden, given


@triton.jit
def choose(
    weight_hh,
    weight_ih,
    bias_hh,
    bias_ih,
    noise,  # of each schema [R]; None: none
    given_best,  # None: it is chosen here
    query,
    h,
    c,
    h_in,
    h_scale,
    z_in,
    z_scale,
    S: tl.constexpr,
    LSTM: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Step 3: which schema it is, and the new h and c"""
    GATES: tl.constexpr = 4 if LSTM else 3
    R: tl.constexpr = h.shape[1]
    best = tl.zeros((R,), tl.int32)
    best_logit = tl.full((R,), float("-inf"), ACC)
    new, new_c = h, c
    w = (weight_hh, weight_ih, bias_hh, bias_ih, h_in, h_scale, z_in, z_scale)
    for j in tl.static_range(S):
        hidden, given = gate(j * GATES, *w, ACC, PRECISION)
        gate_0 = sigmoid(hidden + given, PRECISION)
        hidden, given = gate(j * GATES + 1, *w, ACC, PRECISION)
        gate_1 = sigmoid(hidden + given, PRECISION)
        cell = c
        if LSTM:  # i f g o
            hidden, given = gate(j * GATES + 2, *w, ACC, PRECISION)
            cell = gate_1 * c + gate_0 * tanh(hidden + given, PRECISION)
            hidden, given = gate(j * GATES + 3, *w, ACC, PRECISION)
            candidate = sigmoid(hidden + given, PRECISION) * tanh(cell, PRECISION)
        else:  # r u m, and n
            hidden, given = gate(j * GATES + 2, *w, ACC, PRECISION)
            last = tanh(given + gate_0 * hidden, PRECISION)
            candidate = last + gate_1 * (h - last)
        logit = tl.sum(query * candidate, 0)
        if noise is not None:
            logit += noise[j].to(ACC)
        if given_best is not None:
            take = given_best == j
        else:  # NaN is the largest, and of equals the first counts
            take = (logit > best_logit) | ((logit != logit) & (best_logit == best_logit))
            take = take | (j == 0)
        best = tl.where(take, j, best)
        best_logit = tl.where(take, logit, best_logit)
        new = tl.where(take[None, :], candidate, new)
        new_c = tl.where(take[None, :], cell, new_c)
    return best, new, new_c
