"""Register tiles, the inner loops of the CPU kernels, written as LLVM vectors of the host's width.

A tile keeps its sums in registers (the idea of GotoBLAS's micro-kernels; Goto and van de Geijn, 2008), sums
in fp32, and reads the second operand in the type it is stored in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from spmd.layers.kernels.native import compile_functions
from spmd.layers.kernels.simd import (
    FLOAT,
    FLOAT32,
    I32,
    I64,
    ITEM_BYTES,
    KINDS,
    LANES,
    VECTOR,
    ZERO_VECTOR,
    fma,
    horizontal_sums,
    i64,
    load_wide,
    pointer,
    splat,
)

MAX_ROWS = 5  # 5 x 2 sums, 2 weights and an x: 13 of 16 registers
MAX_SUMMED_ROWS = 3  # 3 x 4 sums
COLUMNS = 2
_IN_FLIGHT = 8  # independent sums that hide the latency of a multiply-add


def _dot_body(rows: int, columns: int, kind: int) -> Callable[[Any, list[Any]], None]:
    unroll = max(1, _IN_FLIGHT // (rows * columns))
    item = ITEM_BYTES[kind]
    cells = [(r, c) for r in range(rows) for c in range(columns)]

    def emit(builder: Any, args: list[Any]) -> None:
        x, x_stride, w, w_stride, k, out, out_stride, add = args
        x_rows = [builder.add(x, builder.mul(x_stride, i64(r))) for r in range(rows)]
        w_rows = [builder.add(w, builder.mul(w_stride, i64(c))) for c in range(columns)]
        sums = [
            {cell: cgutils.alloca_once_value(builder, ZERO_VECTOR) for cell in cells} for _ in range(unroll)
        ]
        rest = {cell: cgutils.alloca_once_value(builder, ir.Constant(FLOAT, 0.0)) for cell in cells}

        def step(place: Any, into: dict[tuple[int, int], Any], vector: bool) -> None:
            x_offset, w_offset = builder.mul(place, i64(4)), builder.mul(place, i64(item))
            weights = [load_wide(builder, builder.add(row, w_offset), kind, vector) for row in w_rows]
            for r, row in enumerate(x_rows):
                values = load_wide(builder, builder.add(row, x_offset), FLOAT32, vector)
                for c in range(columns):
                    cell = into[r, c]
                    builder.store(fma(builder, values, weights[c], builder.load(cell)), cell)

        wide = LANES * unroll
        blocks = builder.udiv(k, i64(wide))
        with cgutils.for_range(builder, blocks) as loop:
            base = builder.mul(loop.index, i64(wide))
            for number, into in enumerate(sums):
                step(builder.add(base, i64(number * LANES)), into, True)
        done = builder.mul(blocks, i64(wide))
        if unroll > 1:
            left = builder.udiv(builder.sub(k, done), i64(LANES))
            with cgutils.for_range(builder, left) as loop:
                step(builder.add(done, builder.mul(loop.index, i64(LANES))), sums[0], True)
            done = builder.add(done, builder.mul(left, i64(LANES)))
        totals = {}
        for cell in cells:
            total = builder.load(sums[0][cell])
            for into in sums[1:]:
                total = builder.fadd(total, builder.load(into[cell]))
            totals[cell] = cgutils.alloca_once_value(builder, total)
            builder.store(total, totals[cell])
        rest_count = builder.sub(k, done)
        with builder.if_then(builder.icmp_signed(">", rest_count, i64(0)), likely=False):
            with cgutils.for_range(builder, rest_count) as loop:
                step(builder.add(done, loop.index), rest, False)
            for cell in cells:
                alone = builder.insert_element(ZERO_VECTOR, builder.load(rest[cell]), ir.Constant(I32, 0))
                builder.store(builder.fadd(builder.load(totals[cell]), alone), totals[cell])
        results: dict[tuple[int, int], Any] = {}
        for start in range(0, len(cells), LANES):
            group = cells[start : start + LANES]
            found = horizontal_sums(builder, [builder.load(totals[cell]) for cell in group])
            results |= dict(zip(group, found))
        adding = builder.icmp_signed("!=", add, i64(0))
        for r, c in cells:
            offset = builder.add(builder.mul(out_stride, i64(r)), i64(4 * c))
            address = pointer(builder, builder.add(out, offset), FLOAT)
            before = builder.select(adding, builder.load(address, align=4), ir.Constant(FLOAT, 0.0))
            builder.store(builder.fadd(before, results[r, c]), address, align=4)

    return emit


def _weighted_body(rows: int, vectors: int, kind: int) -> Callable[[Any, list[Any]], None]:
    """`vectors` 0 stands for a single column."""
    item = ITEM_BYTES[kind]
    width = max(1, vectors)
    cells = [(r, v) for r in range(rows) for v in range(width)]

    def emit(builder: Any, args: list[Any]) -> None:
        p, p_stride, values, slots, count, slot_bytes, out, out_stride = args
        zero = ZERO_VECTOR if vectors else ir.Constant(FLOAT, 0.0)
        sums = {cell: cgutils.alloca_once_value(builder, zero) for cell in cells}
        with cgutils.for_range(builder, count) as loop:
            slot = builder.load(
                pointer(builder, builder.add(slots, builder.mul(loop.index, i64(8))), I64), align=8
            )
            base = builder.add(values, builder.mul(slot, slot_bytes))
            offset = builder.mul(loop.index, i64(4))
            weights = []
            for r in range(rows):
                row = builder.add(builder.add(p, builder.mul(p_stride, i64(r))), offset)
                weight = load_wide(builder, row, FLOAT32, False)
                weights.append(splat(builder, weight) if vectors else weight)
            for v in range(width):  # 12 sums, 3 weights and one of these: all 16 registers
                held = load_wide(builder, builder.add(base, i64(v * LANES * item)), kind, vectors > 0)
                for r in range(rows):
                    builder.store(fma(builder, weights[r], held, builder.load(sums[r, v])), sums[r, v])
        for r, v in cells:
            offset = builder.add(builder.mul(out_stride, i64(r)), i64(4 * v * LANES))
            element = VECTOR if vectors else FLOAT
            address = pointer(builder, builder.add(out, offset), element)
            builder.store(builder.load(sums[r, v]), address, align=4)

    return emit


def call_one_of(builder: Any, cases: Mapping[Any, str], keys: list[Any], arguments: list[Any]) -> None:
    """Call the compiled function whose case equals the runtime `keys`; nothing where there is none."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
    done = builder.append_basic_block("tile.done")
    code = keys[0]
    for key in keys[1:]:
        code = builder.add(builder.mul(code, i64(16)), key)
    switch = builder.switch(code, done)
    for case, name in cases.items():
        number = case[0]
        for part in case[1:]:
            number = number * 16 + part
        block = builder.append_basic_block("tile")
        switch.add_case(i64(number), block)
        with builder.goto_block(block):
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
            builder.branch(done)
    builder.position_at_end(done)


