"""Attention of single queries over a paged cache, the keys divided over several programs (Triton).

Split keys as in Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023). The query heads of a KV head are the rows
of one product, so that its keys and values are read once, however many query heads it has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd.layers.kernels.gpu_softmax import attend_range, finish
from spmd.layers.kernels.paged import HeadGroups, PagedBatch


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    kv_lens: tl.tensor,
    groups: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    levels: tl.tensor,
    num_heads: tl.tensor,
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
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (KV head, split, sequence): all query heads of the KV head over one part of the keys.

    With several splits, partial fp32 `[sequences, heads, SPLITS, DIM]` gets the part's softmax-weighted
    values and levels fp32 `[sequences, heads, SPLITS]` the logarithm (of 2) of its sum of weights.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    first_head = tl.load(groups + 2 * kv_head)
    count = tl.load(groups + 2 * kv_head + 1)
    kv_len = tl.load(kv_lens + sequence)
    row = tl.arange(0, ROWS)
    place = tl.arange(0, DIM_PAD)
    head = first_head + row
    inside = (row < count)[:, None] & (place < DIM)[None, :]

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(kv_len - begin, SPLITS), TILE) * TILE
    first = begin + split * share
    last = tl.minimum(first + share, kv_len)
    whole = first + tl.maximum(last - first, 0) // TILE * TILE

    query = tl.load(
        q + sequence * q_stride + head[:, None] * q_head_stride + place[None, :], mask=inside, other=0.0
    )
    position = tl.zeros([ROWS], tl.int32) + (kv_len - 1)
    total = tl.zeros([ROWS, DIM_PAD], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    table = tables + sequence * table_stride
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    total, highest, sums = attend_range(
        query, total, highest, sums, position, keys, values, key_stride, value_stride, table,
        first, whole, scale, softcap, WINDOW, SOFTCAP, False, DIM, DIM_PAD, TILE,
    )  # fmt: skip
    total, highest, sums = attend_range(
        query, total, highest, sums, position, keys, values, key_stride, value_stride, table,
        whole, last, scale, softcap, WINDOW, SOFTCAP, True, DIM, DIM_PAD, TILE,
    )  # fmt: skip
    if SPLITS == 1:
        sink = highest
        if SINKS:
            sink = tl.load(sinks + head, mask=row < count, other=0.0).to(tl.float32)
        result = finish(total, highest, sums, sink, SINKS)
        target = out + sequence * out_stride + head[:, None] * out_head_stride + place[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    else:
        part = (sequence * num_heads + head) * SPLITS + split
        tl.store(
            levels + part,
            tl.where(sums > 0.0, highest + tl.log2(tl.where(sums > 0.0, sums, 1.0)), float("-inf")),
            mask=row < count,
        )
        if first < last:
            result = finish(total, highest, sums, highest, False)
            tl.store(partial + part[:, None] * DIM + place[None, :], result, mask=inside)


@triton.jit
def combine_kernel(
    partial: tl.tensor,
    levels: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    """Program (head, sequence): parts of `decode_kernel` into one row; those without keys are not read."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS_PAD)
    place = tl.arange(0, DIM_PAD)
    part = (sequence * num_heads + head) * SPLITS + split
    level = tl.load(levels + part, mask=split < SPLITS, other=float("-inf"))
    seen = level > float("-inf")
    highest = tl.max(level, axis=0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(level - base)
    sums = tl.sum(weights, axis=0)
    if SINKS:
        sums += tl.exp2(sink - base)
    rows = tl.load(
        partial + part[:, None] * DIM + place[None, :],
        mask=seen[:, None] & (place < DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(rows * weights[:, None], axis=0) / tl.where(sums > 0.0, sums, 1.0)
    target = out + sequence * out_stride + head * out_head_stride + place
    tl.store(target, result.to(out.dtype.element_ty), mask=place < DIM)


def decode_tile(dim_pad: int, itemsize: int) -> int:
    """Keys a program takes at a time: about 16 KiB of them, three times in flight."""
    return max(16, min(64, 16384 // (dim_pad * itemsize)))


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    heads: HeadGroups,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """The first `batch.num_decode` rows of q `[tokens, heads, dim]`, into those of `out`."""
    sequences, dim = batch.num_decode, q.shape[2]
    splits, num_heads = batch.num_splits, heads.num_heads
    dim_pad = max(16, triton.next_power_of_2(dim))
    partial, levels = out, out
    if splits > 1:
        partial = torch.empty(sequences, num_heads, splits, dim, dtype=torch.float32, device=q.device)
        levels = torch.empty(sequences, num_heads, splits, dtype=torch.float32, device=q.device)
    decode_kernel[(heads.num_kv_heads, splits, sequences)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.kv_lens,
        heads.groups,
        out if sinks is None else sinks,
        out,
        partial,
        levels,
        num_heads,
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
        SPLITS=splits,
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=max(16, triton.next_power_of_2(heads.largest)),
        TILE=decode_tile(dim_pad, q.element_size()),
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        combine_kernel[(num_heads, sequences)](
            partial,
            levels,
            out if sinks is None else sinks,
            out,
            num_heads,
            out.stride(0),
            out.stride(1),
            SINKS=sinks is not None,
            SPLITS=splits,
            SPLITS_PAD=triton.next_power_of_2(splits),
            DIM=dim,
            DIM_PAD=triton.next_power_of_2(dim),
            num_warps=4,
        )
