"""Functions of single numbers, in few instructions.

A step of the recurrence is a chain of small operations, and takes as long as its instructions. So
where products have the digits of tf32 these functions are what a GPU does in one or two of them, of
numbers near 1 right to some 22 binary digits, instead of a dozen that are right to the last.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from scoff.ops.scoff.launch import ASSEMBLES

ASSEMBLED = tl.constexpr(ASSEMBLES)


@triton.jit
def is_rough(x, PRECISION: tl.constexpr) -> tl.constexpr:
    """Whether few instructions are good enough, and can be had"""
    return ASSEMBLED and PRECISION == "tf32" and x.dtype == tl.float32


@triton.jit
def nearest(x, PRECISION: tl.constexpr):
    """Rounded to what tensor cores take of a float32: they would cut it off, which errs by more
    and always to the same side."""
    if is_rough(x, PRECISION):
        # of two equally near, the one that takes one instruction
        convert: tl.constexpr = "cvt.rn" if cuda_capability_geq(9) else "cvt.rna"
        bits = tl.inline_asm_elementwise(
            convert + ".tf32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )
        x = bits.to(tl.float32, bitcast=True)
    elif PRECISION == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) + 0x1000
        rounded = (bits & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # or a NaN of all ones, which is CUDA's, turns into zero
    return x


@triton.jit
def two_halves(x, y):
    """Both as numbers of 16 bits, in one of 32: the first comes first in memory."""
    if ASSEMBLED:
        both = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x, y], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        both = low | (y.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return both


@triton.jit
def exp(x, PRECISION: tl.constexpr, BY: tl.constexpr = 1.0):
    """Of that many times x"""
    if is_rough(x, PRECISION):
        x *= BY * 1.4426950408889634
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp(BY * x)
    return y


@triton.jit
def inverse(x, PRECISION: tl.constexpr):
    if is_rough(x, PRECISION):
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1 / x
    return y


@triton.jit
def sigmoid(x, PRECISION: tl.constexpr, BY: tl.constexpr = 1.0):
    """Of that many times x"""
    return inverse(1 + exp(x, PRECISION, -BY), PRECISION)


@triton.jit
def tanh(x, PRECISION: tl.constexpr):
    """Near zero sigmoid leaves few digits; where products have as few that does not matter."""
    far = 2 * sigmoid(x, PRECISION, 2.0) - 1
    if PRECISION == "ieee" and x.dtype == tl.float32:
        # the polynomial in x^2 that is nearest to (tanh(x) / x - 1) / x^2 for |x| < 1/2
        square = x * x
        more = -0.053933468 + square * (0.021470683 - square * 0.0069429418)
        more = square * (-0.33333331 + square * (0.13333225 + square * more))
        far = tl.where(square < 0.25, x + x * more, far)
    return far
