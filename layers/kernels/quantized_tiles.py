"""Inner loops over weights stored as blocks of 32 numbers with a scale: GGUF's Q8_0, Q4_0 and Q4_1.

Few rows are multiplied in integers: x is rounded to 16 bits against the largest number of its block of 32,
fine enough that results differ from fp32 arithmetic by about 1e-5, and sums of products are exact. Many rows
go through fp32 copies of blocks of weights.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from spmd.layers.kernels import simd
from spmd.layers.kernels.native import compile_functions
from spmd.layers.kernels.simd import FLOAT, I8, I16, I32, i64, pointer
from spmd.layers.kernels.tiles import call_one_of

BLOCK = 32  # numbers with one scale
Q8_0, Q4_0, Q4_1 = 3, 4, 5  # kinds, after those of simd.py
QUANTIZED_KINDS = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1}
BLOCK_BYTES = {Q8_0: 34, Q4_0: 18, Q4_1: 20}
MAX_QUANTIZED_ROWS = 4

_HALF = 16  # numbers in each of the two vectors of a block
_BYTES, _SHORTS, _INTS = ir.VectorType(I8, _HALF), ir.VectorType(I16, _HALF), ir.VectorType(I32, 8)
_FLOATS = ir.VectorType(FLOAT, 8)


def _has_pmaddwd() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and bool(llvm.get_host_cpu_features().get("avx2"))


def _filled(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _number(builder: Any, address: Any) -> Any:
    """The fp16 at `address` as fp32."""
    half = builder.load(pointer(builder, address, ir.HalfType()), align=2)
    return builder.fpext(half, FLOAT)


def _block(builder: Any, address: Any, kind: int) -> tuple[Any, Any, list[Any]]:
    """Scale, minimum (None for Q8_0) and the 32 integers, two vectors of 16, of the block at `address`."""
    scale = _number(builder, address)
    if kind == Q8_0:
        raw = [
            builder.load(pointer(builder, builder.add(address, i64(2 + 16 * part)), _BYTES), align=1)
            for part in range(2)
        ]
        return scale, None, [builder.sext(part, _SHORTS) for part in raw]
    if kind == Q4_1:
        minimum, start = _number(builder, builder.add(address, i64(2))), 4
    else:
        minimum, start = builder.fmul(scale, ir.Constant(FLOAT, -8.0)), 2
    packed = builder.load(pointer(builder, builder.add(address, i64(start)), _BYTES), align=1)
    low = builder.and_(packed, _filled(_BYTES, 15))
    high = builder.lshr(packed, _filled(_BYTES, 4))
    return scale, minimum, [builder.zext(low, _SHORTS), builder.zext(high, _SHORTS)]


def _pair_sums(builder: Any, a: Any, b: Any) -> Any:
    """a[2i] * b[2i] + a[2i + 1] * b[2i + 1] as int32, for 16 int16 each."""
    if _has_pmaddwd():
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_INTS, [_SHORTS, _SHORTS]), "llvm.x86.avx2.pmadd.wd"
        )
        return builder.call(function, [a, b])
    wide = ir.VectorType(I32, _HALF)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    undefined = ir.Constant(wide, ir.Undefined)
    even, odd = (ir.Constant(_INTS, list(range(first, _HALF, 2))) for first in (0, 1))
    return builder.add(
        builder.shuffle_vector(products, undefined, even), builder.shuffle_vector(products, undefined, odd)
    )


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.v8f32" if isinstance(a.type, ir.VectorType) else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def _spread(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * 8))


def _total(builder: Any, vector: Any) -> Any:
    total = builder.extract_element(vector, ir.Constant(I32, 0))
    for lane in range(1, 8):
        total = builder.fadd(total, builder.extract_element(vector, ir.Constant(I32, lane)))
    return total


def _dot_body(rows: int, kind: int) -> Callable[[Any, list[Any]], None]:
    def emit(builder: Any, args: list[Any]) -> None:
        x, x_stride, scales, scales_stride, w, blocks, out, out_stride = args
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * 8)) for _ in range(rows)]
        minima = [cgutils.alloca_once_value(builder, ir.Constant(FLOAT, 0.0)) for _ in range(rows)]
        with cgutils.for_range(builder, blocks) as loop:
            address = builder.add(w, builder.mul(loop.index, i64(BLOCK_BYTES[kind])))
            scale, minimum, weights = _block(builder, address, kind)
            for r in range(rows):
                place = builder.add(
                    builder.add(x, builder.mul(x_stride, i64(r))), builder.mul(loop.index, i64(2 * BLOCK))
                )
                pairs = None
                for part, weight in enumerate(weights):
                    values = builder.load(
                        pointer(builder, builder.add(place, i64(32 * part)), _SHORTS), align=2
                    )
                    products = _pair_sums(builder, values, weight)
                    pairs = products if pairs is None else builder.add(pairs, products)
                about = builder.add(
                    builder.add(scales, builder.mul(scales_stride, i64(r))), builder.mul(loop.index, i64(8))
                )
                x_scale = builder.load(pointer(builder, about, FLOAT), align=4)
                factor = _spread(builder, builder.fmul(scale, x_scale))
                counted = builder.sitofp(pairs, _FLOATS)
                builder.store(_fma(builder, counted, factor, builder.load(sums[r])), sums[r])
                if minimum is not None:
                    x_sum = builder.load(pointer(builder, builder.add(about, i64(4)), FLOAT), align=4)
                    builder.store(_fma(builder, minimum, x_sum, builder.load(minima[r])), minima[r])
        for r in range(rows):
            result = builder.fadd(_total(builder, builder.load(sums[r])), builder.load(minima[r]))
            target = builder.add(out, builder.mul(out_stride, i64(r)))
            builder.store(result, pointer(builder, target, FLOAT), align=4)

    return emit


def _dequantize_body(kind: int) -> Callable[[Any, list[Any]], None]:
    def emit(builder: Any, args: list[Any]) -> None:
        w, blocks, out = args
        floats = ir.VectorType(FLOAT, _HALF)
        with cgutils.for_range(builder, blocks) as loop:
            address = builder.add(w, builder.mul(loop.index, i64(BLOCK_BYTES[kind])))
            scale, minimum, weights = _block(builder, address, kind)
            undefined = ir.Constant(floats, ir.Undefined)
            everywhere = ir.Constant(ir.VectorType(I32, _HALF), [0] * _HALF)

            def spread(scalar: Any) -> Any:
                first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
                return builder.shuffle_vector(first, undefined, everywhere)

            for part, weight in enumerate(weights):
                values = builder.fmul(builder.sitofp(weight, floats), spread(scale))
                if minimum is not None:
                    values = builder.fadd(values, spread(minimum))
                offset = builder.add(builder.mul(loop.index, i64(4 * BLOCK)), i64(4 * _HALF * part))
                builder.store(values, pointer(builder, builder.add(out, offset), floats), align=4)

    return emit


_DOTS = {(k, r): f"spmd_quantized_dot_{k}_{r}" for k in BLOCK_BYTES for r in range(1, MAX_QUANTIZED_ROWS + 1)}
_COPIES = {(k,): f"spmd_dequantize_{k}" for k in BLOCK_BYTES}


def _dot_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    call_one_of(builder, _DOTS, args[:2], args[2:])
    return context.get_dummy_value()


def _dequantize_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    call_one_of(builder, _COPIES, args[:1], args[1:])
    return context.get_dummy_value()


@intrinsic
def quantized_dot(
    typingctx: Any,
    kind: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    scales: Any,
    scales_stride: Any,
    w: Any,
    blocks: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[r] = x[r] . w for 1 to MAX_QUANTIZED_ROWS rows of x and one row of `blocks` blocks of w.

    x: int16 rows; scales: fp32 rows of (scale, sum of the numbers) of each block, made by `quantize_row`.
    """
    return types.void(*[types.int64] * 10), _dot_codegen


@intrinsic
def dequantize_blocks(typingctx: Any, kind: Any, w: Any, blocks: Any, out: Any) -> Any:
    """`blocks` blocks at `w` as fp32 at `out`."""
    return types.void(*[types.int64] * 4), _dequantize_codegen


compile_functions(
    "quantized_tiles",
    [__file__, simd.__file__],
    {name: (8, _dot_body(r, k)) for (k, r), name in _DOTS.items()}
    | {name: (3, _dequantize_body(k)) for (k,), name in _COPIES.items()},
)
