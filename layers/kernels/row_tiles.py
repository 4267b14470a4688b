"""Loops over one row that need e**x: softmax and gated activations, as LLVM vectors of the host's width.

Written out rather than left to Numba, whose loops were vectorized or not depending on what they were inlined
into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from spmd.layers.kernels.native import compile_functions
from spmd.layers.kernels.simd import FLOAT, I32, LANES, VECTOR, fma, horizontal, i64, pointer, splat

_SILU, _GELU_TANH = 0, 1

_LOG2E = math.log2(math.e)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # Cody and Waite, 1980
_POLYNOMIAL = (  # of Cephes' expf (Moshier)
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LOWEST, _HIGHEST = -87.0, 88.0
_UNROLL = 4


def _constant(like: Any, value: float) -> Any:
    """fp32 number in the shape of `like`, a number or a vector."""
    wide = isinstance(like.type, ir.VectorType)
    return ir.Constant(like.type, [value] * LANES if wide else value)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """Element-wise a where it is larger, else b."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def exp(builder: Any, x: Any) -> Any:
    """e**x to 2 units in the last place, between e**-87 and e**88; a NaN stays. Numbers or vectors."""
    name = f"llvm.floor.v{LANES}f32" if isinstance(x.type, ir.VectorType) else "llvm.floor.f32"
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type]), name)
    low, high = _constant(x, _LOWEST), _constant(x, _HIGHEST)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    n = builder.call(floor, [fma(builder, x, _constant(x, _LOG2E), _constant(x, 0.5))])
    r = fma(builder, n, _constant(x, -_LN2_HIGH), x)
    r = fma(builder, n, _constant(x, -_LN2_LOW), r)
    p = _constant(x, _POLYNOMIAL[0])
    for factor in _POLYNOMIAL[1:]:
        p = fma(builder, p, r, _constant(x, factor))
    p = builder.fadd(fma(builder, builder.fmul(p, r), r, r), _constant(x, 1.0))
    wide = isinstance(x.type, ir.VectorType)
    integer = ir.VectorType(I32, LANES) if wide else I32

    def whole(value: int) -> Any:
        return ir.Constant(integer, [value] * LANES if wide else value)

    power = builder.shl(builder.add(builder.fptosi(n, integer), whole(127)), whole(23))
    return builder.fmul(p, builder.bitcast(power, x.type))


def _over_row(builder: Any, count: Any, body: Callable[[Any, int, bool], None]) -> None:
    """body(place, which, vector) for vectors, _UNROLL at a time, and then for single numbers."""
    wide = builder.udiv(count, i64(LANES * _UNROLL))
    with cgutils.for_range(builder, wide) as loop:
        base = builder.mul(loop.index, i64(LANES * _UNROLL))
        for which in range(_UNROLL):
            body(builder.add(base, i64(which * LANES)), which, True)
    done = builder.mul(wide, i64(LANES * _UNROLL))
    with cgutils.for_range(builder, builder.udiv(builder.sub(count, done), i64(LANES))) as loop:
        body(builder.add(done, builder.mul(loop.index, i64(LANES))), 0, True)
    done = builder.mul(builder.udiv(count, i64(LANES)), i64(LANES))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        body(builder.add(done, loop.index), 0, False)


def _at(builder: Any, row: Any, place: Any, vector: bool) -> Any:
    return pointer(builder, builder.add(row, builder.mul(place, i64(4))), VECTOR if vector else FLOAT)


