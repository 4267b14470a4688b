"""Attention over a paged KV cache: tiles of queries here, single ones in `gpu_decode` (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd.layers.kernels.gpu_decode import decode_attention
from spmd.layers.kernels.gpu_softmax import attend_range, finish
from spmd.layers.kernels.paged import HeadGroups, PagedBatch


# What changes from batch to batch is not compiled for.
@triton.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["tables", "starts", "kv_lens"],
)
def prefill_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    kv_lens: tl.tensor,
    kv_index: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_sequences: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (query head, tile): ROWS queries of one sequence.

    Sequence s has its tiles from `(starts[s] - starts[0]) // ROWS + s` on, which leaves room for the last,
    unfilled one without any table of tiles (as vLLM's unified attention does).
    """
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tiles see the most keys: they begin first
    origin = tl.load(starts)
    low = tl.full([], 0, tl.int32)
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(starts + middle) - origin) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(starts + low)
    query_len = tl.load(starts + low + 1) - start
    first_row = (tile - (start - origin) // ROWS - low) * ROWS
    if first_row >= query_len:
        return
    kv_len = tl.load(kv_lens + low)
    row = first_row + tl.arange(0, ROWS)
    place = tl.arange(0, DIM_PAD)
    inside = (row < query_len)[:, None] & (place < DIM)[None, :]
    token = (start + row).to(tl.int64)
    before = kv_len - query_len
    position = before + row
    query = tl.load(
        q + token[:, None] * q_stride + head * q_head_stride + place[None, :], mask=inside, other=0.0
    )
    total = tl.zeros([ROWS, DIM_PAD], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    kv_head = tl.load(kv_index + head)
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    table = tables + low.to(tl.int64) * table_stride
    last = tl.minimum(kv_len, before + first_row + ROWS)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(before + first_row - WINDOW + 1, 0) // TILE * TILE
        whole = begin
    else:
        # Keys up to the first row's own are seen by every row: no mask.
        whole = tl.maximum(before + first_row + 1, 0) // TILE * TILE
        total, highest, sums = attend_range(
            query, total, highest, sums, position, keys, values, key_stride, value_stride, table,
            begin, tl.minimum(whole, last), scale, softcap, WINDOW, SOFTCAP, False, DIM, DIM_PAD, TILE,
        )  # fmt: skip
    total, highest, sums = attend_range(
        query, total, highest, sums, position, keys, values, key_stride, value_stride, table,
        whole, last, scale, softcap, WINDOW, SOFTCAP, True, DIM, DIM_PAD, TILE,
    )  # fmt: skip
    sink = tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink += tl.load(sinks + head).to(tl.float32)
    result = finish(total, highest, sums, sink, SINKS)
    target = out + token[:, None] * out_stride + head * out_head_stride + place[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def prefill_shape(mean_queries: int, dim_pad: int, itemsize: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps and stages, by how many queries a sequence has on average.

    Chosen for shared memory of 164 KiB (sm_80), tested by compilation.
    """
    wide = dim_pad * itemsize
    rows = max(16, min(128, 1 << max(0, mean_queries - 1).bit_length()))
    if wide > 256:
        rows = min(rows, 64)
    keys = 64 if wide <= 256 else max(16, 16384 // wide)
    return rows, keys, 8 if rows == 128 else 4, 3 if wide <= 256 else 2


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    heads: HeadGroups,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See the twin. One launch for sequences with one query (two if their keys are split), one for others."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tokens, num_heads, dim = q.shape
    if batch.num_decode and num_heads:
        decode_attention(q, k_cache, v_cache, batch, heads, scale, window, softcap, sinks, out)
    sequences = batch.num_sequences - batch.num_decode
    if not sequences or not num_heads:
        return out
    queries = tokens - batch.num_decode
    dim_pad = max(16, triton.next_power_of_2(dim))
    rows, keys, warps, stages = prefill_shape(queries // sequences, dim_pad, q.element_size())
    prefill_kernel[(num_heads, queries // rows + sequences)](
        q,
        k_cache,
        v_cache,
        batch.block_tables[batch.num_decode :],
        batch.query_starts[batch.num_decode :],
        batch.kv_lens[batch.num_decode :],
        heads.kv_index,
        out if sinks is None else sinks,
        out,
        sequences,
        scale,
        softcap or 0.0,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        batch.block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=rows,
        TILE=keys,
        num_warps=warps,
        num_stages=stages,
    )
    return out
