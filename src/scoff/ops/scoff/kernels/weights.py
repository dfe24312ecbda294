"""The weights on their way into the kernels of the `fused` backend, and their gradients out."""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import WEIGHT_SCALE
from scoff.ops.scoff.kernels.elementary import nearest

LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def place(i, ROWS: tl.constexpr, COLUMNS: tl.constexpr, turned):
    """Of the i-th of the numbers in matrices [ROWS, COLUMNS], or in their transposes"""
    matrix = i // (ROWS * COLUMNS)
    row = tl.where(turned, i % ROWS, i // COLUMNS % ROWS)
    column = tl.where(turned, i // ROWS % COLUMNS, i % COLUMNS)
    return matrix, row, column


@triton.jit
def element(x, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, some):
    """Of a matrix [ROWS, COLUMNS], padded with zeros"""
    inside = some & (row < ROWS) & (column < COLUMNS)
    return tl.load(x + row * COLUMNS + column, mask=inside, other=0.0)


@triton.jit
def pack_kernel(
    query,  # [D, D]
    ask,  # [A, C, D]
    weight_ih,  # [SG, D, V]
    weight_hh,  # [SG, D, D]
    comm_query,  # [HE, D]
    comm_key,  # [HE, D]
    comm_value,  # [HU, D]
    comm_out,  # [D, HU]
    comm_gate,  # [D, HU]
    out,  # all as the forward kernel takes them, then all of them transposed
    SG: tl.constexpr,  # schemata times gates
    D: tl.constexpr,
    V: tl.constexpr,
    A: tl.constexpr,
    C: tl.constexpr,
    HE: tl.constexpr,
    HU: tl.constexpr,
    SAYS: tl.constexpr,
    DP: tl.constexpr,
    VP: tl.constexpr,
    AP: tl.constexpr,
    TP: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Copies the weights to where the others find them: each matrix padded, so that no load needs a
    mask, and rounded to what tensor cores take."""
    at_ih: tl.constexpr = (1 + A) * AP * DP
    at_hh: tl.constexpr = at_ih + SG * DP * VP
    at_read: tl.constexpr = at_hh + SG * DP * DP
    at_say: tl.constexpr = at_read + 3 * TP * DP
    half: tl.constexpr = at_say + SAYS * DP * TP
    start = tl.program_id(0) * BLOCK
    to = out + start + tl.arange(0, BLOCK)
    turned = start >= half
    start -= tl.where(turned, half, 0)
    i = start + tl.arange(0, BLOCK)
    x = tl.zeros((BLOCK,), ACC)
    if start < at_ih:
        matrix, row, column = place(i, AP, DP, turned)
        x = element(query, row, column, D, D, matrix == 0).to(ACC)
        x += element(ask + (matrix - 1) * C * D, row, column, C, D, matrix > 0).to(ACC)
    elif start < at_hh:
        matrix, row, column = place(i - at_ih, DP, VP, turned)
        x = element(weight_ih + matrix * D * V, row, column, D, V, matrix >= 0).to(ACC)
    elif start < at_read:
        matrix, row, column = place(i - at_hh, DP, DP, turned)
        x = element(weight_hh + matrix * D * D, row, column, D, D, matrix >= 0).to(ACC)
    elif comm_query is not None:
        if start < at_say:
            matrix, row, column = place(i - at_read, TP, DP, turned)
            x = element(comm_query, row, column, HE, D, matrix == 0).to(ACC)
            x += element(comm_key, row, column, HE, D, matrix == 1).to(ACC)
            x += element(comm_value, row, column, HU, D, matrix == 2).to(ACC)
        else:
            matrix, row, column = place(i - at_say, DP, TP, turned)
            x = element(comm_out, row, column, D, HU, matrix == 0).to(ACC)
            if comm_gate is not None:
                x += element(comm_gate, row, column, D, HU, matrix == 1).to(ACC)
    if out.dtype.element_ty.is_fp16():  # more than it holds would be infinite; NaN stays NaN
        x *= WEIGHT_SCALE
        x = tl.where(x > LARGEST_HALF, LARGEST_HALF, x)
        x = tl.where(x < -LARGEST_HALF, -LARGEST_HALF, x)
    tl.store(to, nearest(x, PRECISION))


@triton.jit
def share(
    sums,
    out,
    block,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies a block, if there are as many, and returns which of the next matrix would be meant."""
    if out is not None:
        i = block * BLOCK + tl.arange(0, BLOCK)
        some = (i >= 0) & (i < ROWS * COLUMNS)
        at = (ROW + i // COLUMNS) * WIDTH + COLUMN + i % COLUMNS
        tl.store(out + i, tl.load(sums + at, mask=some, other=0.0), mask=some)
        block -= (ROWS * COLUMNS + BLOCK - 1) // BLOCK
    return block


@triton.jit
def share_gates(
    sums,
    out,
    block,
    COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SD: tl.constexpr,
    D: tl.constexpr,
    GATES: tl.constexpr,
    LAST: tl.constexpr,  # which of the four is the last of the GRU's three
    PAIRS: tl.constexpr,  # whether gates alternate, the first two, and then the last two
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if out is not None:
        i = block * BLOCK + tl.arange(0, BLOCK)
        some = (i >= 0) & (i < SD * GATES * COLUMNS)
        row = i // COLUMNS
        gate = row // D % GATES
        if GATES == 3:
            gate = tl.where(gate == 2, LAST, gate)
        schema = row // (GATES * D) * 4 * D
        if PAIRS:
            row = schema + gate // 2 * 2 * D + row % D * 2 + gate % 2
        else:
            row = schema + gate * D + row % D
        x = tl.load(sums + row * WIDTH + COLUMN + i % COLUMNS, mask=some, other=0.0)
        tl.store(out + i, x, mask=some)
        block -= (SD * GATES * COLUMNS + BLOCK - 1) // BLOCK
    return block


@triton.jit
def share_kernel(
    sums,  # [RIGHT, WIDTH] all products of what is left and what is right of RIGHT in a kept row
    query,  # [D, D] gets its gradient, and so do the others; None: there is none
    ask,  # [AC, D]
    weight_ih,  # [S, GATES, D, V]
    weight_hh,  # [S, GATES, D, D]
    bias_ih,  # [S, GATES, D]
    bias_hh,  # [S, GATES, D]
    comm_query,  # [HE, D]
    comm_key,  # [HE, D]
    comm_value,  # [HU, D]
    comm_out,  # [D, HU]
    comm_gate,  # [D, HU]
    comm_bias,  # [D]
    SD: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    AC: tl.constexpr,
    HE: tl.constexpr,
    HU: tl.constexpr,
    GATES: tl.constexpr,
    PAIRS: tl.constexpr,
    QUERY: tl.constexpr,
    COMM_QUERY: tl.constexpr,
    ASK: tl.constexpr,
    READ: tl.constexpr,
    MESSAGE: tl.constexpr,
    UPDATED: tl.constexpr,  # from RIGHT on
    HEARD: tl.constexpr,  # from RIGHT on
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ONE: tl.constexpr = D + V
    b = tl.program_id(0)
    b = share(sums, query, b, QUERY, 0, D, D, WIDTH, BLOCK)
    b = share(sums, ask, b, ASK, 0, AC, D, WIDTH, BLOCK)
    b = share_gates(sums, weight_ih, b, D, V, SD, D, GATES, 3, PAIRS, WIDTH, BLOCK)
    b = share_gates(sums, weight_hh, b, 0, D, SD, D, GATES, 2, PAIRS, WIDTH, BLOCK)
    b = share_gates(sums, bias_ih, b, ONE, 1, SD, D, GATES, 3, PAIRS, WIDTH, BLOCK)
    b = share_gates(sums, bias_hh, b, ONE, 1, SD, D, GATES, 2, PAIRS, WIDTH, BLOCK)
    b = share(sums, comm_query, b, COMM_QUERY, 0, HE, D, WIDTH, BLOCK)
    b = share(sums, comm_key, b, READ, UPDATED, HE, D, WIDTH, BLOCK)
    b = share(sums, comm_value, b, READ + HE, UPDATED, HU, D, WIDTH, BLOCK)
    b = share(sums, comm_out, b, MESSAGE, HEARD, D, HU, WIDTH, BLOCK)
    b = share(sums, comm_gate, b, MESSAGE + D, HEARD, D, HU, WIDTH, BLOCK)
    share(sums, comm_bias, b, MESSAGE + D, ONE, D, 1, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def measure_kernel(
    kept,  # [rows, KEPT], of which from RIGHT on WIDTH are a factor
    powers,  # [rows] scales of the other factor
    largest,  # [WIDTH] gets the largest of each column, times the scales of rows, if it has less
    rows,
    KEPT: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x, _, share = scaled_rows(kept, powers, rows, KEPT, RIGHT, WIDTH, PADDED, BLOCK)
    column = tl.arange(0, PADDED)
    tl.atomic_max(largest + column, tl.max(tl.abs(x) * share[:, None], 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def weigh_kernel(
    kept,
    powers,
    largest,
    out,  # [rows, STRIDE]
    rows,
    KEPT: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gives a factor the scales of the other, but for those of its columns, in 16 bits."""
    x, row, share = scaled_rows(kept, powers, rows, KEPT, RIGHT, WIDTH, PADDED, BLOCK)
    column = tl.arange(0, PADDED)
    most = tl.load(largest + column, mask=column < WIDTH, other=0.0)[None, :]
    x = x * share[:, None] / tl.where(most == 0, 1.0, most)
    inside = (row < rows)[:, None] & (column < STRIDE)[None, :]
    tl.store(out + row[:, None] * STRIDE + column[None, :], x, mask=inside)


@triton.jit
def scaled_rows(
    kept,
    powers,
    rows,
    KEPT: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows, which they are, and their scales"""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(kept + row[:, None] * KEPT + RIGHT + column[None, :], mask=inside, other=0.0)
    return x, row, tl.load(powers + row, mask=row < rows, other=0.0)
