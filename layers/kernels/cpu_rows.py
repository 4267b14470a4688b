"""What a decoder layer does to single rows, on CPU cores: norms, rotary, cache writes, activations, sums."""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from spmd.layers.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    bits_to_f32,
    f32_pointer,
    i64_pointer,
    store_bf16,
    store_f16,
)

SILU, GELU, GELU_TANH, RELU = 0, 1, 2, 3

_FAST = {"reassoc", "contract", "nsz"}  # not nnan or ninf: those let a comparison with a NaN go any way
_LOG2E = np.float32(math.log2(math.e))
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # Cody and Waite, 1980


@njit(nogil=True, cache=True, fastmath=_FAST, inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """e**x of one fp32 number, to 2 units in the last place, in operations that vectorize."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)  # minimax polynomial of Cephes' expf (Moshier)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * bits_to_f32((np.int32(n) + np.int32(127)) << np.int32(23))


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


@njit(nogil=True, cache=True, fastmath=_FAST)
def activate(gate: int, up: int, size: int, activation: int, out: int) -> None:
    """out = activation(gate) * up, one row."""
    gates, ups, result = (
        carray(f32_pointer(gate), size),
        carray(f32_pointer(up), size),
        carray(f32_pointer(out), size),
    )
    one = np.float32(1)
    if activation == SILU:
        for i in range(size):
            result[i] = gates[i] / (one + _exp(-gates[i])) * ups[i]
    elif activation == GELU_TANH:
        for i in range(size):
            g = gates[i]
            inner = np.float32(1.5957691216057308) * (g + np.float32(0.044715) * g * g * g)
            result[i] = g / (one + _exp(-inner)) * ups[i]  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y))
    elif activation == GELU:
        for i in range(size):
            g = gates[i]
            result[i] = np.float32(0.5) * g * (one + np.float32(math.erf(g * 0.7071067811865476))) * ups[i]
    else:
        for i in range(size):
            result[i] = max(gates[i], np.float32(0)) * ups[i]


@njit(nogil=True, cache=True)
def add_row(x: int, bias: int, size: int) -> None:
    """x += bias, one row."""
    values, terms = carray(f32_pointer(x), size), carray(f32_pointer(bias), size)
    for i in range(size):
        values[i] += terms[i]


@njit(nogil=True, cache=True, fastmath=_FAST)
def softmax(scores: int, first: int, last: int, width: int) -> None:
    """Softmax of scores[first:last] in place; zero in the rest of the `width` places."""
    row = carray(f32_pointer(scores), width)
    highest = np.float32(-np.inf)
    for i in range(first, last):
        highest = max(highest, row[i])
    total = np.float32(0)
    for i in range(first, last):
        row[i] = _exp(row[i] - highest)
        total += row[i]
    scale = np.float32(1) / total
    for i in range(first):
        row[i] = np.float32(0)
    for i in range(first, last):
        row[i] *= scale
    for i in range(last, width):
        row[i] = np.float32(0)


@njit(nogil=True, cache=True)
def ints(address: int, count: int):  # type: ignore[no-untyped-def]
    """`count` int64 at `address` as an array."""
    return carray(i64_pointer(address), count)
