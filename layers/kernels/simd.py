"""LLVM building blocks of the CPU kernels: vectors of the host's width, conversions, scalars in memory.

Kernels take addresses, as `Tensor.data_ptr()` gives them, and strides in bytes: calling them costs next to
nothing, and no pointer is checked. `kind` numbers the types that weights and cache entries may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

import spmd.layers.kernels.cache  # noqa: F401 (before any kernel is defined)

FLOAT = ir.FloatType()
I1, I8, I16, I32, I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
STORAGE = {FLOAT32: FLOAT, BFLOAT16: I16, FLOAT16: ir.HalfType()}
ITEM_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}


def _host_lanes() -> int:
    features = llvm.get_host_cpu_features()
    return 16 if features.get("avx512f") and features.get("avx512bw") else 8


LANES = _host_lanes()  # fp32 numbers in one vector: 16 with AVX-512, 8 elsewhere
VECTOR = ir.VectorType(FLOAT, LANES)
ZERO_VECTOR = ir.Constant(VECTOR, [0.0] * LANES)


def i64(value: int) -> Any:
    return ir.Constant(I64, value)


def pointer(builder: Any, address: Any, element: Any) -> Any:
    """`address` (i64) as a pointer to `element`."""
    return builder.inttoptr(address, element.as_pointer())


def widen(builder: Any, raw: Any, kind: int) -> Any:
    """What was loaded as `kind`, a scalar or a vector, as fp32."""
    count = raw.type.count if isinstance(raw.type, ir.VectorType) else 0

    def shaped(element: Any) -> Any:
        return ir.VectorType(element, count) if count else element

    if kind == FLOAT32:
        return raw
    if kind == FLOAT16:
        return builder.fpext(raw, shaped(FLOAT))
    sixteen = ir.Constant(shaped(I32), [16] * count if count else 16)
    return builder.bitcast(builder.shl(builder.zext(raw, shaped(I32)), sixteen), shaped(FLOAT))


def load_wide(builder: Any, address: Any, kind: int, vector: bool = True) -> Any:
    """One vector (or one number) of `kind` at `address`, unaligned, as fp32."""
    element = STORAGE[kind]
    memory = ir.VectorType(element, LANES) if vector else element
    raw = builder.load(pointer(builder, address, memory), align=1 if vector else ITEM_BYTES[kind])
    return widen(builder, raw, kind)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; fp32 numbers or vectors of them."""
    name = f"llvm.fma.v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def horizontal(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """The lanes combined to one number, by halves."""
    width = vector.type.count
    while width > 1:
        half = width // 2
        low = ir.Constant(ir.VectorType(I32, half), list(range(half)))
        high = ir.Constant(ir.VectorType(I32, half), list(range(half, width)))
        undefined = ir.Constant(vector.type, ir.Undefined)
        vector = combine(
            builder.shuffle_vector(vector, undefined, low), builder.shuffle_vector(vector, undefined, high)
        )
        width = half
    return builder.extract_element(vector, ir.Constant(I32, 0))


def horizontal_sum(builder: Any, vector: Any) -> Any:
    """Sum of the lanes, by halves."""
    return horizontal(builder, vector, builder.fadd)


def horizontal_sums(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """Sums over the lanes of up to LANES vectors, as numbers: several at a time, by shuffles and additions.

    Two vectors become one whose lanes hold half as many parts of each sum, until a lane is a sum.
    """
    level = [(vector, [number] * LANES) for number, vector in enumerate(vectors)]
    parts = LANES  # lanes that a sum is spread over
    while parts > 1:
        pairs = zip(level[::2], level[1::2] + ([level[-1]] if len(level) % 2 else []))
        level = [_fold(builder, left, right, parts) for left, right in pairs]
        parts //= 2
    found: dict[int, Any] = {}
    for vector, owners in level:
        for lane, number in enumerate(owners):
            if number not in found:
                found[number] = builder.extract_element(vector, ir.Constant(I32, lane))
    return [found[number] for number in range(len(vectors))]


def _fold(builder: Any, left: Any, right: Any, parts: int) -> tuple[Any, list[int]]:
    (a, a_owners), (b, b_owners) = left, right
    half = parts // 2
    starts = range(0, LANES, parts)
    low = [start + i for start in starts for i in range(half)]
    if parts > 4:
        picks = low + [LANES + place for place in low]
    else:  # inside groups of four lanes, between which moving costs most
        picks = []
        for group in range(0, LANES, 4):
            inside = [place for place in low if group <= place < group + 4]
            picks += inside + [LANES + place for place in inside]
    first = ir.Constant(ir.VectorType(I32, LANES), picks)
    second = ir.Constant(ir.VectorType(I32, LANES), [place + half for place in picks])
    owners = a_owners + b_owners
    summed = builder.fadd(builder.shuffle_vector(a, b, first), builder.shuffle_vector(a, b, second))
    return summed, [owners[place] for place in picks]


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _define(
    result: Any, arguments: tuple[Any, ...], emit: Callable[[Any, list[Any]], Any]
) -> Callable[..., Any]:
    """A Numba intrinsic of one or two scalars; `emit(builder, arguments)` makes its result, None for void."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = emit(builder, list(args))
        return context.get_dummy_value() if value is None else value

    if len(arguments) == 1:

        @intrinsic
        def one(typingctx: Any, a: Any) -> Any:
            return result(*arguments), codegen

        return one

    @intrinsic
    def two(typingctx: Any, a: Any, b: Any) -> Any:
        return result(*arguments), codegen

    return two


def _store_bf16(builder: Any, args: list[Any]) -> None:
    """Round to nearest, ties to even; a NaN stays one."""
    address, value = args
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(I32, 0x7FFF)))
    quiet = builder.or_(bits, ir.Constant(I32, 0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    half = builder.trunc(builder.lshr(chosen, ir.Constant(I32, 16)), I16)
    builder.store(half, pointer(builder, address, I16), align=2)


def _store_f16(builder: Any, args: list[Any]) -> None:
    half = builder.fptrunc(args[1], ir.HalfType())
    builder.store(half, pointer(builder, args[0], ir.HalfType()), align=2)


def _prefetch(builder: Any, args: list[Any]) -> None:
    """Ask for the cache line at an address, into the second-level cache; it need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = (ir.Constant(I32, number) for number in (0, 2, 1))
    builder.call(function, [pointer(builder, args[0], I8), read, second_level, data])


prefetch = _define(types.void, (types.int64,), _prefetch)


store_bf16 = _define(types.void, (types.int64, types.float32), _store_bf16)
store_f16 = _define(types.void, (types.int64, types.float32), _store_f16)
load_i64 = _define(
    types.int64, (types.int64,), lambda builder, args: builder.load(pointer(builder, args[0], I64), align=8)
)
f32_pointer = _define(
    types.CPointer(types.float32), (types.int64,), lambda builder, args: pointer(builder, args[0], FLOAT)
)
i64_pointer = _define(
    types.CPointer(types.int64), (types.int64,), lambda builder, args: pointer(builder, args[0], I64)
)
i16_pointer = _define(
    types.CPointer(types.int16), (types.int64,), lambda builder, args: pointer(builder, args[0], I16)
)
f64_pointer = _define(
    types.CPointer(types.float64),
    (types.int64,),
    lambda builder, args: pointer(builder, args[0], ir.DoubleType()),
)
