"""What the kernels of the `fused` backend are made of."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.elementary import exp, inverse, nearest, two_halves


@triton.jit
def dot(a, b, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """The first is rounded already."""
    return tl.dot(a, nearest(b, PRECISION), input_precision=PRECISION, out_dtype=ACC)


WEIGHT_SCALE = tl.constexpr(32.0)  # of weights that are packed into 16 bits: up to 2047, to 2e-6


@triton.jit
def power_below(x, DTYPE: tl.constexpr):
    """By what to divide the columns of x, so that they are in the range of that type: a power of
    two whose inverse is one too."""
    if DTYPE.is_fp16():
        bits = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True)
        bits = tl.minimum(bits & 0x7F800000, 0x7E800000)  # 2^126
        power = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
    else:
        power = tl.full((x.shape[1],), 1.0, x.dtype)
    return power


@triton.jit
def under(power):
    """2^-n from the bits of 2^n: a division takes as long as three products."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def within(x, power, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x [K, R] as the second factor of weights of that type"""
    if DTYPE.is_fp16():
        x *= under(power)[None, :]
        x = x.to(tl.float16)
    else:
        x = nearest(x, PRECISION)
    return x


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
def load_halves(start, first, END: tl.constexpr, COUNT: tl.constexpr):
    """Numbers from the first on, zero from the end on. Half of them are fewer than there are
    threads: so few are loaded by each thread that needs them, and not passed on by others."""
    n = first + tl.arange(0, COUNT // 2)
    upper = tl.load(start + n, mask=n < END, other=0.0)
    lower = tl.load(start + COUNT // 2 + n, mask=n + COUNT // 2 < END, other=0.0)
    return upper, lower


@triton.jit
def plus_halves(x, scale, upper, lower):
    """x times the scale of its columns, and to each of its rows a number added"""
    x_0, x_1 = parts(x, 2)
    x_0 = x_0 * scale[None, :] + upper[:, None].to(x.dtype)
    x_1 = x_1 * scale[None, :] + lower[:, None].to(x.dtype)
    return whole(x_0, x_1, 2)


@triton.jit
def four_at(start, STEP: tl.constexpr, WIDE_STEP):
    """Where four matrices are, the second a step from the first, the third and fourth a wide step
    from these. So they are on their way together."""
    one, other = tl.arange(0, 2)[None, None, :, None], tl.arange(0, 2)[None, None, None, :]
    return start[:, :, None, None] + (one * STEP + other * WIDE_STEP)


@triton.jit
def load_four(start, inside, STEP: tl.constexpr, WIDE_STEP):
    mask = inside[:, :, None, None]
    first, last = tl.split(tl.load(four_at(start, STEP, WIDE_STEP), mask=mask, other=0.0))
    return tl.split(first) + tl.split(last)


@triton.jit
def store_four(start, x_0, x_1, x_2, x_3, inside, STEP: tl.constexpr):
    """A step from each other"""
    all_four = tl.join(tl.join(x_0, x_1), tl.join(x_2, x_3))
    tl.store(four_at(start, STEP, 2 * STEP), all_four, mask=inside[:, :, None, None])


@triton.jit
def store_halves(start, power, x_0, x_1, x_2, x_3, inside, STEP: tl.constexpr):
    """By twos in a word of 32 bits, scaled; the last two a step from the others"""
    scale = under(power)[None, :]
    both = tl.join(two_halves(x_0 * scale, x_1 * scale), two_halves(x_2 * scale, x_3 * scale))
    tl.store(start[:, :, None] + tl.arange(0, 2) * STEP, both, mask=inside[:, :, None])


@triton.jit
def beside(x, y):
    """Their columns, taken in turns"""
    return tl.reshape(tl.join(x, y), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def compete(scores, some, PRECISION: tl.constexpr):
    """Softmax over the columns, of those that are `some`; zero elsewhere."""
    scores = tl.where(some, scores, float("-inf"))
    largest = tl.max(scores, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    e = tl.where(some, exp(scores - largest[:, None], PRECISION), 0.0)
    total = tl.sum(e, 1)
    return e * inverse(tl.where(total == 0, 1.0, total), PRECISION)[:, None]


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
def listen(
    q,
    k,
    row,
    together,
    scale: tl.constexpr,
    E: tl.constexpr,
    HP: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Who reads whom  [heads * R, R], from queries, rounded already, and keys [heads * E, R]"""
    scores = dot(tl.trans(spread(q, row, E, HP)), k, ACC, PRECISION) * scale
    return compete(scores, of_heads(together, HP, HP), PRECISION)


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
