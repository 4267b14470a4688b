"""The compiled CPU kernels against plain torch, over odd sizes, every storage type and several threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from spmd.layers.attention import Attention, AttentionBatch, SequenceSpan
from spmd.layers.kernels.cpu_attention import attend, scratch_bytes
from spmd.layers.kernels.cpu_matmul import matmul_columns
from spmd.layers.kernels.cpu_rows import (
    GELU,
    GELU_TANH,
    RELU,
    SILU,
    activate,
    rms_norm,
    rotate,
    store_row,
)
from spmd.layers.kernels.row_tiles import softmax
from spmd.layers.kernels.simd import KINDS
from spmd.layers.rotary import apply_rotary

DTYPES = list(KINDS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 17, 61])
@pytest.mark.parametrize(
    ("columns", "inner"), [(1, 1), (5, 7), (37, 61), (16, 64), (33, 4100), (3, 0), (0, 8)]
)
def test_matmul_of_any_shape(dtype: torch.dtype, rows: int, columns: int, inner: int) -> None:
    torch.manual_seed(rows + columns)
    x, w = torch.randn(rows, inner), torch.randn(columns, inner + 3).to(dtype)[:, :inner]
    out = torch.full((rows, columns), 7.0)
    middle = columns // 2  # two threads' shares
    for first, last in ((0, middle), (middle, columns)):
        matmul_columns(
            KINDS[dtype],
            x.data_ptr(),
            4 * inner,
            rows,
            w.data_ptr(),
            w.stride(0) * dtype.itemsize,
            first,
            last,
            inner,
            out.data_ptr(),
            4 * columns,
            0,
        )
    want = (x.double() @ w.double().T).float()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5 * (inner + 1) ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_index", "dim", "window", "spans"),
    [
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], 64, None, [(1, 5), (1, 100), (1, 33), (7, 20), (40, 40)]),
        ([0, 0, 1], 80, 9, [(1, 5), (1, 100), (1, 1), (13, 33), (30, 30)]),  # a straddled KV head, a window
        ([0] * 7, 33, None, [(1, 1), (1, 77), (3, 3)]),
        ([0, 1, 2, 3], 128, 16, [(1, 1), (1, 77), (3, 200), (60, 290)]),
        ([0] * 16, 8, 1, [(1, 50), (20, 20)]),
    ],
)
def test_paged_attention_of_any_split(
    dtype: torch.dtype, kv_index: list[int], dim: int, window: int | None, spans: list[tuple[int, int]]
) -> None:
    torch.manual_seed(dim)
    heads, kv_heads, blocks = len(kv_index), max(kv_index) + 1, 64
    shape = (blocks * 16, kv_heads, dim)
    keys, values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    free = torch.randperm(blocks)
    parts, new_slots, row, used = [], [], 0, 0
    for queries, held in spans:
        count = -(-held // 16)
        table = free[used : used + count, None] * 16 + torch.arange(16)
        used += count
        slots = table.flatten()[:held].contiguous()
        parts.append(SequenceSpan(row, queries, slots))
        new_slots.append(slots[held - queries :])
        row += queries
    q, k, v = torch.randn(row, heads, dim), torch.randn(row, kv_heads, dim), torch.randn(row, kv_heads, dim)
    batch = AttentionBatch(torch.cat(new_slots), parts)
    reference = Attention(kv_index, dim, dim**-0.5, window)
    want = reference(q, k, v, keys, values, batch)  # writes the new keys and values

    span_table = np.array(
        [[s.query_start, s.query_len, s.kv_len, s.slots.data_ptr()] for s in parts], dtype=np.int64
    )
    groups = np.array([[kv_index.index(h), kv_index.count(h)] for h in range(kv_heads)], dtype=np.int64)
    out = torch.full_like(q, 7.0)
    longest = max(held for _, held in spans)
    scratch = torch.empty(scratch_bytes(longest, int(groups[:, 1].max()), dim) // 4)
    for thread in range(3):
        attend(
            q.data_ptr(),
            4 * heads * dim,
            span_table.ctypes.data,
            len(parts),
            groups.ctypes.data,
            kv_heads,
            dim,
            dim**-0.5,
            window or 0,
            KINDS[dtype],
            keys.data_ptr(),
            values.data_ptr(),
            kv_heads * dim * dtype.itemsize,
            out.data_ptr(),
            4 * heads * dim,
            scratch.data_ptr(),
            thread,
            3,
        )
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 64, 1001])
def test_rows(size: int) -> None:
    torch.manual_seed(size)
    x, weight, out = torch.randn(size) * 4, torch.randn(size), torch.empty(size)
    rms_norm(x.data_ptr(), weight.data_ptr(), size, 1e-5, out.data_ptr())
    torch.testing.assert_close(out, F.rms_norm(x, (size,), weight, 1e-5), rtol=1e-5, atol=1e-6)
    references = {
        SILU: F.silu,
        GELU: F.gelu,
        GELU_TANH: lambda t: F.gelu(t, approximate="tanh"),
        RELU: F.relu,
    }
    gate = torch.cat([x, torch.tensor([0.0, -0.0, 90.0, -90.0, 1e4, -1e4, -1e38])])
    up = torch.randn(gate.numel())
    for kind, reference in references.items():
        out = gate.clone()
        activate(out.data_ptr(), up.data_ptr(), out.numel(), kind)
        # torch's fp32 activations cancel for negative gates, by as much as 1e-6 on some processors.
        want = (reference(gate.double()) * up).float()
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-7)


@njit
def softmax_row(scores: int, first: int, last: int, width: int) -> None:
    softmax(scores, first, last, width)


def test_softmax() -> None:
    torch.manual_seed(0)
    for x in (torch.randn(300) * 20, -torch.rand(77) - 1e30, torch.full((9,), -3e38), torch.randn(1)):
        out, inside = x.clone(), slice(x.numel() // 3, x.numel() - x.numel() // 5)
        softmax_row(out.data_ptr(), inside.start, inside.stop, x.numel())
        want = torch.zeros_like(x)
        want[inside] = x[inside].softmax(0)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-7)
    broken = torch.randn(100)
    broken[17] = float("nan")
    softmax_row(broken.data_ptr(), 0, 100, 100)
    assert broken.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stores_round_as_torch_does(dtype: torch.dtype) -> None:
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 65519.0, 65520.0, 3.3895e38]
    x = torch.cat([torch.randn(1000) * 100, torch.tensor(special), 1 + torch.arange(1000) / 65536])
    out = torch.empty(x.numel(), dtype=dtype)
    store_row(x.data_ptr(), x.numel(), KINDS[dtype], out.data_ptr())
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_rotary_leaves_the_rest_of_a_head() -> None:
    torch.manual_seed(0)
    heads, dim, half = 3, 20, 6
    x, angles = torch.randn(1, heads, dim), torch.randn(1, half)
    want = apply_rotary(x, angles.cos(), angles.sin())
    cos, sin = angles.cos(), angles.sin()
    rotate(x.data_ptr(), heads, dim, cos.data_ptr(), sin.data_ptr(), half)
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-6)
