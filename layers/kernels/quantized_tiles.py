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

from spmd.layers import quantized
from spmd.layers.kernels.native import compile_functions
from spmd.layers.kernels.simd import FLOAT, I8, I16, I32, fma, horizontal_sum, i64, pointer, splat
from spmd.layers.kernels.tiles import call_one_of
from spmd.layers.quantized import BLOCK

QUANTIZED_KINDS = {"Q8_0": 3, "Q4_0": 4, "Q4_1": 5}  # numbered after those of simd.py
Q8_0, Q4_0, Q4_1 = (QUANTIZED_KINDS[name] for name in ("Q8_0", "Q4_0", "Q4_1"))
BLOCK_BYTES = {number: quantized.BLOCK_BYTES[name] for name, number in QUANTIZED_KINDS.items()}
MAX_QUANTIZED_ROWS = 4

_HALF = 16  # numbers in each of the two vectors of a block
_BYTES, _SHORTS, _INTS = ir.VectorType(I8, _HALF), ir.VectorType(I16, _HALF), ir.VectorType(I32, 8)
_FLOATS = ir.VectorType(FLOAT, 8)


def _has_pmaddwd() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and bool(llvm.get_host_cpu_features().get("avx2"))


def _filled(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _block(builder: Any, address: Any, kind: int) -> tuple[Any, Any, list[Any]]:
    """Scale, minimum (None for Q8_0) and the 32 integers, two vectors of 16, of the block at `address`."""
    # Four bytes at once: a load of one fp16 would merge into a register and wait for what it held.
    head = builder.load(pointer(builder, address, I32), align=2)
    halves = builder.bitcast(head, ir.VectorType(ir.HalfType(), 2))
    numbers = builder.fpext(halves, ir.VectorType(FLOAT, 2))
    scale = builder.extract_element(numbers, ir.Constant(I32, 0))
    if kind == Q8_0:
        raw = [
            builder.load(pointer(builder, builder.add(address, i64(2 + 16 * part)), _BYTES), align=1)
            for part in range(2)
        ]
        return scale, None, [builder.sext(part, _SHORTS) for part in raw]
    if kind == Q4_1:
        minimum, start = builder.extract_element(numbers, ir.Constant(I32, 1)), 4
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


def _row(builder: Any, start: Any, stride: Any, row: int, step: Any) -> Any:
    return builder.add(builder.add(start, builder.mul(stride, i64(row))), step)


def _eight_bit_body(rows: int) -> Callable[[Any, list[Any]], None]:
    unroll = 4 if rows == 1 else 2  # independent sums, which hide the latency of adding to one

    def emit(builder: Any, args: list[Any]) -> None:
        x, x_stride, scales, scales_stride, w, blocks, out, out_stride = args
        zeros = ir.Constant(_FLOATS, [0.0] * 8)
        sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(rows)] for _ in range(unroll)]

        def add_block(number: Any, into: list[Any]) -> None:
            address = builder.add(w, builder.mul(number, i64(BLOCK_BYTES[Q8_0])))
            scale, _, weights = _block(builder, address, Q8_0)
            for r in range(rows):
                place = _row(builder, x, x_stride, r, builder.mul(number, i64(2 * BLOCK)))
                first, second = (
                    builder.load(pointer(builder, builder.add(place, i64(32 * part)), _SHORTS), align=2)
                    for part in range(2)
                )
                pairs = builder.add(
                    _pair_sums(builder, first, weights[0]), _pair_sums(builder, second, weights[1])
                )
                about = _row(builder, scales, scales_stride, r, builder.mul(number, i64(8)))
                x_scale = builder.load(pointer(builder, about, FLOAT), align=4)
                factor = splat(builder, builder.fmul(scale, x_scale), 8)
                counted = builder.sitofp(pairs, _FLOATS)
                builder.store(fma(builder, counted, factor, builder.load(into[r])), into[r])

        turns = builder.udiv(blocks, i64(unroll))
        with cgutils.for_range(builder, turns) as loop:
            for turn in range(unroll):
                number = builder.add(builder.mul(loop.index, i64(unroll)), i64(turn))
                add_block(number, sums[turn])
        done = builder.mul(turns, i64(unroll))
        with cgutils.for_range(builder, builder.sub(blocks, done)) as loop:
            add_block(builder.add(done, loop.index), sums[0])
        for r in range(rows):
            vector = builder.load(sums[0][r])
            for turn in range(1, unroll):
                vector = builder.fadd(vector, builder.load(sums[turn][r]))
            target = _row(builder, out, out_stride, r, i64(0))
            builder.store(horizontal_sum(builder, vector), pointer(builder, target, FLOAT), align=4)

    return emit


