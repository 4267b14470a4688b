"""Rows times stored weights on CPU cores: near the memory's speed for few rows, the arithmetic's for many."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from spmd.layers.kernels.quantized_tiles import (
    BLOCK_BYTES,
    MAX_QUANTIZED_ROWS,
    Q4_0,
    Q4_1,
    Q8_0,
    dequantize_blocks,
    quantized_dot,
)
from spmd.layers.kernels.simd import FLOAT16, FLOAT32, f32_pointer, i16_pointer, load_i64, prefetch
from spmd.layers.kernels.tiles import COLUMNS, MAX_ROWS, dot_tile
from spmd.layers.quantized import BLOCK

STREAMED_ROWS = 2  # up to here weights are read as one stream, which hardware prefetchers follow best
STREAMED_INNER = 4096  # x of one row must stay in the first-level cache beside the stream
INTEGER_ROWS = 16  # up to here quantized weights are multiplied as integers
BLOCK_COLUMNS = 16  # rows of the weights brought into cache together
BLOCK_INNER = 2048
PART_BYTES = 384 << 10  # of x: rows multiplied with all weights before the next ones
COPIED = 4608  # numbers of quantized weights that are copied as fp32 at a time
_LINE = 64
_Q8_0_BYTES, _Q4_0_BYTES, _Q4_1_BYTES = (BLOCK_BYTES[kind] for kind in (Q8_0, Q4_0, Q4_1))


@njit(nogil=True, cache=True)
def matmul_scratch_bytes(inner: int) -> int:
    """Memory one thread needs for a product of `inner` columns with quantized weights."""
    pairs = inner // (2 * BLOCK) + 1
    return max(4 * BLOCK_COLUMNS * BLOCK_INNER, INTEGER_ROWS * pairs * 2 * (2 * BLOCK + 8))


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
    scratch: int,
) -> int:
    """out[r, c] = sum over k of x[r, k] * w[c, k] for columns `first` <= c < `last` of out.

    x and out: addresses of fp32 rows; w: of rows of `kind`; strides in bytes. scratch:
    `matmul_scratch_bytes(k)` bytes of this thread's. The return value means nothing.
    """
    if k == 0:
        for r in range(rows):
            row = carray(f32_pointer(out + r * out_stride), last)
            for c in range(first, last):
                row[c] = 0
        return 0
    if kind > FLOAT16 and rows <= INTEGER_ROWS:
        _multiply_integers(kind, x, x_stride, rows, w, w_stride, first, last, k, out, out_stride, scratch)
        return 0
    if rows <= STREAMED_ROWS and k <= STREAMED_INNER and kind <= FLOAT16:
        for c in range(first, last):
            dot_tile(kind, rows, 1, x, x_stride, w + c * w_stride, w_stride, k, out + 4 * c, out_stride, 0)
        return 0
    # Rows of x in parts that stay in the second-level cache while all the weights pass by.
    width = min(k, BLOCK_INNER)
    parts = (rows * width * 4 + PART_BYTES - 1) // PART_BYTES
    touched, r0 = 0, 0
    for part in range(parts):
        r1 = rows * (part + 1) // parts
        x_part, out_part = x + r0 * x_stride, out + r0 * out_stride
        touched |= _multiply_part(
            kind, x_part, x_stride, r1 - r0, w, w_stride, first, last, k, out_part, out_stride, scratch
        )
        r0 = r1
    return touched


@njit(nogil=True, cache=True)
def _multiply_part(
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
    scratch: int,
) -> int:
    item = 4 if kind == FLOAT32 else 2
    block_bytes = _Q8_0_BYTES if kind == Q8_0 else _Q4_0_BYTES if kind == Q4_0 else _Q4_1_BYTES
    touched = 0
    blocks = (rows + MAX_ROWS - 1) // MAX_ROWS
    for k0 in range(0, k, BLOCK_INNER):
        inner = min(BLOCK_INNER, k - k0)
        at_once, segment, start = BLOCK_COLUMNS, inner * item, w + item * k0
        if kind > FLOAT16:  # the fp32 copies should stay in the first-level cache
            at_once = max(COLUMNS, min(BLOCK_COLUMNS, COPIED // inner // COLUMNS * COLUMNS))
            segment, start = inner // BLOCK * block_bytes, w + k0 // BLOCK * block_bytes
        for c0 in range(first, last, at_once):
            columns = min(at_once, last - c0)
            tile_kind, w_block, step = kind, start + c0 * w_stride, w_stride
            if kind > FLOAT16:
                tile_kind, w_block, step = FLOAT32, scratch, 4 * BLOCK_INNER
                for c in range(columns):
                    source = start + (c0 + c) * w_stride
                    dequantize_blocks(kind, source, inner // BLOCK, scratch + c * step)
            elif c0 == first:
                # Tiles read several rows of the weights at once, too many streams for the prefetchers: bring
                # the block into cache in order first, ...
                for c in range(columns):
                    for place in range(0, segment - 7, _LINE):
                        touched |= load_i64(w_block + c * w_stride + place)
            # ... and the next one while this one is multiplied.
            next_rows = min(at_once, last - c0 - columns)
            next_row, next_place = start + (c0 + columns) * w_stride, 0
            tiles = blocks * ((columns + COLUMNS - 1) // COLUMNS)
            a_tile = (next_rows * ((segment + _LINE - 1) // _LINE) + tiles - 1) // tiles
            r0 = 0
            for block in range(blocks):
                r1 = rows * (block + 1) // blocks
                x_block = x + r0 * x_stride + 4 * k0
                out_block = out + r0 * out_stride + 4 * c0
                paired = columns - columns % COLUMNS
                for c in range(0, paired, COLUMNS):
                    for _ in range(a_tile):
                        if next_rows > 0:
                            prefetch(next_row + next_place)
                            next_place += _LINE
                            if next_place >= segment:
                                next_rows, next_row, next_place = next_rows - 1, next_row + w_stride, 0
                    w_row, place = w_block + c * step, out_block + 4 * c
                    dot_tile(
                        tile_kind,
                        r1 - r0,
                        COLUMNS,
                        x_block,
                        x_stride,
                        w_row,
                        step,
                        inner,
                        place,
                        out_stride,
                        k0,
                    )
                for c in range(paired, columns):
                    for r in range(r1 - r0):
                        x_row, place = x_block + r * x_stride, out_block + r * out_stride + 4 * c
                        dot_tile(
                            tile_kind,
                            1,
                            1,
                            x_row,
                            x_stride,
                            w_block + c * step,
                            step,
                            inner,
                            place,
                            out_stride,
                            k0,
                        )
                r0 = r1
    return touched


@njit(nogil=True, cache=True)
def _multiply_integers(
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
    scratch: int,
) -> None:
    blocks = k // BLOCK
    paired = blocks + blocks % 2
    row_bytes, scale_bytes = 2 * BLOCK * paired, 8 * paired
    scales = scratch + rows * row_bytes
    for r in range(rows):
        quantize_row(kind, x + r * x_stride, blocks, scratch + r * row_bytes, scales + r * scale_bytes)
    for c in range(first, last):
        for r in range(0, rows, MAX_QUANTIZED_ROWS):
            count = min(MAX_QUANTIZED_ROWS, rows - r)
            place = out + r * out_stride + 4 * c
            x_rows, x_scales = scratch + r * row_bytes, scales + r * scale_bytes
            w_row = w + c * w_stride
            quantized_dot(
                kind, count, x_rows, row_bytes, x_scales, scale_bytes, w_row, blocks, place, out_stride
            )


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def quantize_row(kind: int, x: int, blocks: int, out: int, scales: int) -> None:
    """fp32 numbers as int16 against the largest of each block, with (scale, sum) of each block in fp32.

    For 4-bit kinds, numbers lie as the kernel takes them: of two blocks, the 8 numbers 0, 2, ... 14 of the
    first and of the second, then those from 16, from 1 and from 17 on; zeros follow an odd block.
    A block with a NaN or an infinity gets NaNs for scale and sum, so results show it.
    """
    paired = blocks + blocks % 2
    numbers, rounded = carray(f32_pointer(x), blocks * BLOCK), carray(i16_pointer(out), paired * BLOCK)
    about = carray(f32_pointer(scales), 2 * paired)
    for b in range(blocks):
        start = b * BLOCK
        largest = np.float32(0)
        total = np.float32(0)
        for i in range(BLOCK):
            largest = max(largest, abs(numbers[start + i]))
            total += numbers[start + i]
        usable = largest > 0 and largest < np.float32(3.4e38) and total == total
        inverse = np.float32(32767) / largest if usable else np.float32(0)
        if kind == Q8_0:
            for i in range(BLOCK):
                rounded[start + i] = (
                    np.int16(np.int32(np.rint(numbers[start + i] * inverse))) if usable else 0
                )
        else:
            place = start // (2 * BLOCK) * (2 * BLOCK) + start % (2 * BLOCK) // BLOCK * 8
            for quarter in range(4):
                first = start + quarter % 2 * 16 + quarter // 2
                for i in range(8):
                    value = np.int16(np.int32(np.rint(numbers[first + 2 * i] * inverse))) if usable else 0
                    rounded[place + quarter * 16 + i] = value
        about[2 * b] = largest / np.float32(32767) if usable else np.float32(0)
        about[2 * b + 1] = total
        if not usable and not (largest == 0 and total == 0):
            about[2 * b] = np.float32(np.nan)
            about[2 * b + 1] = np.float32(np.nan)
    if paired > blocks and kind != Q8_0:
        about[2 * blocks] = about[2 * blocks + 1] = np.float32(0)
        place = (blocks - 1) * BLOCK + 8
        for quarter in range(4):
            for i in range(8):
                rounded[place + quarter * 16 + i] = 0
