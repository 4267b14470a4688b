"""The step that prefill and decode attention share: one tile of keys into a running softmax (Triton).

Online softmax as in FlashAttention-2 (Dao, 2023), in powers of two; keys by block table as in vLLM (Kwon et
al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from spmd.layers.kernels import paged

LOG2E = tl.constexpr(1.4426950408889634)
PAGE = tl.constexpr(paged.BLOCK_SIZE)


@triton.jit
def attend_range(
    query: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    sums: tl.tensor,
    position: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Take the keys at positions first to last - 1, TILE at a time, into the state of a block of query rows.

    query `[rows, DIM_PAD]` at positions `position` int32 `[rows]`. total: weighted values fp32
    `[rows, DIM_PAD]`; highest and sums: fp32 `[rows]`. keys and values point to one KV head's part of a
    cache, whose slots lie a stride apart. Without MASKED every row sees every key, and there are
    whole tiles only. Returns the new state.
    """
    place = tl.arange(0, DIM_PAD)
    offset = tl.arange(0, TILE)
    for start in range(first, last, TILE):
        key = start + offset
        if MASKED:
            block = tl.load(table + key // PAGE, mask=key < last, other=0)
        else:
            block = tl.load(table + key // PAGE)
        slot = block.to(tl.int64) * PAGE + key % PAGE
        key_place = keys + slot[:, None] * key_stride + place[None, :]
        value_place = values + slot[:, None] * value_stride + place[None, :]
        # Rows of the cache that nobody has written may hold NaN, which a weight of zero does not silence.
        if MASKED:
            inside = (key < last)[:, None] & (place < DIM)[None, :]
            k = tl.load(key_place, mask=inside, other=0.0)
        elif DIM == DIM_PAD:
            k = tl.load(key_place)
        else:
            k = tl.load(key_place, mask=(place < DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores *= LOG2E
        if MASKED:
            visible = (key[None, :] <= position[:, None]) & (key < last)[None, :]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(raised == float("-inf"), 0.0, raised)  # a row that has seen no key yet
        kept = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        sums = sums * kept + tl.sum(weights, axis=1)
        if MASKED:
            v = tl.load(value_place, mask=inside, other=0.0)
        elif DIM == DIM_PAD:
            v = tl.load(value_place)
        else:
            v = tl.load(value_place, mask=(place < DIM)[None, :], other=0.0)
        v = v.to(query.dtype)
        total = tl.dot(weights.to(query.dtype), v, total * kept[:, None], input_precision="ieee")
        highest = raised
    return total, highest, sums


@triton.jit
def finish(
    total: tl.tensor, highest: tl.tensor, sums: tl.tensor, sink: tl.tensor, SINKS: tl.constexpr
) -> tl.tensor:
    """Weighted values `[rows, dims]` over the sum of their weights, in which a sink counts; zeros where no
    key was seen. highest in powers of two, sink fp32 `[rows]` as the model has it."""
    if SINKS:
        level = sink * LOG2E
        raised = tl.maximum(highest, level)
        kept = tl.exp2(highest - raised)
        total = total * kept[:, None]
        sums = sums * kept + tl.exp2(level - raised)
    return total / tl.where(sums > 0.0, sums, 1.0)[:, None]
