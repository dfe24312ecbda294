"""Step 2 of the `wide` backend, and back: rows are as `wide_blocks` says."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.wide_blocks import dot, softmax


@triton.jit(do_not_specialize=["t"])
def look_kernel(
    asked,  # [rows, ASKED] A * E numbers of each row
    keys,  # [T, B, P, A * E]
    values,  # [T, B, P, V]
    look,  # [rows, A, P] gets the attention
    z,  # [rows, VP] gets what is read
    active,  # [T, rows]; None: not wanted
    t,
    epsilon: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    ASKED: tl.constexpr,
    ACTIVE: tl.constexpr,
    MEAN: tl.constexpr,
    FP: tl.constexpr,
    PB: tl.constexpr,
    EB: tl.constexpr,
    VB: tl.constexpr,
):
    """Step 2: the object files of a sequence compete for its positions"""
    W: tl.constexpr = V // A
    b = tl.program_id(0).to(tl.int64)
    sequence = t * tl.num_programs(0) + b
    line = sequence * P
    f = tl.arange(0, FP)
    exists = f < F
    row = b * F + f
    mass = tl.zeros((FP,), asked.dtype.element_ty)
    for a in range(A):
        head_mass = tl.zeros((FP,), asked.dtype.element_ty)
        for start in range(0, P, PB):
            p = start + tl.arange(0, PB)
            scores = tl.zeros((FP, PB), asked.dtype.element_ty)
            for first in range(0, E, EB):
                e = first + tl.arange(0, EB)
                q = tl.load(
                    asked + row[:, None] * ASKED + a * E + e[None, :],
                    mask=exists[:, None] & (e < E)[None, :],
                    other=0.0,
                )
                k = tl.load(
                    keys + (line + p)[None, :] * (A * E) + a * E + e[:, None],
                    mask=(p < P)[None, :] & (e < E)[:, None],
                    other=0.0,
                )
                scores += dot(q, k)
            some = exists[:, None] & (p < P)[None, :]
            share = tl.where(some, softmax(scores, exists[:, None], 0), 0.0)
            tl.store(look + (row[:, None] * A + a) * P + p[None, :], share, mask=some)
            head_mass += tl.sum(share, 1)
        mass += head_mass
        tl.debug_barrier()  # what one has stored, others load
        for first in range(0, W, VB):
            v = first + tl.arange(0, VB)
            seen = tl.zeros((FP, VB), asked.dtype.element_ty)
            for start in range(0, P, PB):
                p = start + tl.arange(0, PB)
                share = tl.load(
                    look + (row[:, None] * A + a) * P + p[None, :],
                    mask=exists[:, None] & (p < P)[None, :],
                    other=0.0,
                )
                value = tl.load(
                    values + (line + p)[:, None] * V + a * W + v[None, :],
                    mask=(p < P)[:, None] & (v < W)[None, :],
                    other=0.0,
                )
                seen += dot(share, value)
            if MEAN:
                seen = seen / (head_mass + epsilon)[:, None]
            inside = exists[:, None] & (v < W)[None, :]
            tl.store(z + row[:, None] * VP + a * W + v[None, :], seen, mask=inside)
    if active is not None:
        own = mass[:, None]
        other = mass[None, :]
        ahead = (other > own) | ((other == own) & (f[None, :] < f[:, None]))
        rank = tl.sum((ahead & exists[None, :]).to(tl.int32), 1)
        tl.store(active + sequence * F + f, rank < ACTIVE, mask=exists)


@triton.jit(do_not_specialize=["t"])
def look_back_kernel(
    asked,  # [rows, ASKED]: gradients take their place
    keys,  # [T, B, P, A * E]
    values,  # [T, B, P, V]
    look,  # [rows, A, P] the attention: the gradient of its scores takes its place
    z,  # [rows, VP]
    d_z,  # [rows, VP]
    d_keys,  # [T, B, P, A * E]
    d_values,  # [T, B, P, V]
    t,
    epsilon: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    ASKED: tl.constexpr,
    MEAN: tl.constexpr,
    FP: tl.constexpr,
    PB: tl.constexpr,
    EB: tl.constexpr,
    VB: tl.constexpr,
):
    """Step 2, back"""
    W: tl.constexpr = V // A
    b = tl.program_id(0).to(tl.int64)
    line = (t * tl.num_programs(0) + b) * P
    f = tl.arange(0, FP)
    exists = f < F
    row = b * F + f
    for a in range(A):
        at_look = look + (row[:, None] * A + a) * P
        at_z = row[:, None] * VP + a * W
        whole = tl.full((FP,), 1.0, asked.dtype.element_ty)
        fewer = tl.zeros((FP,), asked.dtype.element_ty)
        if MEAN:
            whole = tl.full((FP,), epsilon, asked.dtype.element_ty)
            for start in range(0, P, PB):
                p = start + tl.arange(0, PB)
                some = exists[:, None] & (p < P)[None, :]
                whole += tl.sum(tl.load(at_look + p[None, :], mask=some, other=0.0), 1)
            for first in range(0, W, VB):
                v = first + tl.arange(0, VB)
                inside = exists[:, None] & (v < W)[None, :]
                read = tl.load(z + at_z + v[None, :], mask=inside, other=0.0)
                d_read = tl.load(d_z + at_z + v[None, :], mask=inside, other=0.0)
                fewer += tl.sum(read * d_read, 1)
        for start in range(0, P, PB):
            p = start + tl.arange(0, PB)
            some = exists[:, None] & (p < P)[None, :]
            share = tl.load(at_look + p[None, :], mask=some, other=0.0)
            weight = tl.trans(share / whole[:, None])
            d_share = tl.zeros((FP, PB), asked.dtype.element_ty)
            for first in range(0, W, VB):
                v = first + tl.arange(0, VB)
                inside = exists[:, None] & (v < W)[None, :]
                d_read = tl.load(d_z + at_z + v[None, :], mask=inside, other=0.0)
                at = (line + p)[:, None] * V + a * W + v[None, :]
                inside = (p < P)[:, None] & (v < W)[None, :]
                value = tl.load(values + at, mask=inside, other=0.0)
                d_share += dot(d_read, tl.trans(value))
                tl.store(d_values + at, dot(weight, d_read), mask=inside)
            d_share = (d_share - fewer[:, None]) / whole[:, None]
            d_scores = share * (d_share - tl.sum(share * d_share, 0)[None, :])
            tl.debug_barrier()  # all have read what is overwritten here
            tl.store(at_look + p[None, :], d_scores, mask=some)
        tl.debug_barrier()  # what one has stored, others load
        for first in range(0, E, EB):
            e = first + tl.arange(0, EB)
            at_q = asked + row[:, None] * ASKED + a * E + e[None, :]
            inside_q = exists[:, None] & (e < E)[None, :]
            q = tl.load(at_q, mask=inside_q, other=0.0)
            d_q = tl.zeros((FP, EB), asked.dtype.element_ty)
            for start in range(0, P, PB):
                p = start + tl.arange(0, PB)
                some = exists[:, None] & (p < P)[None, :]
                d_scores = tl.load(at_look + p[None, :], mask=some, other=0.0)
                at = (line + p)[:, None] * (A * E) + a * E + e[None, :]
                inside = (p < P)[:, None] & (e < E)[None, :]
                d_q += dot(d_scores, tl.load(keys + at, mask=inside, other=0.0))
                tl.store(d_keys + at, dot(tl.trans(d_scores), q), mask=inside)
            tl.debug_barrier()
            tl.store(at_q, d_q, mask=inside_q)