def _softmax_body(builder: Any, args: list[Any]) -> None:
    row, first, last, width = args
    begin, count = builder.add(row, builder.mul(first, i64(4))), builder.sub(last, first)
    lowest = ir.Constant(FLOAT, -math.inf)
    highest = [cgutils.alloca_once_value(builder, splat(builder, lowest)) for _ in range(_UNROLL)]
    highest_rest = cgutils.alloca_once_value(builder, lowest)
    zero = ir.Constant(FLOAT, 0.0)
    totals = [cgutils.alloca_once_value(builder, splat(builder, zero)) for _ in range(_UNROLL)]
    total_rest = cgutils.alloca_once_value(builder, zero)

    def find_highest(place: Any, which: int, vector: bool) -> None:
        value = builder.load(_at(builder, begin, place, vector), align=4)
        held = highest[which] if vector else highest_rest
        builder.store(_larger(builder, value, builder.load(held)), held)

    _over_row(builder, count, find_highest)
    top = builder.load(highest_rest)
    for held in highest:
        top = _larger(
            builder, horizontal(builder, builder.load(held), lambda a, b: _larger(builder, a, b)), top
        )

    def exponentiate(place: Any, which: int, vector: bool) -> None:
        address = _at(builder, begin, place, vector)
        value = builder.load(address, align=4)
        value = exp(builder, builder.fsub(value, splat(builder, top) if vector else top))
        builder.store(value, address, align=4)
        held = totals[which] if vector else total_rest
        builder.store(builder.fadd(builder.load(held), value), held)

    _over_row(builder, count, exponentiate)
    total = builder.load(total_rest)
    for held in totals:
        total = builder.fadd(total, horizontal(builder, builder.load(held), builder.fadd))
    scale = builder.fdiv(ir.Constant(FLOAT, 1.0), total)

    def divide(place: Any, which: int, vector: bool) -> None:
        address = _at(builder, begin, place, vector)
        factor = splat(builder, scale) if vector else scale
        builder.store(builder.fmul(builder.load(address, align=4), factor), address, align=4)

    _over_row(builder, count, divide)
    for start, stop in ((i64(0), first), (last, width)):
        with cgutils.for_range(builder, builder.sub(stop, start)) as loop:
            builder.store(zero, _at(builder, row, builder.add(start, loop.index), False), align=4)


def _gate_body(activation: int) -> Callable[[Any, list[Any]], None]:
    def emit(builder: Any, args: list[Any]) -> None:
        gate, up, size = args

        def step(place: Any, which: int, vector: bool) -> None:
            address = _at(builder, gate, place, vector)
            g = builder.load(address, align=4)
            inner = g
            if activation == _GELU_TANH:  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y))
                cube = builder.fmul(builder.fmul(g, g), builder.fmul(g, _constant(g, 0.044715)))
                inner = builder.fmul(builder.fadd(g, cube), _constant(g, 1.5957691216057308))
            # Far below, where exp stops growing, a gate is closed.
            g = builder.select(builder.fcmp_ordered("<", g, _constant(g, _LOWEST)), _constant(g, -0.0), g)
            below = builder.fadd(exp(builder, builder.fneg(inner)), _constant(g, 1.0))
            value = builder.fmul(
                builder.fdiv(g, below), builder.load(_at(builder, up, place, vector), align=4)
            )
            builder.store(value, address, align=4)

        _over_row(builder, size, step)

    return emit


_NAMES = {_SILU: "spmd_silu_row", _GELU_TANH: "spmd_gelu_tanh_row"}


def _call(builder: Any, name: str, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [i64(0).type] * len(arguments))
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def softmax(typingctx: Any, scores: Any, first: Any, last: Any, width: Any) -> Any:
    """Softmax of the fp32 scores[first:last] in place; zero in the rest of the `width` places."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "spmd_softmax_row", list(args))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _define_gate(activation: int) -> Any:
    @intrinsic
    def gate_row(typingctx: Any, gate: Any, up: Any, size: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _call(builder, _NAMES[activation], list(args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return gate_row


# gate = activation(gate) * up, `size` fp32 numbers.
silu_row = _define_gate(_SILU)
gelu_tanh_row = _define_gate(_GELU_TANH)

compile_functions(
    "rows",
    {"spmd_softmax_row": (4, _softmax_body)}
    | {name: (3, _gate_body(activation)) for activation, name in _NAMES.items()},
)
