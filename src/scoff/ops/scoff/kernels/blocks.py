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
def fit(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x [K, R] as the second factor of weights of that type, and by what to multiply the product.

    Numbers of 16 bits have as many digits as tf32 and less range: each column gets a scale."""
    if DTYPE.is_fp16():
        largest = tl.max(tl.abs(x), 0)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power == 0, 1.0, power)
        fitted = (x / power[None, :]).to(tl.float16)
        scale = power / WEIGHT_SCALE
    else:
        fitted = nearest(x, PRECISION)
        scale = tl.full((x.shape[1],), 1.0, x.dtype)
    return fitted, scale


@triton.jit
def times(weights, x, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Of two that fit"""
    return tl.dot(weights, x, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def element(
    x,
    index,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    OUT_COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Of matrices [ROWS, COLUMNS], padded with zeros and laid out one after the other."""
    matrix = index // (OUT_ROWS * OUT_COLUMNS)
    row = index // OUT_COLUMNS % OUT_ROWS
    column = index % OUT_COLUMNS
    if TRANSPOSED:
        row, column = column, row
    inside = (row < ROWS) & (column < COLUMNS)
    return tl.load(x + (matrix * ROWS + row) * COLUMNS + column, mask=inside, other=0.0)


@triton.jit
def pack_kernel(
    from_state,  # as in the forward kernel, as they come
    weight_ih,
    weight_hh,
    comm_read,
    comm_say,
    out,  # all of them padded, then all of them transposed and padded
    SG: tl.constexpr,  # schemata times gates
    D: tl.constexpr,
    V: tl.constexpr,
    X: tl.constexpr,
    READ: tl.constexpr,
    SAY: tl.constexpr,
    HU: tl.constexpr,
    DP: tl.constexpr,
    VP: tl.constexpr,
    XP: tl.constexpr,
    READ_P: tl.constexpr,
    SAY_P: tl.constexpr,
    UP: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Copies the weights to where the others find them: padded, so that no load needs a mask, and
    rounded to what tensor cores take."""
    at_ih: tl.constexpr = XP * DP
    at_hh: tl.constexpr = at_ih + SG * DP * VP
    at_read: tl.constexpr = at_hh + SG * DP * DP
    at_say: tl.constexpr = at_read + READ_P * DP
    turned: tl.constexpr = at_say + SAY_P * UP
    turned_ih: tl.constexpr = turned + at_ih
    turned_hh: tl.constexpr = turned + at_hh
    turned_read: tl.constexpr = turned + at_read
    turned_say: tl.constexpr = turned_read + READ_P * DP
    start = tl.program_id(0) * BLOCK
    i = start + tl.arange(0, BLOCK)
    x = tl.zeros((BLOCK,), ACC)
    if start < at_ih:
        x = element(from_state, i, X, D, XP, DP, False).to(ACC)
    elif start < at_hh:
        x = element(weight_ih, i - at_ih, D, V, DP, VP, False).to(ACC)
    elif start < at_read:
        x = element(weight_hh, i - at_hh, D, D, DP, DP, False).to(ACC)
    elif start < turned:
        if comm_say is not None:
            if start < at_say:
                x = element(comm_read, i - at_read, READ, D, READ_P, DP, False).to(ACC)
            else:
                x = element(comm_say, i - at_say, SAY, HU, SAY_P, UP, False).to(ACC)
    elif start < turned_ih:
        x = element(from_state, i - turned, X, D, DP, XP, True).to(ACC)
    elif start < turned_hh:
        x = element(weight_ih, i - turned_ih, D, V, VP, DP, True).to(ACC)
    elif start < turned_read:
        x = element(weight_hh, i - turned_hh, D, D, DP, DP, True).to(ACC)
    elif comm_say is not None:
        if start < turned_say:
            x = element(comm_read, i - turned_read, READ, D, DP, READ_P, True).to(ACC)
        else:
            x = element(comm_say, i - turned_say, SAY, HU, UP, SAY_P, True).to(ACC)
    if out.dtype.element_ty.is_fp16():
        x *= WEIGHT_SCALE
    tl.store(out + i, nearest(x, PRECISION))


@triton.jit
def project(
    weight,
    x,
    out,
    N: tl.constexpr,
    NB: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """weight [N, KP] times x [KP, R], to `out`, which has space for whole blocks"""
    x, scale = fit(x, weight.dtype, PRECISION)
    for start in tl.range(0, N, NB, num_stages=STAGES):
        n = start + tl.arange(0, NB)
        product = times(weight.load([start, 0]), x, ACC, PRECISION)
        tl.store(out + n[:, None], product * scale[None, :])


@triton.jit
def pull(
    total,
    weight,
    x,
    some,
    K: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total [MP, R] + weight [MP, K] times what lies at x, in some of the columns"""
    for start in tl.range(0, K, KB, num_stages=STAGES):
        k = start + tl.arange(0, KB)
        part = tl.load(x + k[:, None], mask=(k < K)[:, None] & some[None, :], other=0.0)
        part, scale = fit(part, weight.dtype, PRECISION)
        total += times(weight.load([0, start]), part, ACC, PRECISION) * scale[None, :]
    return total


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
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


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
def listen(
    q,
    k,
    together,
    scale: tl.constexpr,
    HP: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Who reads whom  [heads * R, R], from spread queries and the keys"""
    R: tl.constexpr = k.shape[1]
    scores = dot(tl.trans(nearest(q, PRECISION)), k, ACC, PRECISION) * scale
    same = tl.broadcast_to(together[None, :, :], (HP, R, R)).reshape(HP * R, R)
    return compete(scores, same)