def _four_bit_body(rows: int, kind: int) -> Callable[[Any, list[Any]], None]:
    """Two blocks at a time, one in each half of a vector. Seen as words of 16 bits, a block's bytes hold
    numbers 2k, 2k + 16, 2k + 1 and 2k + 17 in the four bits from bit 0, 4, 8 and 12 on: masks and shifts take
    them apart without widening, and x lies in that order (see `quantize_row`)."""
    unroll = 2 if rows == 1 else 1
    four, head = ir.VectorType(FLOAT, 4), ir.VectorType(ir.HalfType(), 4)

    def emit(builder: Any, args: list[Any]) -> None:
        x, x_stride, scales, scales_stride, w, blocks, out, out_stride = args
        zeros = ir.Constant(_FLOATS, [0.0] * 8)
        sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(rows)] for _ in range(unroll)]
        minima = [
            [cgutils.alloca_once_value(builder, ir.Constant(four, [0.0] * 4)) for _ in range(rows)]
            for _ in range(unroll)
        ]

        def add_pair(number: Any, second: Any, turn: int) -> None:
            """Blocks `2 * number` and, where x has more than zeros for it, the next, at `second`."""
            first = builder.add(w, builder.mul(number, i64(2 * BLOCK_BYTES[kind])))
            heads, halves = [], []
            for address in (first, second):
                heads.append(builder.load(pointer(builder, address, I32), align=2))
                data = builder.add(address, i64(4 if kind == Q4_1 else 2))
                halves.append(builder.load(pointer(builder, data, ir.VectorType(I16, 8)), align=1))
            packed = builder.shuffle_vector(
                halves[0], halves[1], ir.Constant(ir.VectorType(I32, _HALF), list(range(_HALF)))
            )
            mask = _filled(_SHORTS, 15)
            weights = [
                builder.and_(packed, mask),
                builder.and_(builder.lshr(packed, _filled(_SHORTS, 4)), mask),
                builder.and_(builder.lshr(packed, _filled(_SHORTS, 8)), mask),
                builder.lshr(packed, _filled(_SHORTS, 12)),
            ]
            words = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
            for lane, value in enumerate(heads):
                words = builder.insert_element(words, value, ir.Constant(I32, lane))
            # (scale, minimum) of one block, then of the other; Q4_0 has no minimum, it is -8 scales.
            numbers = builder.fpext(builder.bitcast(words, head), four)
            if kind == Q4_0:
                undefined = ir.Constant(four, ir.Undefined)
                doubled = ir.Constant(ir.VectorType(I32, 4), [0, 0, 2, 2])
                numbers = builder.fmul(
                    builder.shuffle_vector(numbers, undefined, doubled), ir.Constant(four, [1.0, -8.0] * 2)
                )
            for r in range(rows):
                place = _row(builder, x, x_stride, r, builder.mul(number, i64(4 * BLOCK)))
                pairs = None
                for part, weight in enumerate(weights):
                    values = builder.load(
                        pointer(builder, builder.add(place, i64(32 * part)), _SHORTS), align=2
                    )
                    products = _pair_sums(builder, values, weight)
                    pairs = products if pairs is None else builder.add(pairs, products)
                about = _row(builder, scales, scales_stride, r, builder.mul(number, i64(16)))
                scaled = builder.fmul(numbers, builder.load(pointer(builder, about, four), align=4))
                minimum, into = minima[turn][r], sums[turn][r]
                builder.store(builder.fadd(scaled, builder.load(minimum)), minimum)
                halves_of = ir.Constant(_INTS, [0] * 4 + [2] * 4)
                factor = builder.shuffle_vector(scaled, ir.Constant(four, ir.Undefined), halves_of)
                counted = builder.sitofp(pairs, _FLOATS)
                builder.store(fma(builder, counted, factor, builder.load(into)), into)

        whole = builder.udiv(blocks, i64(2))
        turns = builder.udiv(whole, i64(unroll))

        def following(number: Any) -> Any:
            after = builder.add(builder.mul(number, i64(2)), i64(1))
            return builder.add(w, builder.mul(after, i64(BLOCK_BYTES[kind])))

        with cgutils.for_range(builder, turns) as loop:
            for turn in range(unroll):
                number = builder.add(builder.mul(loop.index, i64(unroll)), i64(turn))
                add_pair(number, following(number), turn)
        done = builder.mul(turns, i64(unroll))
        with cgutils.for_range(builder, builder.sub(whole, done)) as loop:
            number = builder.add(done, loop.index)
            add_pair(number, following(number), 0)
        with builder.if_then(builder.trunc(builder.and_(blocks, i64(1)), ir.IntType(1))):
            add_pair(whole, builder.add(w, builder.mul(whole, i64(2 * BLOCK_BYTES[kind]))), 0)
        for r in range(rows):
            vector, low = builder.load(sums[0][r]), builder.load(minima[0][r])
            for turn in range(1, unroll):
                vector = builder.fadd(vector, builder.load(sums[turn][r]))
                low = builder.fadd(low, builder.load(minima[turn][r]))
            target = _row(builder, out, out_stride, r, i64(0))
            result = horizontal_sum(builder, vector)
            for lane in (1, 3):
                result = builder.fadd(result, builder.extract_element(low, ir.Constant(I32, lane)))
            builder.store(result, pointer(builder, target, FLOAT), align=4)

    return emit


def _dequantize_body(kind: int) -> Callable[[Any, list[Any]], None]:
    def emit(builder: Any, args: list[Any]) -> None:
        w, blocks, out = args
        floats = ir.VectorType(FLOAT, _HALF)
        with cgutils.for_range(builder, blocks) as loop:
            address = builder.add(w, builder.mul(loop.index, i64(BLOCK_BYTES[kind])))
            scale, minimum, weights = _block(builder, address, kind)
            for part, weight in enumerate(weights):
                values = builder.fmul(builder.sitofp(weight, floats), splat(builder, scale, _HALF))
                if minimum is not None:
                    values = builder.fadd(values, splat(builder, minimum, _HALF))
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

    x: int16 rows; scales: fp32 rows of (scale, sum of the numbers) of each block; both by `quantize_row`.
    """
    return types.void(*[types.int64] * 10), _dot_codegen


@intrinsic
def dequantize_blocks(typingctx: Any, kind: Any, w: Any, blocks: Any, out: Any) -> Any:
    """`blocks` blocks at `w` as fp32 at `out`."""
    return types.void(*[types.int64] * 4), _dequantize_codegen


compile_functions(
    "quantized_tiles",
    {name: (8, _eight_bit_body(r) if k == Q8_0 else _four_bit_body(r, k)) for (k, r), name in _DOTS.items()}
    | {name: (3, _dequantize_body(k)) for (k,), name in _COPIES.items()},
)
