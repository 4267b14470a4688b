"""Attention of a micro-batch over the paged KV cache on CPU cores, prefill and decode alike.

A piece of work is one KV head of some queries of one sequence: keys are read once for all query heads that
share them. The work follows the tokens held. Where many queries meet the same keys, these are first laid
out dimension by dimension, so that scores are sums over vectors of keys with nothing to add up across lanes.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from spmd.layers.kernels.cpu_rows import ints
from spmd.layers.kernels.row_tiles import softmax
from spmd.layers.kernels.simd import FLOAT32, LANES, f32_pointer, i16_pointer
from spmd.layers.kernels.tiles import COLUMNS, MAX_ROWS, MAX_SUMMED_ROWS, dot_tile, weighted_tile

SPAN_FIELDS = 4  # of a sequence: first query row, queries, tokens held, address of its slots (int64)
QUERY_ROWS = 12  # query rows (tokens times heads of the group) that one piece of work aims at
PACKED_QUERY_ROWS = 24
PACKED_QUERIES = 8  # of a sequence, from which on laying out its keys pays
KEY_BLOCK = 4 * LANES  # keys laid out together


@njit(nogil=True, cache=True)
def scratch_bytes(longest: int, group: int, head_dim: int) -> int:
    """Memory one thread needs: queries, results and scores of one piece of work; keys laid out."""
    rows = max(group, PACKED_QUERY_ROWS)
    keys = (longest + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK
    return 4 * rows * (keys + 2 * head_dim) + 8 * head_dim + 4 * keys * head_dim


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
            packed = queries >= PACKED_QUERIES
            at_once = max(1, (PACKED_QUERY_ROWS if packed else QUERY_ROWS) // group)
            laid_out, from_key, scores = 0, 0, 0
            for start in range(0, queries, at_once):
                piece += 1
                if piece % threads != thread:
                    continue
                item = 4 if kind == FLOAT32 else 2
                head_keys = keys + h * head_dim * item
                if scores == 0:
                    scores = scratch + 4 * 2 * head_dim * max(group, PACKED_QUERY_ROWS)
                    if packed:
                        laid_out = scores
                        from_key = max(0, held - queries + start - window + 1) if window > 0 else 0
                        scores = _lay_out_keys(
                            head_keys, slots, slot_bytes, kind, head_dim, from_key, held, laid_out
                        )
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
                    head_keys,
                    values + h * head_dim * item,
                    slot_bytes,
                    out + out_offset,
                    out_stride,
                    scratch,
                    scores,
                    laid_out,
                    from_key,
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
    scores: int,
    laid_out: int,
    from_key: int,
) -> None:
    """`queries` tokens from `position` on, `group` heads of each, on one KV head.

    laid_out: address of the keys from `from_key` on as `_lay_out_keys` leaves them, 0 where they are not.
    """
    rows = queries * group
    seen = position + queries
    first = max(0, position - window + 1) if window > 0 else 0
    item = 4 if kind == FLOAT32 else 2
    row_bytes = 4 * head_dim
    packed, result = scratch, scratch + rows * row_bytes
    if laid_out:
        first = from_key + (first - from_key) // KEY_BLOCK * KEY_BLOCK
    count = seen - first
    score_bytes = 4 * ((count + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK)
    scaled = carray(f32_pointer(packed), rows * head_dim)
    factor = np.float32(scale)
    for i in range(queries):
        source = carray(f32_pointer(q + i * q_stride), group * head_dim)
        for j in range(group * head_dim):
            scaled[i * group * head_dim + j] = source[j] * factor

    if laid_out:
        _score_laid_out(
            packed, rows, row_bytes, laid_out, kind, head_dim, from_key, first, seen, scores, score_bytes
        )
    else:
        _score_in_place(
            packed, rows, row_bytes, keys, slots, slot_bytes, kind, head_dim, first, seen, scores, score_bytes
        )

    for i in range(queries):
        last = position + i + 1
        low = max(0, last - window) if window > 0 else 0
        for j in range(group):
            softmax(scores + (i * group + j) * score_bytes, low - first, last - first, count)

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


@njit(nogil=True, cache=True)
def _score_in_place(
    packed: int,
    rows: int,
    row_bytes: int,
    keys: int,
    slots: int,
    slot_bytes: int,
    kind: int,
    head_dim: int,
    first: int,
    seen: int,
    scores: int,
    score_bytes: int,
) -> None:
    """Scores of the keys `first` to `seen`, read where the cache has them."""
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


@njit(nogil=True, cache=True)
def _score_laid_out(
    packed: int,
    rows: int,
    row_bytes: int,
    laid_out: int,
    kind: int,
    head_dim: int,
    from_key: int,
    first: int,
    seen: int,
    scores: int,
    score_bytes: int,
) -> None:
    """The same from `_lay_out_keys`; `first` starts a block. The last block's scores beyond `seen` are there
    too, and mean nothing."""
    block_bytes = KEY_BLOCK * head_dim * (4 if kind == FLOAT32 else 2)
    blocks = laid_out + 8 * head_dim
    for t in range(first, seen, KEY_BLOCK):
        block = blocks + (t - from_key) // KEY_BLOCK * block_bytes
        r = 0
        while r < rows:
            step = min(MAX_SUMMED_ROWS, rows - r)
            weighted_tile(
                kind,
                step,
                4,
                packed + r * row_bytes,
                row_bytes,
                block,
                laid_out,
                head_dim,
                block_bytes // head_dim,
                scores + r * score_bytes + 4 * (t - first),
                score_bytes,
            )
            r += step


@njit(nogil=True, cache=True)
def _lay_out_keys(
    keys: int, slots: int, slot_bytes: int, kind: int, head_dim: int, first: int, last: int, out: int
) -> int:
    """Keys `first` to `last` of one head, as stored, in blocks `[head_dim, KEY_BLOCK]` filled up with zeros.

    Before them, at `out`, the numbers 0 to head_dim - 1: the "slots" of a block's rows. Returns the address
    behind the last block.
    """
    slot, numbers = ints(slots, last), ints(out, head_dim)
    for d in range(head_dim):
        numbers[d] = d
    place = out + 8 * head_dim
    for start in range(first, last, KEY_BLOCK):
        count = min(KEY_BLOCK, last - start)
        if kind == FLOAT32:
            wide = carray(f32_pointer(place), head_dim * KEY_BLOCK)
            for t in range(count):
                key = carray(f32_pointer(keys + slot[start + t] * slot_bytes), head_dim)
                for d in range(head_dim):
                    wide[d * KEY_BLOCK + t] = key[d]
            for t in range(count, KEY_BLOCK):
                for d in range(head_dim):
                    wide[d * KEY_BLOCK + t] = 0
            place += 4 * head_dim * KEY_BLOCK
        else:
            narrow = carray(i16_pointer(place), head_dim * KEY_BLOCK)
            for t in range(count):
                bits = carray(i16_pointer(keys + slot[start + t] * slot_bytes), head_dim)
                for d in range(head_dim):
                    narrow[d * KEY_BLOCK + t] = bits[d]
            for t in range(count, KEY_BLOCK):
                for d in range(head_dim):
                    narrow[d * KEY_BLOCK + t] = 0
            place += 2 * head_dim * KEY_BLOCK
    return place
