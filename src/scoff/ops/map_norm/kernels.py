"""Kernels that normalise maps. A program has a whole map.

Tiles are [BLOCK, CP], positions by channels. Where a map is one tile, loops over tiles have one
turn: the compiler does away with them, and what was read stays in registers.
"""

import triton
import triton.language as tl


@triton.jit
def place(
    start,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    CP: tl.constexpr,
):
    """Where in the map the tile is, and which of it is there  [BLOCK, CP]"""
    position = (start + tl.arange(0, BLOCK))[:, None]
    channel = tl.arange(0, CP)[None, :]
    return position * CHANNELS + channel, (position < POSITIONS) & (channel < CHANNELS)


@triton.jit
def read(pointers, inside, dtype: tl.constexpr):
    return tl.load(pointers, mask=inside, other=0.0).to(dtype)


@triton.jit
def slope(z):
    """Of ELU. Never infinite: what is not there may be far from 0, and is multiplied by 0"""
    return tl.exp(tl.where(z > 0, 0.0, z))


@triton.jit
def map_norm_elu_kernel(
    x,  # [maps, POSITIONS, CHANNELS]
    gain,  # [CHANNELS]
    bias,  # [CHANNELS]
    y,  # as x
    statistics,  # [maps, 2], mean and 1 / standard deviation
    EPS: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    CP: tl.constexpr,
):
    exact: tl.constexpr = statistics.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)  # which may be too far away for 32 bits
    x += row * POSITIONS * CHANNELS
    y += row * POSITIONS * CHANNELS
    channel = tl.arange(0, CP)
    weight = read(gain + channel, channel < CHANNELS, exact)[None, :]
    shift = read(bias + channel, channel < CHANNELS, exact)[None, :]
    total = tl.full((), 0.0, exact)
    for start in range(0, POSITIONS, BLOCK):
        at, inside = place(start, POSITIONS, CHANNELS, BLOCK, CP)
        total += tl.sum(read(x + at, inside, exact))
    mean = total / (POSITIONS * CHANNELS)
    total = tl.full((), 0.0, exact)
    for start in range(0, POSITIONS, BLOCK):
        at, inside = place(start, POSITIONS, CHANNELS, BLOCK, CP)
        off = tl.where(inside, read(x + at, inside, exact) - mean, 0.0)
        total += tl.sum(off * off)
    scale = 1.0 / tl.sqrt(total / (POSITIONS * CHANNELS) + EPS)
    for start in range(0, POSITIONS, BLOCK):
        at, inside = place(start, POSITIONS, CHANNELS, BLOCK, CP)
        z = (read(x + at, inside, exact) - mean) * scale * weight + shift
        # near 0 the difference is as exact as z itself, which is a sum of parts of about 1
        tl.store(y + at, tl.where(z > 0, z, slope(z) - 1.0), mask=inside)
    # last, for what is read after a store is read again
    tl.store(statistics + 2 * row, mean)
    tl.store(statistics + 2 * row + 1, scale)


@triton.jit
def d_scaled(d_y, x, at, inside, mean, scale, weight, shift, dtype: tl.constexpr):
    """What was scaled by the gain, and the gradient of what was made of it  [BLOCK, CP]"""
    normal = (read(x + at, inside, dtype) - mean) * scale
    z = normal * weight + shift
    return normal, read(d_y + at, inside, dtype) * slope(z)


@triton.jit
def map_norm_elu_back_kernel(
    x,
    gain,
    bias,
    statistics,
    d_y,  # as x
    d_x,  # as x
    d_weights,  # [maps, 2, CHANNELS], each map's part of the gradients of gain and bias
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    CP: tl.constexpr,
):
    exact: tl.constexpr = statistics.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x += row * POSITIONS * CHANNELS
    d_y += row * POSITIONS * CHANNELS
    d_x += row * POSITIONS * CHANNELS
    channel = tl.arange(0, CP)
    weight = read(gain + channel, channel < CHANNELS, exact)[None, :]
    shift = read(bias + channel, channel < CHANNELS, exact)[None, :]
    mean = tl.load(statistics + 2 * row)
    scale = tl.load(statistics + 2 * row + 1)
    d_gain = tl.zeros((CP,), exact)
    d_bias = tl.zeros((CP,), exact)
    for start in range(0, POSITIONS, BLOCK):
        at, inside = place(start, POSITIONS, CHANNELS, BLOCK, CP)
        normal, d_z = d_scaled(d_y, x, at, inside, mean, scale, weight, shift, exact)
        d_gain += tl.sum(normal * d_z, 0)
        d_bias += tl.sum(d_z, 0)
    # what mean and standard deviation take back: parts of the gradient that are constant over the
    # map, and that are as the map itself
    constant = tl.sum(d_bias[None, :] * weight) / (POSITIONS * CHANNELS)
    alike = tl.sum(d_gain[None, :] * weight) / (POSITIONS * CHANNELS)
    for start in range(0, POSITIONS, BLOCK):
        at, inside = place(start, POSITIONS, CHANNELS, BLOCK, CP)
        normal, d_z = d_scaled(d_y, x, at, inside, mean, scale, weight, shift, exact)
        tl.store(d_x + at, scale * (d_z * weight - constant - normal * alike), mask=inside)
    d_weights += 2 * row * CHANNELS + channel
    tl.store(d_weights, d_gain, mask=channel < CHANNELS)
    tl.store(d_weights + CHANNELS, d_bias, mask=channel < CHANNELS)
