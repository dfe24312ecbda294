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
    """The first is rounded already, as weights are that `pack_kernel` has copied."""
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


@triton.jit(do_not_specialize=["rows", "columns", "out_rows", "out_columns"])
def pack_kernel(
    x,
    out,
    rows,
    columns,
    out_rows,
    out_columns,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Copies matrices [rows, columns] into larger ones, padded with zeros and rounded."""
    matrix = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = index // out_columns, index % out_columns
    if TRANSPOSED:
        row, column = column, row
    inside = (row < rows) & (column < columns)
    value = tl.load(x + (matrix * rows + row) * columns + column, mask=inside, other=0.0)
    if out.dtype.element_ty.is_fp16():
        value = value.to(tl.float32) * WEIGHT_SCALE
    value = nearest(value.to(out.dtype.element_ty), PRECISION)
    size = out_rows * out_columns
    tl.store(out + matrix * size + index, value, mask=index < size)


@triton.jit
def block(pointer, n, k, STRIDE: tl.constexpr):
    """Rows n and columns k of a matrix. The weights are padded with zeros, so that nothing needs a
    mask: masked loads are slower than the larger ones."""
    return tl.load(pointer + n[:, None] * STRIDE + k[None, :])


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
    K: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total [MP, R] + weight [MP, K] times what lies at x"""
    for start in tl.range(0, K, KB, num_stages=STAGES):
        k = start + tl.arange(0, KB)
        part = tl.load(x + k[:, None], mask=(k < K)[:, None], other=0.0)
        part, scale = fit(part, weight.dtype, PRECISION)
        total += times(weight.load([0, start]), part, ACC, PRECISION) * scale[None, :]
    return total


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
