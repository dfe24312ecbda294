"""What the kernels of the `fused` backend are made of."""

import triton
import triton.language as tl


@triton.jit
def nearest(x, PRECISION: tl.constexpr):
    """Rounded to what tensor cores take of a float32: they would cut it off, which errs by more
    and always to the same side."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) + 0x1000
        rounded = (bits & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # or a NaN of all ones, which is CUDA's, turns into zero
    return x


@triton.jit
def dot(a, b, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """The first is rounded already."""
    return tl.dot(a, nearest(b, PRECISION), input_precision=PRECISION, out_dtype=ACC)


WEIGHT_SCALE = tl.constexpr(32.0)  # of weights that are packed into 16 bits: up to 2047, to 2e-6


@triton.jit
def power_below(x, DTYPE: tl.constexpr):
    """By what to divide the columns of x, so that they are in the range of that type."""
    if DTYPE.is_fp16():
        bits = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power == 0, 1.0, power)
    else:
        power = tl.full((x.shape[1],), 1.0, x.dtype)
    return power


@triton.jit
def within(x, power, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x [K, R] as the second factor of weights of that type"""
    return (x / power[None, :]).to(tl.float16) if DTYPE.is_fp16() else nearest(x, PRECISION)


@triton.jit
def scale_of(power, DTYPE: tl.constexpr):
    """By what to multiply the product"""
    if DTYPE.is_fp16():
        power = power / WEIGHT_SCALE
    return power


@triton.jit
def fit(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x [K, R] as the second factor of weights of that type, and by what to multiply the product.

    Numbers of 16 bits have as many digits as tf32 and less range: each column gets a scale."""
    power = power_below(x, DTYPE)
    return within(x, power, DTYPE, PRECISION), scale_of(power, DTYPE)


@triton.jit
def larger(x, y):
    """Of their absolute values"""
    return tl.maximum(tl.abs(x), tl.abs(y))


@triton.jit
def sums_of(x, y):
    """Of the columns of both, in one exchange between warps"""
    return tl.split(tl.sum(tl.join(x, y), 0))


@triton.jit
def times(weights, x, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Of two that fit. Numbers of 16 bits in tiles of 16 rows: as one product Triton would give
    them, with more than 8 columns, to Hopper's wgmma, of which ptxas 12.8 to 13.0 make code that
    reads shared memory out of bounds."""
    M: tl.constexpr = weights.shape[0]
    R: tl.constexpr = x.shape[1]
    if weights.dtype.is_fp16() and R > 8:
        tiles = tl.reshape(weights, (M // 16, 16, weights.shape[1]))
        same = tl.broadcast_to(x[None, :, :], (M // 16, x.shape[0], R))
        product = tl.reshape(tl.dot(tiles, same, out_dtype=ACC), (M, R))
    else:
        product = tl.dot(weights, x, input_precision=PRECISION, out_dtype=ACC)
    return product


@triton.jit
def parts(x, COUNT: tl.constexpr):
    """The upper and the lower half of the rows; or twice the same, of one part"""
    if COUNT == 2:
        halves = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1]))
        upper, lower = tl.split(tl.permute(halves, (1, 2, 0)))
    else:
        upper, lower = x, x
    return upper, lower


@triton.jit
def whole(upper, lower, COUNT: tl.constexpr):
    if COUNT == 2:
        both = tl.permute(tl.join(upper, lower), (2, 0, 1))
        x = tl.reshape(both, (2 * upper.shape[0], upper.shape[1]))
    else:
        x = lower
    return x


@triton.jit
def top(x, ROWS: tl.constexpr):
    """Its first rows: all, half or a quarter"""
    if x.shape[0] == 4 * ROWS:
        x, _ = parts(x, 2)
    if x.shape[0] == 2 * ROWS:
        x, _ = parts(x, 2)
    return x


@triton.jit
def above_zeros(x, ROWS: tl.constexpr):
    """With as many rows, which are all, two or four times its own"""
    if x.shape[0] * 4 == ROWS:
        x = whole(x, tl.zeros_like(x), 2)
    if x.shape[0] * 2 == ROWS:
        x = whole(x, tl.zeros_like(x), 2)
    return x


@triton.jit
def narrow(x, R: tl.constexpr):
    """The first R columns of R or 16"""
    if x.shape[1] == 2 * R:
        halves = tl.permute(tl.reshape(x, (x.shape[0], 2, R)), (0, 2, 1))
        x, _ = tl.split(halves)
    return x


@triton.jit
def widen(x, R: tl.constexpr):
    """With zeros to the right, if there are to be more columns"""
    if x.shape[1] * 2 == R:
        both = tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1))
        x = tl.reshape(both, (x.shape[0], R))
    return x


