"""Kernels that mix pictures. A program has some pixels of a frame, and of them all object files.

Tiles are [FP, BLOCK], object files by pixels. Object files that are not there have a mask of 0.
"""

import triton
import triton.language as tl


@triton.jit
def place(PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """The frame, which may be too far away for 32 bits, and pixels of it  [1, BLOCK]"""
    blocks: tl.constexpr = (PIXELS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    pixel = program % blocks * BLOCK + tl.arange(0, BLOCK)
    return (program // blocks).to(tl.int64), pixel[None, :]


@triton.jit
def exponents(x):
    """exp(x - top) and top, the largest of all object files"""
    top = tl.max(x, 0, keep_dims=True)
    top = tl.where(top == float("-inf"), 0.0, top)
    return tl.exp(x - top), top


@triton.jit
def softmax(x):
    """Over object files"""
    parts, _ = exponents(x)
    return parts / tl.sum(parts, 0, keep_dims=True)


@triton.jit
def log_sum_exp(x):
    """Over object files"""
    parts, top = exponents(x)
    return top + tl.log(tl.sum(parts, 0, keep_dims=True))


@triton.jit
def log_sigmoids(x):
    """Of x and of -x"""
    # where the sum is rounded to 1, no more is lost than by rounding the result: the logarithm of
    # lit or of dark is below log(1/2), and it is their difference that is told
    rest = tl.log(1.0 + tl.exp(-tl.abs(x)))
    return tl.minimum(x, 0.0) - rest, tl.minimum(-x, 0.0) - rest


@triton.jit
def log_masks(mask_logits, file, inside, FILES: tl.constexpr):
    """Of pointers to all object files"""
    x = tl.load(mask_logits, mask=inside, other=0.0)
    x = tl.where(file < FILES, x, float("-inf"))
    parts, top = exponents(x)
    # in this order: to a large x a small logarithm cannot be added
    return (x - top) - tl.log(tl.sum(parts, 0, keep_dims=True))


@triton.jit
def add_back(d_log_mask, mask, d_masks, inside):
    """From gradients of log masks, and of masks if they were used, to those of their logits"""
    if d_masks is not None:
        d_log_mask += mask * tl.load(d_masks, mask=inside, other=0.0)
    return d_log_mask - mask * tl.sum(d_log_mask, 0, keep_dims=True)


@triton.jit
def mix_kernel(
    logits,  # rows of [FILES, CHANNELS, PIXELS]
    mask_logits,  # rows of [FILES, PIXELS]
    mixed,  # [rows, CHANNELS, PIXELS]
    masks,  # [rows, FILES, PIXELS]
    ROW: tl.constexpr,  # how far apart rows, object files and channels of the logits are
    FILE: tl.constexpr,
    CHANNEL: tl.constexpr,
    MASK_ROW: tl.constexpr,  # and of the logits of masks
    MASK_FILE: tl.constexpr,
    FILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    FP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, pixel = place(PIXELS, BLOCK)
    file = tl.arange(0, FP)[:, None]
    inside = (file < FILES) & (pixel < PIXELS)
    log_mask = log_masks(
        mask_logits + row * MASK_ROW + file * MASK_FILE + pixel, file, inside, FILES
    )
    tl.store(masks + (row * FILES + file) * PIXELS + pixel, tl.exp(log_mask), mask=inside)
    for channel in range(CHANNELS):
        x = tl.load(
            logits + row * ROW + file * FILE + channel * CHANNEL + pixel, mask=inside, other=0.0
        )
        lit, dark = log_sigmoids(x)
        result = log_sum_exp(log_mask + lit) - log_sum_exp(log_mask + dark)
        here = (row * CHANNELS + channel) * PIXELS + pixel
        tl.store(mixed + here, result, mask=pixel < PIXELS)


@triton.jit
def mix_back_kernel(
    logits,
    mask_logits,
    d_mixed,  # [rows, CHANNELS, PIXELS]
    d_masks,  # [rows, FILES, PIXELS]; None: masks were not used
    d_logits,  # [rows, FILES, CHANNELS, PIXELS]
    d_mask_logits,  # [rows, FILES, PIXELS]
    ROW: tl.constexpr,
    FILE: tl.constexpr,
    CHANNEL: tl.constexpr,
    MASK_ROW: tl.constexpr,
    MASK_FILE: tl.constexpr,
    FILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    FP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, pixel = place(PIXELS, BLOCK)
    file = tl.arange(0, FP)[:, None]
    inside = (file < FILES) & (pixel < PIXELS)
    log_mask = log_masks(
        mask_logits + row * MASK_ROW + file * MASK_FILE + pixel, file, inside, FILES
    )
    mask = tl.exp(log_mask)
    d_log_mask = tl.zeros_like(mask)
    for channel in range(CHANNELS):
        x = tl.load(
            logits + row * ROW + file * FILE + channel * CHANNEL + pixel, mask=inside, other=0.0
        )
        d = tl.load(
            d_mixed + (row * CHANNELS + channel) * PIXELS + pixel, mask=pixel < PIXELS, other=0.0
        )
        lit, dark = log_sigmoids(x)
        # whose picture it is, if the pixel is lit, and if it is dark
        if_lit, if_dark = softmax(log_mask + lit), softmax(log_mask + dark)
        d_x = d * (if_lit * tl.exp(dark) + if_dark * tl.exp(lit))
        d_log_mask += d * (if_lit - if_dark)
        here = ((row * FILES + file) * CHANNELS + channel) * PIXELS + pixel
        tl.store(d_logits + here, d_x, mask=inside)
    here = (row * FILES + file) * PIXELS + pixel
    if d_masks is not None:
        d_masks += here
    d_mask_x = add_back(d_log_mask, mask, d_masks, inside)
    tl.store(d_mask_logits + here, d_mask_x, mask=inside)


@triton.jit
def sum_classes(logits, inside, CHANNEL: tl.constexpr, CHANNELS: tl.constexpr):
    """The largest of all classes, and log(sum exp(x - top)) over them  [FP, BLOCK]

    Of pointers to the first class of all object files.
    """
    top = tl.load(logits, mask=inside, other=0.0)
    total = tl.zeros_like(top) + 1.0
    for channel in range(1, CHANNELS):
        x = tl.load(logits + channel * CHANNEL, mask=inside, other=0.0)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    return top, tl.log(total)


@triton.jit
def mix_classes_kernel(
    logits,
    mask_logits,
    mixed,
    masks,
    ROW: tl.constexpr,
    FILE: tl.constexpr,
    CHANNEL: tl.constexpr,
    MASK_ROW: tl.constexpr,
    MASK_FILE: tl.constexpr,
    FILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    FP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, pixel = place(PIXELS, BLOCK)
    file = tl.arange(0, FP)[:, None]
    inside = (file < FILES) & (pixel < PIXELS)
    log_mask = log_masks(
        mask_logits + row * MASK_ROW + file * MASK_FILE + pixel, file, inside, FILES
    )
    tl.store(masks + (row * FILES + file) * PIXELS + pixel, tl.exp(log_mask), mask=inside)
    logits += row * ROW + file * FILE + pixel
    top, rest = sum_classes(logits, inside, CHANNEL, CHANNELS)
    for channel in range(CHANNELS):
        x = tl.load(logits + channel * CHANNEL, mask=inside, other=0.0)
        here = (row * CHANNELS + channel) * PIXELS + pixel
        result = log_sum_exp(log_mask + ((x - top) - rest))
        tl.store(mixed + here, result, mask=pixel < PIXELS)


@triton.jit
def mix_classes_back_kernel(
    logits,
    mask_logits,
    d_mixed,
    d_masks,
    d_logits,
    d_mask_logits,
    ROW: tl.constexpr,
    FILE: tl.constexpr,
    CHANNEL: tl.constexpr,
    MASK_ROW: tl.constexpr,
    MASK_FILE: tl.constexpr,
    FILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    FP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, pixel = place(PIXELS, BLOCK)
    file = tl.arange(0, FP)[:, None]
    inside = (file < FILES) & (pixel < PIXELS)
    log_mask = log_masks(
        mask_logits + row * MASK_ROW + file * MASK_FILE + pixel, file, inside, FILES
    )
    logits += row * ROW + file * FILE + pixel
    d_mixed += row * CHANNELS * PIXELS + pixel
    d_logits += (row * FILES + file) * CHANNELS * PIXELS + pixel
    top, rest = sum_classes(logits, inside, CHANNEL, CHANNELS)
    # which is that of the sum over classes, too, with the other sign
    d_log_mask = tl.zeros_like(log_mask)
    for channel in range(CHANNELS):
        x = tl.load(logits + channel * CHANNEL, mask=inside, other=0.0)
        d = tl.load(d_mixed + channel * PIXELS, mask=pixel < PIXELS, other=0.0)
        d_log_mask += d * softmax(log_mask + ((x - top) - rest))
    for channel in range(CHANNELS):
        x = tl.load(logits + channel * CHANNEL, mask=inside, other=0.0)
        d = tl.load(d_mixed + channel * PIXELS, mask=pixel < PIXELS, other=0.0)
        x = (x - top) - rest
        d_x = d * softmax(log_mask + x) - tl.exp(x) * d_log_mask
        tl.store(d_logits + channel * PIXELS, d_x, mask=inside)
    here = (row * FILES + file) * PIXELS + pixel
    if d_masks is not None:
        d_masks += here
    d_mask_x = add_back(d_log_mask, tl.exp(log_mask), d_masks, inside)
    tl.store(d_mask_logits + here, d_mask_x, mask=inside)
