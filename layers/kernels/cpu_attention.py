"""Attention of a micro-batch over the paged KV cache on CPU cores, prefill and decode alike.

A piece of work is one KV head of some queries of one sequence: keys are read once for all query heads that
share them. The work follows the tokens held: nothing is padded or gathered.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from spmd.layers.kernels.cpu_rows import ints, softmax
from spmd.layers.kernels.simd import FLOAT32, LANES, f32_pointer
from spmd.layers.kernels.tiles import COLUMNS, MAX_ROWS, MAX_SUMMED_ROWS, dot_tile, weighted_tile

SPAN_FIELDS = 4  # of a sequence: first query row, queries, tokens held, address of its slots (int64)
QUERY_ROWS = 12  # query rows (tokens times heads of the group) that one piece of work aims at


@njit(nogil=True, cache=True)
def scratch_bytes(longest: int, group: int, head_dim: int) -> int:
    """Memory one thread needs: scores, queries and results of one piece of work."""
    rows = max(group, QUERY_ROWS)
    return 4 * rows * (longest + 2 * head_dim + 2 * LANES)


@njit(nogil=True, cache=True)
def attend(
    q: int,
    q_stride: int,
    spans: int,
    num_spans: int,
    groups: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    kind: int,
    keys: int,
    values: int,
    slot_bytes: int,
    out: int,
    out_stride: int,
    scratch: int,
    thread: int,
    threads: int,
) -> None:
    """This thread's share of the attention of a whole micro-batch.

    q, out: fp32 rows of heads. groups: int64 `[kv_heads, 2]`, first query head and number of query heads of
    each KV head. keys, values: the layer's cache of `kind`, slots `slot_bytes` apart. window: 0 for none.
    """
    span_table = ints(spans, num_spans * SPAN_FIELDS)
    group_table = ints(groups, kv_heads * 2)
    piece = 0
    for s in range(num_spans):
        first_row, queries = span_table[s * SPAN_FIELDS], span_table[s * SPAN_FIELDS + 1]
        held, slots = span_table[s * SPAN_FIELDS + 2], span_table[s * SPAN_FIELDS + 3]
        for h in range(kv_heads):
            first_head, group = group_table[2 * h], group_table[2 * h + 1]
            if group == 0:
                continue
            at_once = max(1, QUERY_ROWS // group)
            for start in range(0, queries, at_once):
                piece += 1
                if piece % threads != thread:
                    continue
                count = min(at_once, queries - start)
                offset = (first_row + start) * q_stride + 4 * first_head * head_dim
                out_offset = (first_row + start) * out_stride + 4 * first_head * head_dim
                _attend_piece(
                    q + offset,
                    q_stride,
                    count,
                    group,
                    held - queries + start,
                    slots,
                    head_dim,
                    scale,
                    window,
                    kind,
                    keys + h * head_dim * (4 if kind == FLOAT32 else 2),
                    values + h * head_dim * (4 if kind == FLOAT32 else 2),
                    slot_bytes,
                    out + out_offset,
                    out_stride,
                    scratch,
                )


@njit(nogil=True, cache=True)
def _attend_piece(
    q: int,
    q_stride: int,
    queries: int,
    group: int,
    position: int,
    slots: int,
    head_dim: int,
    scale: float,
    window: int,
    kind: int,
    keys: int,
    values: int,
    slot_bytes: int,
    out: int,
    out_stride: int,
    scratch: int,
) -> None:
    """`queries` tokens from `position` on, `group` heads of each, on one KV head."""
    rows = queries * group
    seen = position + queries
    first = max(0, position - window + 1) if window > 0 else 0
    count = seen - first
    row_bytes = 4 * head_dim
    score_bytes = 4 * ((count + LANES - 1) // LANES * LANES)
    packed, result = scratch, scratch + rows * row_bytes
    scores = result + rows * row_bytes
    scaled = carray(f32_pointer(packed), rows * head_dim)
    factor = np.float32(scale)
    for i in range(queries):
        source = carray(f32_pointer(q + i * q_stride), group * head_dim)
        for j in range(group * head_dim):
            scaled[i * group * head_dim + j] = source[j] * factor

    slot = ints(slots, seen)
    t = first
    while t < seen:
        columns = COLUMNS if t + 1 < seen and slot[t + 1] == slot[t] + 1 else 1
        address = keys + slot[t] * slot_bytes
        r = 0
        while r < rows:
            step = min(MAX_ROWS if columns > 1 else 2, rows - r)
            place = scores + r * score_bytes + 4 * (t - first)
            dot_tile(
                kind,
                step,
                columns,
                packed + r * row_bytes,
                row_bytes,
                address,
                slot_bytes,
                head_dim,
                place,
                score_bytes,
                0,
            )
            r += step
        t += columns

    for i in range(queries):
        last = position + i + 1
        low = max(0, last - window) if window > 0 else 0
        for j in range(group):
            softmax(scores + (i * group + j) * score_bytes, low - first, last - first, count)

    item = 4 if kind == FLOAT32 else 2
    r = 0
    while r < rows:
        step = min(MAX_SUMMED_ROWS, rows - r)
        d = 0
        while d < head_dim:
            left = (head_dim - d) // LANES
            vectors = 4 if left >= 4 else min(left, 1)
            weighted_tile(
                kind,
                step,
                vectors,
                scores + r * score_bytes,
                score_bytes,
                values + d * item,
                slots + 8 * first,
                count,
                slot_bytes,
                result + r * row_bytes + 4 * d,
                row_bytes,
            )
            d += vectors * LANES if vectors > 0 else 1
        r += step

    summed = carray(f32_pointer(result), rows * head_dim)
    for i in range(queries):
        target = carray(f32_pointer(out + i * out_stride), group * head_dim)
        for j in range(group * head_dim):
            target[j] = summed[i * group * head_dim + j]
