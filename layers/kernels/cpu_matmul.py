"""Rows times stored weights on CPU cores: near the memory's speed for few rows, the arithmetic's for many."""

from __future__ import annotations

from numba import carray, njit

from spmd.layers.kernels.simd import FLOAT32, f32_pointer, load_i64
from spmd.layers.kernels.tiles import COLUMNS, MAX_ROWS, dot_tile

STREAMED_ROWS = 2  # up to here weights are read as one stream, which hardware prefetchers follow best
STREAMED_INNER = 4096  # x of one row must stay in the first-level cache beside the stream
BLOCK_COLUMNS = 16  # rows of the weights brought into cache together
BLOCK_INNER = 2048
_LINE = 64


@njit(nogil=True, cache=True)
def matmul_columns(
    kind: int,
    x: int,
    x_stride: int,
    rows: int,
    w: int,
    w_stride: int,
    first: int,
    last: int,
    k: int,
    out: int,
    out_stride: int,
) -> int:
    """out[r, c] = sum over k of x[r, k] * w[c, k] for columns `first` <= c < `last` of out.

    x and out: addresses of fp32 rows; w: of rows of `kind`; strides in bytes. The return value means nothing.
    """
    item = 4 if kind == FLOAT32 else 2
    if k == 0:
        for r in range(rows):
            row = carray(f32_pointer(out + r * out_stride), last)
            for c in range(first, last):
                row[c] = 0
        return 0
    if rows <= STREAMED_ROWS and k <= STREAMED_INNER:
        for c in range(first, last):
            dot_tile(kind, rows, 1, x, x_stride, w + c * w_stride, w_stride, k, out + 4 * c, out_stride, 0)
        return 0
    touched = 0
    blocks = (rows + MAX_ROWS - 1) // MAX_ROWS
    for k0 in range(0, k, BLOCK_INNER):
        inner = min(BLOCK_INNER, k - k0)
        for c0 in range(first, last, BLOCK_COLUMNS):
            columns = min(BLOCK_COLUMNS, last - c0)
            # Tiles read several rows of the weights at once, too many streams for the prefetchers: bring
            # the block into cache in order first.
            if inner == k:
                start = w + c0 * w_stride
                for place in range(0, columns * w_stride - 7, _LINE):
                    touched |= load_i64(start + place)
            else:
                for c in range(columns):
                    start = w + (c0 + c) * w_stride + item * k0
                    for place in range(0, inner * item - 7, _LINE):
                        touched |= load_i64(start + place)
            r0 = 0
            for block in range(blocks):
                r1 = rows * (block + 1) // blocks
                x_block = x + r0 * x_stride + 4 * k0
                w_block, out_block = w + c0 * w_stride + item * k0, out + r0 * out_stride + 4 * c0
                paired = columns - columns % COLUMNS
                for c in range(0, paired, COLUMNS):
                    w_row, place = w_block + c * w_stride, out_block + 4 * c
                    dot_tile(
                        kind,
                        r1 - r0,
                        COLUMNS,
                        x_block,
                        x_stride,
                        w_row,
                        w_stride,
                        inner,
                        place,
                        out_stride,
                        k0,
                    )
                for c in range(paired, columns):
                    for r in range(r1 - r0):
                        x_row, place = x_block + r * x_stride, out_block + r * out_stride + 4 * c
                        w_row = w_block + c * w_stride
                        dot_tile(kind, 1, 1, x_row, x_stride, w_row, w_stride, inner, place, out_stride, k0)
                r0 = r1
    return touched