@triton.jit
def beside(x, y):
    """Their columns, taken in turns"""
    return tl.reshape(tl.join(x, y), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def tanh(x, PRECISION: tl.constexpr):
    """Near zero sigmoid leaves few digits; where products have as few that does not matter."""
    far = 2 * tl.sigmoid(2 * x) - 1
    if PRECISION == "ieee" and x.dtype == tl.float32:
        # the polynomial in x^2 that is nearest to (tanh(x) / x - 1) / x^2 for |x| < 1/2
        square = x * x
        more = -0.053933468 + square * (0.021470683 - square * 0.0069429418)
        more = square * (-0.33333331 + square * (0.13333225 + square * more))
        far = tl.where(square < 0.25, x + x * more, far)
    return far


@triton.jit
def compete(scores, some):
    """Softmax over the columns, of those that are `some`; zero elsewhere."""
    scores = tl.where(some, scores, float("-inf"))
    largest = tl.max(scores, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    e = tl.where(some, tl.exp(scores - largest[:, None]), 0.0)
    total = tl.sum(e, 1)
    return e / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def spread(x, row, SIZE: tl.constexpr, HP: tl.constexpr):
    """Rows of all heads [heads * SIZE, R] -> [.., heads * R]: those of head a in columns of a"""
    of_head = (row // SIZE)[:, None] == tl.arange(0, HP)[None, :]
    wide = tl.where(of_head[:, :, None], x[:, None, :], 0.0)
    return wide.reshape(x.shape[0], HP * x.shape[1])


@triton.jit
def turned(x, HP: tl.constexpr):
    """What each head has [heads * R, R], transposed"""
    R: tl.constexpr = x.shape[1]
    return tl.permute(x.reshape(HP, R, R), (0, 2, 1)).reshape(HP * R, R)


@triton.jit
def spread_in(
    x, row, SIZE: tl.constexpr, HP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """The same as a factor of that type, and by what to multiply its columns"""
    R: tl.constexpr = x.shape[1]
    power = power_below(x, DTYPE)
    wide = spread(within(x, power, DTYPE, PRECISION), row, SIZE, HP)
    return wide, tl.broadcast_to(power[None, :], (HP, R)).reshape(HP * R)


@triton.jit
def listen(
    q,
    k,
    row,
    together,
    scale: tl.constexpr,
    E: tl.constexpr,
    HP: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Who reads whom  [heads * R, R], from queries and keys [heads * E, R]"""
    wide, power = spread_in(q, row, E, HP, DTYPE, PRECISION)
    k_power = power_below(k, DTYPE)
    scores = times(tl.trans(wide), within(k, k_power, DTYPE, PRECISION), ACC, PRECISION)
    scores = scores * k_power[None, :] * (power * scale)[:, None]
    return compete(scores, of_heads(together, HP, HP))


@triton.jit
def of_heads(together, H: tl.constexpr, HP: tl.constexpr):
    """Who may read whom [R, R] -> [heads * R, R], of the first H heads"""
    R: tl.constexpr = together.shape[0]
    head = tl.arange(0, HP)[:, None, None]
    return (together[None, :, :] & (head < H)).reshape(HP * R, R)


@triton.jit
def talk_at(start, column, F: tl.constexpr, HP: tl.constexpr):
    """Where it is kept [heads * R, R] how an object file, whose row starts there, reads others."""
    R: tl.constexpr = column.shape[0]
    head = tl.arange(0, HP)[:, None, None]
    at = start[None, :, None] + head * F + (column % F)[None, None, :]
    return at.reshape(HP * R, R)
