"""Products with weights in blocks of 32 (Q8_0, Q4_0, Q4_1), as stored, widened in registers (Triton).

Blocks are 34, 18 or 20 bytes, so a thread reads 16-bit words, which they are whole numbers of. A word holds
two or four weights that belong to different inner places; each of those meets its own part of x, so nothing
is ever put in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd.layers.kernels.gpu_matmul import many_rows_shape, store_sums
from spmd.layers.quantized import BLOCK_BYTES, QuantizedTensor

KINDS = {"Q8_0": 0, "Q4_0": 1, "Q4_1": 2}
Q8_0, Q4_0, Q4_1 = (tl.constexpr(number) for number in range(3))


@triton.jit
def load_words(
    blocks: tl.tensor,
    column: tl.tensor,
    there: tl.tensor,
    word: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    KIND: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
) -> tl.tensor:
    """Words `word` int32 `[words]` (numbers alone counted) of rows `column`, with scale and minimum of the
    block of each: uint32 numbers, and fp32, all `[columns, words]`. Zeros outside."""
    HEADER: tl.constexpr = 2 if KIND == Q4_1 else 1
    PER_BLOCK: tl.constexpr = BLOCK_WORDS - HEADER
    row = blocks + column.to(tl.int64)[:, None] * stride
    head = (word // PER_BLOCK * BLOCK_WORDS)[None, :]
    valid = there[:, None] & inside[None, :]
    place = row + head + (word % PER_BLOCK + HEADER)[None, :]
    numbers = tl.load(place, mask=valid, other=0, eviction_policy="evict_first")
    scale = tl.load(row + head, mask=valid, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    low = scale
    if KIND == Q4_1:
        low = tl.load(row + head + 1, mask=valid, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == Q4_0:
        low = -8.0 * scale
    return numbers.to(tl.int32), scale, low


@triton.jit
def number(words: tl.tensor, PART: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """The words' number in place PART, fp32: 0 and 1 are low and high byte, or their low halves, and 2 and 3
    their high halves."""
    if KIND == Q8_0:
        return ((words << (24 - 8 * PART)) >> 24).to(tl.float32)
    return ((words >> (8 * (PART % 2) + 4 * (PART // 2))) & 15).to(tl.float32)


@triton.jit
def x_place(word: tl.tensor, PART: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """The inner place of that number."""
    if KIND == Q8_0:
        return 2 * word + PART
    return word // 8 * 32 + word % 8 * 2 + PART % 2 + 16 * (PART // 2)


@triton.jit
def row_sums(
    x: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    word: tl.tensor,
    inside: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:
    """fp32 `[columns, words]`: what each word adds to the product with one row of x."""
    PARTS: tl.constexpr = 2 if KIND == Q8_0 else 4
    products = tl.zeros(words.shape, tl.float32)
    plain = tl.zeros(word.shape, tl.float32)
    for part in tl.static_range(PARTS):
        a = tl.load(x + x_place(word, part, KIND), mask=inside, other=0.0).to(tl.float32)
        products += number(words, part, KIND) * a[None, :]
        plain += a
    if KIND == Q8_0:
        return products * scale
    return products * scale + plain[None, :] * low


@triton.jit
def blocks_few_rows_kernel(
    x: tl.tensor,
    blocks: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    num_words: tl.tensor,
    x_stride: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Program (part): COLUMNS results of each of ROWS rows, 1 to 4; see `gpu_matmul.few_rows_kernel`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    sums0 = tl.zeros([COLUMNS, WORDS], tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    for start in range(0, num_words, WORDS):
        word = start + tl.arange(0, WORDS)
        inside = word < num_words
        words, scale, low = load_words(blocks, column, there, word, inside, stride, KIND, BLOCK_WORDS)
        sums0 += row_sums(x, words, scale, low, word, inside, KIND)
        if ROWS > 1:
            sums1 += row_sums(x + x_stride, words, scale, low, word, inside, KIND)
        if ROWS > 2:
            sums2 += row_sums(x + 2 * x_stride, words, scale, low, word, inside, KIND)
        if ROWS > 3:
            sums3 += row_sums(x + 3 * x_stride, words, scale, low, word, inside, KIND)
    store_sums(sums0, bias, bias, out, column, there, False, BIAS)
    if ROWS > 1:
        store_sums(sums1, bias, bias, out + out_stride, column, there, False, BIAS)
    if ROWS > 2:
        store_sums(sums2, bias, bias, out + 2 * out_stride, column, there, False, BIAS)
    if ROWS > 3:
        store_sums(sums3, bias, bias, out + 3 * out_stride, column, there, False, BIAS)


@triton.jit
def blocks_kernel(
    x: tl.tensor,
    blocks: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_words: tl.tensor,
    x_stride: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    KIND: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Program (part of the columns, part of the rows): weights rounded to x's dtype before tl.dot."""
    PARTS: tl.constexpr = 2 if KIND == Q8_0 else 4
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = column < columns
    source = x + row.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_words, WORDS):
        word = start + tl.arange(0, WORDS)
        inside = word < num_words
        words, scale, low = load_words(blocks, column, there, word, inside, stride, KIND, BLOCK_WORDS)
        for part in tl.static_range(PARTS):
            place = x_place(word, part, KIND)
            a = tl.load(source + place[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
            w = number(words, part, KIND) * scale
            if KIND != Q8_0:
                w += low
            sums = tl.dot(a, tl.trans(w.to(a.dtype)), sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & there[None, :])


def words_shape(rows: int, num_words: int) -> tuple[int, int]:
    """Columns and words a program of 4 warps has at a time: 16 words a thread, 8 for 3 or 4 rows."""
    width = min(512 if rows <= 2 else 256, triton.next_power_of_2(num_words))
    return max(1, (2048 if rows <= 2 else 1024) // width), width


def blocks_few_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, out: Tensor) -> None:
    """out `[rows, out]` = x `[rows, in]` @ weight.T + bias for 1 to 4 rows."""
    x = x if x.stride(1) == 1 else x.contiguous()
    matrix, num_words = _words(weight)
    columns, width = words_shape(x.shape[0], num_words)
    blocks_few_rows_kernel[(triton.cdiv(out.shape[1], columns),)](
        x,
        matrix,
        x if bias is None else bias,
        out,
        out.shape[1],
        num_words,
        x.stride(0),
        matrix.stride(0),
        out.stride(0),
        ROWS=x.shape[0],
        KIND=KINDS[weight.kind],
        BLOCK_WORDS=BLOCK_BYTES[weight.kind] // 2,
        BIAS=bias is not None,
        COLUMNS=columns,
        WORDS=width,
        num_warps=4,
    )


def blocks_many_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, out: Tensor) -> None:
    """out `[rows, out]` = x `[rows, in]` @ weight.T + bias for any number of rows."""
    x = x if x.stride(1) == 1 else x.contiguous()
    matrix, num_words = _words(weight)
    rows, columns, warps = many_rows_shape(x.shape[0])
    grid = (triton.cdiv(out.shape[1], columns), triton.cdiv(x.shape[0], rows))
    blocks_kernel[grid](
        x,
        matrix,
        x if bias is None else bias,
        out,
        x.shape[0],
        out.shape[1],
        num_words,
        x.stride(0),
        matrix.stride(0),
        out.stride(0),
        KIND=KINDS[weight.kind],
        BLOCK_WORDS=BLOCK_BYTES[weight.kind] // 2,
        BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
        WORDS=32,
        num_warps=warps,
        num_stages=2,
    )


def _words(weight: QuantizedTensor) -> tuple[Tensor, int]:
    """The blocks as 16-bit words, and the number of words in a row that hold numbers."""
    per_block = 16 if weight.kind == "Q8_0" else 8
    return weight.blocks.view(torch.int16), weight.shape[1] // 32 * per_block