_DOT_SHAPES = [(1, 1), (2, 1), *((rows, COLUMNS) for rows in range(1, MAX_ROWS + 1))]


_DOTS = {(k, r, c): f"spmd_dot_{k}_{r}x{c}" for k in KINDS.values() for r, c in _DOT_SHAPES}


def _dot_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    call_one_of(builder, _DOTS, args[:3], args[3:])
    return context.get_dummy_value()


@intrinsic
def dot_tile(
    typingctx: Any,
    kind: Any,
    rows: Any,
    columns: Any,
    x: Any,
    x_stride: Any,
    w: Any,
    w_stride: Any,
    k: Any,
    out: Any,
    out_stride: Any,
    add: Any,
) -> Any:
    """out[r, c] (+)= sum over k of x[r, k] * w[c, k]: 1 to MAX_ROWS rows of x with COLUMNS rows of w, or 1 or
    2 rows of x with a single row of w.

    x and out are fp32, w is of `kind`; out's columns are neighbours; add: 0 to overwrite out.
    """
    return types.void(*[types.int64] * 11), _dot_codegen


_SUM_SHAPES = [(rows, vectors) for rows in range(1, MAX_SUMMED_ROWS + 1) for vectors in (0, 1, 4)]


_SUMS = {(k, r, v): f"spmd_weighted_{k}_{r}x{v}" for k in KINDS.values() for r, v in _SUM_SHAPES}


def _weighted_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    call_one_of(builder, _SUMS, args[:3], args[3:])
    return context.get_dummy_value()


@intrinsic
def weighted_tile(
    typingctx: Any,
    kind: Any,
    rows: Any,
    vectors: Any,
    p: Any,
    p_stride: Any,
    values: Any,
    slots: Any,
    count: Any,
    slot_bytes: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[r, d] = sum over t < count of p[r, t] * values[slots[t], d], for 1 to MAX_SUMMED_ROWS rows.

    d runs over `vectors` x LANES columns (vectors 1 or 4), or is a single column where vectors is 0.
    values are of `kind`, their rows `slot_bytes` apart; slots int64; p and out fp32.
    """
    return types.void(*[types.int64] * 11), _weighted_codegen


compile_functions(
    "tiles",
    {name: (8, _dot_body(r, c, k)) for (k, r, c), name in _DOTS.items()}
    | {name: (8, _weighted_body(r, v, k)) for (k, r, v), name in _SUMS.items()},
)
