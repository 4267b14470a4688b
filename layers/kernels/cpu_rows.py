"""What a decoder layer does to single rows, on CPU cores: norms, rotary, cache writes, activations, sums."""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from spmd.layers.kernels.row_tiles import gelu_tanh_row, silu_row
from spmd.layers.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    f32_pointer,
    i64_pointer,
    store_bf16,
    store_f16,
)

SILU, GELU, GELU_TANH, RELU = 0, 1, 2, 3

_FAST = {"reassoc", "contract", "nsz"}  # not nnan or ninf: those let a comparison with a NaN go any way


@njit(nogil=True, cache=True, fastmath=_FAST)
def rms_norm(x: int, weight: int, size: int, eps: float, out: int) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, one row of `size` fp32 numbers."""
    values, scales, result = (
        carray(f32_pointer(x), size),
        carray(f32_pointer(weight), size),
        carray(f32_pointer(out), size),
    )
    total = np.float32(0)
    for i in range(size):
        total += values[i] * values[i]
    scale = np.float32(1.0 / math.sqrt(total / size + eps))
    for i in range(size):
        result[i] = values[i] * scale * scales[i]


@njit(nogil=True, cache=True, fastmath=_FAST)
def rotate(x: int, heads: int, head_dim: int, cos: int, sin: int, half: int) -> None:
    """Rotary embedding, in place, of `heads` neighbouring heads; dimension i pairs with i + half."""
    cosines, sines = carray(f32_pointer(cos), half), carray(f32_pointer(sin), half)
    for head in range(heads):
        row = carray(f32_pointer(x + 4 * head * head_dim), 2 * half)
        for i in range(half):
            first, second = row[i], row[i + half]
            row[i] = first * cosines[i] - second * sines[i]
            row[i + half] = second * cosines[i] + first * sines[i]


@njit(nogil=True, cache=True)
def store_row(x: int, size: int, kind: int, out: int) -> None:
    """`size` fp32 numbers as `kind`."""
    values = carray(f32_pointer(x), size)
    if kind == FLOAT32:
        result = carray(f32_pointer(out), size)
        for i in range(size):
            result[i] = values[i]
    elif kind == BFLOAT16:
        for i in range(size):
            store_bf16(out + 2 * i, values[i])
    else:
        for i in range(size):
            store_f16(out + 2 * i, values[i])


@njit(nogil=True, cache=True)
def activate(gate: int, up: int, size: int, activation: int) -> None:
    """gate = activation(gate) * up, one row."""
    gates, ups = carray(f32_pointer(gate), size), carray(f32_pointer(up), size)
    if activation == SILU:
        silu_row(gate, up, size)
    elif activation == GELU_TANH:
        gelu_tanh_row(gate, up, size)
    elif activation == GELU:
        for i in range(size):
            g = gates[i]
            # Rather than 1 + erf, which cancels for negative gates.
            gates[i] = np.float32(0.5 * g * math.erfc(g * -0.7071067811865476)) * ups[i]
    else:
        for i in range(size):
            gates[i] = max(gates[i], np.float32(0)) * ups[i]


@njit(nogil=True, cache=True)
def add_row(x: int, bias: int, size: int) -> None:
    """x += bias, one row."""
    values, terms = carray(f32_pointer(x), size), carray(f32_pointer(bias), size)
    for i in range(size):
        values[i] += terms[i]


@njit(nogil=True, cache=True)
def ints(address: int, count: int):  # type: ignore[no-untyped-def]
    """`count` int64 at `address` as an array."""
    return carray(i64_pointer(address), count)
