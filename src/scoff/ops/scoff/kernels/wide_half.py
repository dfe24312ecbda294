"""16-bit factors of the `wide` backend's products: rows are as `wide_blocks` says."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.wide_blocks import scale_of


@triton.jit(do_not_specialize=["rows", "steps"])
def begin_kernel(
    values,  # [T, rows, V] what one object file reads
    state,  # [Z, rows, D]
    restart,  # [Z, rows, D]; None: it never starts anew
    reset,  # [T, rows]
    before,  # [T + 1, rows, DP] gets the first h
    before_half,  # [T + 1, rows, DP + VP] gets it as well, what is read, and ones
    updated_half,  # [T, rows, DP] gets ones; None: Step 4 is not to come
    scales,  # [T + 1, rows] gets by what rows are multiplied
    updated_scales,  # [T, rows] likewise, of `updated_half`: without what is read
    rows,
    steps,
    D: tl.constexpr,
    V: tl.constexpr,
    DP: tl.constexpr,
    VP: tl.constexpr,
    DB: tl.constexpr,
    VB: tl.constexpr,
):
    """Finds scales: no h will be larger than the first, that of a new start, or one."""
    here = tl.program_id(0).to(tl.int64)
    row = here % rows
    step = here // rows
    d, v = tl.arange(0, DB), tl.arange(0, VB)
    h = tl.load(state + row * D + d, mask=d < D, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(h), 0), 1.0)
    if reset is not None:
        again = tl.load(restart + row * D + d, mask=d < D, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(again), 0))
        h = tl.where(tl.load(reset + row) != 0, again, h)
    exists = step < steps  # the last row is what no step starts from
    read = tl.load(values + here * V + v, mask=v < tl.where(exists, V, 0), other=0.0)
    scale = scale_of(tl.maximum(largest, tl.max(tl.abs(read), 0)))
    tl.store(scales + here, scale)
    # behind its own numbers a one, which biases multiply, and zeros
    behind = D + tl.arange(0, 8)
    ones = tl.where(behind == D, scale, 0.0)
    before_half += here * (DP + VP)
    tl.store(before_half + behind, ones, mask=behind < DP)
    tl.store(before_half + DP + v, tl.where(v == V, 1.0, read) * scale, mask=v < VP)
    if updated_half is not None:
        scale_of_h = scale_of(largest)
        tl.store(updated_scales + here, scale_of_h, mask=exists)
        ones = tl.where(behind == D, scale_of_h, 0.0)
        tl.store(updated_half + here * DP + behind, ones, mask=behind < tl.where(exists, DP, 0))
    first = d < tl.where(step == 0, D, 0)
    tl.store(before + row * DP + d, h, mask=first)
    tl.store(before_half + d, h * scale, mask=first)


@triton.jit
def weigh_kernel(
    factor,  # [rows, WIDTH]
    undo,  # [rows] what undoes the scale of the gradients that it is to be multiplied with
    scales,  # [rows] its own
    largest,  # [1] of undo / scales, or more
    out,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Undoes the scales of both factors of a sum over rows but for one that all have."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(undo + row) / tl.load(scales + row) / tl.load(largest)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(factor + row * WIDTH + i, mask=i < WIDTH, other=0.0)
        tl.store(out + row * WIDTH + i, x.to(tl.float32) * share, mask=i < WIDTH)
