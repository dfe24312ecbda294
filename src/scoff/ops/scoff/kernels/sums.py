"""Weight gradients of the `fused` backend: all of a chunk's products in one launch.

Each is left^T right, a sum over object files of all steps and sequences; the sums of the columns of
`work` and `message`, which are gradients of biases, come with them. A program owns a tile of one
result, of one of several parts of the rows, and adds to it: the order of additions is always the
same.
"""

import triton
import triton.language as tl

from scoff.ops.scoff.kernels.blocks import nearest


@triton.jit
def add_product(
    left,
    right,
    out,
    column_sums,
    tile,
    first_row,
    end_row,
    M: tl.constexpr,
    N: tl.constexpr,
    LEFT_ROW: tl.constexpr,
    RIGHT_ROW: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [M, N] += left [rows, M]^T right [rows, N], one tile of it; left is rounded already"""
    across: tl.constexpr = (N + TILE - 1) // TILE
    m = (tile // across) * TILE + tl.arange(0, TILE)
    n = (tile % across) * TILE + tl.arange(0, TILE)
    r = tl.arange(0, ROWS)
    total = tl.zeros((TILE, TILE), ACC)
    sums = tl.zeros((TILE,), ACC)
    for start in tl.range(first_row, end_row, ROWS, num_stages=3):
        row = (start + r).to(tl.int64)
        here = row < end_row
        a = tl.load(
            left + row[None, :] * LEFT_ROW + m[:, None],
            mask=here[None, :] & (m < M)[:, None],
            other=0.0,
        )
        b = tl.load(
            right + row[:, None] * RIGHT_ROW + n[None, :],
            mask=here[:, None] & (n < N)[None, :],
            other=0.0,
        )
        b = nearest(b, PRECISION)
        total += tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)
        if column_sums is not None:
            sums += tl.sum(a, 1)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = out + m[:, None] * N + n[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)
    if column_sums is not None:
        first = (m < M) & (m * 0 + tile % across == 0)
        before = tl.load(column_sums + m, mask=first, other=0.0)
        tl.store(column_sums + m, before + sums, mask=first)


@triton.jit(do_not_specialize=["rows"])
def sums_kernel(
    work,
    read,
    message,
    d_z,
    h,
    z,
    updated,
    heard,
    seen,
    sum_work_h,
    sum_work_z,
    sum_work,
    sum_read,
    sum_say,
    sum_message,
    sum_value,
    rows,
    SPLITS: tl.constexpr,
    WORK: tl.constexpr,
    GATES: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    A: tl.constexpr,  # input heads; 0: there is no product of theirs
    W: tl.constexpr,
    READ: tl.constexpr,
    SAY: tl.constexpr,
    HEARD: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    d_tiles: tl.constexpr = (D + TILE - 1) // TILE
    tiles_h: tl.constexpr = (WORK + TILE - 1) // TILE * d_tiles
    tiles_z: tl.constexpr = (GATES + TILE - 1) // TILE * ((V + TILE - 1) // TILE)
    part: tl.constexpr = V // A if A > 0 else 1
    tiles_v: tl.constexpr = (part + TILE - 1) // TILE * ((W + TILE - 1) // TILE)
    tiles_r: tl.constexpr = (READ + TILE - 1) // TILE * d_tiles
    split = tl.program_id(1)
    share = (rows + SPLITS - 1) // SPLITS
    start = split * share
    end = tl.minimum(start + share, rows)
    z_tile = tl.program_id(0) - tiles_h
    v_tile = z_tile - tiles_z
    r_tile = v_tile - A * tiles_v
    if z_tile < 0:
        add_product(
            work,
            h,
            sum_work_h + split * WORK * D,
            sum_work + split * WORK,
            tl.program_id(0),
            start,
            end,
            WORK,
            D,
            WORK,
            D,
            TILE,
            ROWS,
            ACC,
            PRECISION,
        )
    elif v_tile < 0:
        add_product(
            work,
            z,
            sum_work_z + split * GATES * V,
            None,
            z_tile,
            start,
            end,
            GATES,
            V,
            WORK,
            V,
            TILE,
            ROWS,
            ACC,
            PRECISION,
        )
    elif r_tile < 0:
        if A > 0:
            a = v_tile // tiles_v
            add_product(
                d_z + a * part,
                seen + a * W,
                sum_value + (split * A + a) * part * W,
                None,
                v_tile % tiles_v,
                start,
                end,
                part,
                W,
                V,
                A * W,
                TILE,
                ROWS,
                ACC,
                PRECISION,
            )
    elif SAY > 0:
        if r_tile < tiles_r:
            add_product(
                read,
                updated,
                sum_read + split * READ * D,
                None,
                r_tile,
                start,
                end,
                READ,
                D,
                READ,
                D,
                TILE,
                ROWS,
                ACC,
                PRECISION,
            )
        else:
            add_product(
                message,
                heard,
                sum_say + split * SAY * HEARD,
                sum_message + split * SAY,
                r_tile - tiles_r,
                start,
                end,
                SAY,
                HEARD,
                SAY,
                HEARD,
                TILE,
                ROWS,
                ACC,
                PRECISION,
            )
