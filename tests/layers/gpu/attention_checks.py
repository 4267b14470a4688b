"""Paged attention: the kernels against their twin, the twin against torch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.triton_device import DEVICE, DTYPES, INTERPRETED, tolerance

from spmd.block_pool import BLOCK_SIZE
from spmd.layers.attention import AttentionBatch, SequenceSpan
from spmd.layers.kernels import paged
from spmd.layers.kernels.gpu_table import torch_kernels, triton_kernels
from spmd.layers.kernels.paged import HeadGroups, PagedBatch, choose_splits

TWIN, KERNEL = torch_kernels().paged_attention, triton_kernels().paged_attention
MIXED = [(1, 5), (1, 70), (1, 33), (1, 0), (18, 50), (3, 3), (1, 1)]  # queries, keys; none: padding


def make_batch(spans: list[tuple[int, int]], num_decode: int, splits: int) -> PagedBatch:
    """Sequences whose blocks lie anywhere in the cache, in no order; unused table entries point far off."""
    needed = [-(-held // BLOCK_SIZE) for _, held in spans]
    free = torch.randperm(64)
    tables = torch.full((len(spans), max(needed) + 2), 2**24, dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = free[sum(needed[:row]) : sum(needed[: row + 1])]
    starts = torch.tensor([0, *torch.tensor([queries for queries, _ in spans]).cumsum(0)])
    return PagedBatch(
        torch.zeros(int(starts[-1]), dtype=torch.int64, device=DEVICE),
        tables.to(DEVICE),
        starts.to(DEVICE, torch.int32),
        torch.tensor([held for _, held in spans], dtype=torch.int32, device=DEVICE),
        num_decode,
        splits,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_index", "dim", "window", "softcap", "sinks", "splits"),
    [
        ([0, 0, 0, 1, 1], 64, None, None, False, 3),
        ([0, 0, 1], 80, 9, None, True, 2),  # a KV head cut between ranks, a window smaller than a tile
        ([0, 1, 1], 96, 40, 5.0, False, 1),
        ([0] * 17, 8, None, 3.0, True, 4),
        ([1, 1], 33, None, None, True, 1),  # a KV head without queries
        ([0, 1], 128, 1, None, False, 5),
    ],
)
def test_kernels_and_twin(
    dtype: torch.dtype,
    kv_index: list[int],
    dim: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    splits: int,
) -> None:
    torch.manual_seed(dim)
    heads = HeadGroups.build(kv_index, max(kv_index) + 1, DEVICE)
    batch = make_batch(MIXED, 4, splits)
    caches = torch.randn(2, 64 * BLOCK_SIZE, heads.num_kv_heads, dim, device=DEVICE).to(dtype)
    tokens = int(batch.query_starts[-1])
    # Every second head of a wider tensor: strides that are not the shape's.
    q = torch.randn(tokens, 2 * len(kv_index), dim, device=DEVICE).to(dtype)[:, ::2]
    sink = torch.randn(len(kv_index), device=DEVICE) if sinks else None
    out = torch.full((tokens, len(kv_index), dim), 7.0, device=DEVICE, dtype=dtype)
    found = KERNEL(q, caches[0], caches[1], batch, heads, dim**-0.5, window, softcap, sink, out)
    assert found is out
    assert not found[3].any()  # the padding row
    want = TWIN(q, caches[0], caches[1], batch, heads, dim**-0.5, window, softcap, sink)
    torch.testing.assert_close(found, want, **tolerance(dtype))


def test_twin_and_kernel_by_torch() -> None:
    """Without soft-cap and sinks, by torch's scaled_dot_product_attention over gathered keys."""
    torch.manual_seed(0)
    kv_index, dim, window = [0, 0, 1, 1, 1], 40, 30
    heads = HeadGroups.build(kv_index, 2, DEVICE)
    batch = make_batch([(1, 40), (25, 60), (33, 33)], 1, 2)
    k_cache, v_cache = torch.randn(2, 64 * BLOCK_SIZE, 2, dim, device=DEVICE)
    q = torch.randn(59, 5, dim, device=DEVICE)
    want = torch.empty_like(q)
    for sequence, (start, count, held) in enumerate([(0, 1, 40), (1, 25, 60), (26, 33, 33)]):
        place = torch.arange(held, device=DEVICE)
        slots = batch.block_tables[sequence].long()[place // 16] * 16 + place % 16
        k, v = (cache[slots][:, kv_index].transpose(0, 1) for cache in (k_cache, v_cache))
        late = place[held - count :, None]
        mask = (place <= late) & (place > late - window)
        rows = slice(start, start + count)
        part = F.scaled_dot_product_attention(q[rows].transpose(0, 1), k, v, attn_mask=mask, scale=0.2)
        want[rows] = part.transpose(0, 1)
    for attention in (TWIN, KERNEL):
        found = attention(q, k_cache, v_cache, batch, heads, 0.2, window)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_unwritten_cache_rows_do_not_matter() -> None:
    """NaN in the slots behind a sequence's last token, where a block is not full."""
    torch.manual_seed(0)
    heads = HeadGroups.build([0, 0], 1, DEVICE)
    batch = make_batch([(1, 5), (1, 70), (7, 21)], 2, 2)
    caches = torch.randn(2, 64 * BLOCK_SIZE, 1, 16, device=DEVICE)
    q = torch.randn(9, 2, 16, device=DEVICE)
    want = KERNEL(q, caches[0], caches[1], batch, heads, 0.25)
    held = torch.zeros(64 * BLOCK_SIZE, dtype=torch.bool, device=DEVICE)
    for sequence, count in enumerate([5, 70, 21]):
        place = torch.arange(count, device=DEVICE)
        held[batch.block_tables[sequence].long()[place // 16] * 16 + place % 16] = True
    caches[:, ~held] = torch.nan
    found = KERNEL(q, caches[0], caches[1], batch, heads, 0.25)
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_batches_from_spans() -> None:
    assert paged.BLOCK_SIZE == BLOCK_SIZE
    slots = torch.tensor([3, 1])[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    spans = [SequenceSpan(0, 1, slots.flatten()[:20]), SequenceSpan(1, 3, torch.arange(3))]
    batch = PagedBatch.build(AttentionBatch(torch.tensor([19, 0, 1, 2]), spans))
    assert batch.block_tables.tolist() == [[3, 1], [0, 0]]
    assert batch.query_starts.tolist() == [0, 1, 4]
    assert batch.kv_lens.tolist() == [20, 3]
    assert batch.num_decode == 1
    with pytest.raises(ValueError, match="non-decreasing"):
        HeadGroups.build([0, 1, 0], 2)


def test_splits_fill_the_card_but_stay_worth_it() -> None:
    assert choose_splits(1, 8, 8192, 132) == 32  # 33 would give two programs each, of less than 256 keys
    assert choose_splits(1, 8, 131072, 132) == 64  # 33, made a power of two
    assert choose_splits(64, 8, 131072, 132) == 1
    assert choose_splits(1, 1, 10**6, 132) == 64
    assert choose_splits(0, 0, 0, 132) == 1


@pytest.mark.skipif(INTERPRETED, reason="too slow interpreted")
def test_long_sequences() -> None:
    torch.manual_seed(0)
    heads = HeadGroups.build([0, 0, 0, 0, 1, 1, 1, 1], 2, DEVICE)
    caches = torch.randn(2, 64 * BLOCK_SIZE, 2, 128, device=DEVICE).bfloat16()
    batch = make_batch([(1, 400), (300, 500)], 1, 4)
    q = torch.randn(301, 8, 128, device=DEVICE).bfloat16()
    found = KERNEL(q, caches[0], caches[1], batch, heads, 0.09)
    want = TWIN(q, caches[0], caches[1], batch, heads, 0.09)
    torch.testing.assert_close(found, want, **tolerance(torch.bfloat16))
