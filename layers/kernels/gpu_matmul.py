"""Products with weights of 16 or 8 bits, limited by reading the weights (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd.layers.kernels.fp8 import Fp8Weight


@triton.jit
def e4m3(bits: tl.tensor) -> tl.tensor:
    """fp32 numbers of float8_e4m3fn ones given as uint8.

    By shifts into fp16, whose exponent has one more bit and a bias 8 higher: exact, subnormal numbers
    included, and for cards that have no such type (before sm_89) as well.
    """
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def few_rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    FP8: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Program (part): COLUMNS results of each of ROWS rows, 1 to 4. A row's sums stay spread over the
    threads until the end, so nothing is exchanged while weights come in."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    base = weight + column.to(tl.int64)[:, None] * weight_stride
    sums0 = tl.zeros([COLUMNS, INNER], tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    for start in range(0, inner, INNER):
        place = start + tl.arange(0, INNER)
        inside = place < inner
        w = tl.load(
            base + place[None, :],
            mask=there[:, None] & inside[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        if FP8:
            w = e4m3(w)
        w = w.to(tl.float32)
        sums0 += w * tl.load(x + place, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ROWS > 1:
            sums1 += w * tl.load(x + x_stride + place, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ROWS > 2:
            sums2 += w * tl.load(x + 2 * x_stride + place, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ROWS > 3:
            sums3 += w * tl.load(x + 3 * x_stride + place, mask=inside, other=0.0).to(tl.float32)[None, :]
    store_sums(sums0, scale, bias, out, column, there, FP8, BIAS)
    if ROWS > 1:
        store_sums(sums1, scale, bias, out + out_stride, column, there, FP8, BIAS)
    if ROWS > 2:
        store_sums(sums2, scale, bias, out + 2 * out_stride, column, there, FP8, BIAS)
    if ROWS > 3:
        store_sums(sums3, scale, bias, out + 3 * out_stride, column, there, FP8, BIAS)


@triton.jit
def store_sums(
    sums: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    column: tl.tensor,
    there: tl.tensor,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """out[column] = the sum of each row of `sums` `[columns, inner]`, scaled, plus bias."""
    result = tl.sum(sums, axis=1)
    if SCALED:
        result *= tl.load(scale + column, mask=there, other=0.0)
    if BIAS:
        result += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def fp8_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Program (part of the columns, part of the rows): weights widened to x's dtype on their way to tl.dot,
    which loses nothing."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    base = weight + column.to(tl.int64)[:, None] * weight_stride
    source = x + row.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, INNER):
        place = start + tl.arange(0, INNER)
        inside = (place < inner)[None, :]
        a = tl.load(source + place[None, :], mask=(row < rows)[:, None] & inside, other=0.0)
        w = e4m3(tl.load(base + place[None, :], mask=(column < columns)[:, None] & inside, other=0))
        sums = tl.dot(a, tl.trans(w.to(a.dtype)), sums, input_precision="ieee")
    there = column < columns
    sums *= tl.load(scale + column, mask=there, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & there[None, :])


def few_rows_shape(rows: int, inner: int) -> tuple[int, int]:
    """Columns and inner numbers a program of 4 warps has at a time: 32 weights a thread, or as many as leave
    registers for the sums of 3 or 4 rows."""
    width = min(1024 if rows <= 2 else 512, triton.next_power_of_2(inner))
    return max(1, (4096 if rows <= 2 else 2048) // width), width


def few_rows(x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None, out: Tensor) -> None:
    """out `[rows, out]` = x `[rows, in]` @ weight.T + bias for 1 to 4 rows."""
    rows, inner = x.shape
    if isinstance(weight, Fp8Weight):
        matrix, scale = weight.weight.view(torch.uint8), weight.scale
    else:
        matrix, scale = weight, x
    x = x if x.stride(1) == 1 else x.contiguous()
    columns, width = few_rows_shape(rows, inner)
    few_rows_kernel[(triton.cdiv(out.shape[1], columns),)](
        x,
        matrix,
        scale,
        x if bias is None else bias,
        out,
        out.shape[1],
        inner,
        x.stride(0),
        matrix.stride(0),
        out.stride(0),
        ROWS=rows,
        FP8=isinstance(weight, Fp8Weight),
        BIAS=bias is not None,
        COLUMNS=columns,
        INNER=width,
        num_warps=4,
    )


def many_rows_shape(rows: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile of results, and its warps."""
    if rows <= 16:
        return 16, 32, 4
    return (32, 64, 4) if rows <= 32 else (64, 128, 8)


def fp8_many_rows(x: Tensor, weight: Fp8Weight, bias: Tensor | None, out: Tensor) -> None:
    """out `[rows, out]` = x `[rows, in]` @ weight.T + bias for any number of rows."""
    rows, inner = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    matrix = weight.weight.view(torch.uint8)
    tile_rows, columns, warps = many_rows_shape(rows)
    grid = (triton.cdiv(out.shape[1], columns), triton.cdiv(rows, tile_rows))
    fp8_kernel[grid](
        x,
        matrix,
        weight.scale,
        x if bias is None else bias,
        out,
        rows,
        out.shape[1],
        inner,
        x.stride(0),
        matrix.stride(0),
        out.stride(0),
        BIAS=bias is not None,
        ROWS=tile_rows,
        COLUMNS=columns,
        INNER=128,
        num_warps=warps,
        num_stages=3,
    )
