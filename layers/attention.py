"""Grouped-query attention over a paged KV cache, for any split of the heads.

This is the plain torch form: the oracle of, and the fallback for, fused kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class SequenceSpan:
    """One sequence's part of a batch.

    Its queries are tokens `[query_start, query_start + query_len)` of the batch and its last `query_len`
    positions; `slots` int64 `[kv_len]` are the cache slots of all its tokens so far, these included.
    """

    query_start: int
    query_len: int
    slots: Tensor

    @property
    def kv_len(self) -> int:
        return self.slots.shape[0]


@dataclass
class AttentionBatch:
    """Where the tokens of one micro-batch live in the cache.

    slot_mapping: int64 `[tokens]`, the cache slot each token's key and value are written to.
    spans: one per sequence, in token order; those with a single query (decode) come first.
    """

    slot_mapping: Tensor
    spans: list[SequenceSpan]
    num_decode: int = field(init=False)
    _decode_layouts: dict[int | None, list[DecodeLayout]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        single = [span.query_len == 1 for span in self.spans]
        self.num_decode = sum(single)
        if not all(single[: self.num_decode]):
            raise ValueError("sequences with a single query must come first in a batch")

    def decode_layouts(self, window: int | None) -> list[DecodeLayout]:
        """The padded gathers that cover all decode sequences; the same for every layer with this window."""
        if window not in self._decode_layouts:
            held = [span.slots for span in self.spans[: self.num_decode]]
            if window is not None:
                held = [slots[-window:] for slots in held]
            groups = _similar_lengths([slots.shape[0] for slots in held])
            self._decode_layouts[window] = [DecodeLayout.build(held, rows) for rows in groups]
        return self._decode_layouts[window]


@dataclass
class DecodeLayout:
    """Decode sequences of similar length, padded to the longest of them.

    rows: which of the batch's decode sequences, None for all of them in order.
    slots `[sequences, longest]`: cache slots of the keys each query sees.
    """

    rows: Tensor | None
    slots: Tensor
    mask: Tensor | None  # bool [sequences, 1, 1, longest], True where there is a key
    contiguous: slice | None  # the slots as a range, for one sequence whose blocks lie in order

    @classmethod
    def build(cls, held: list[Tensor], rows: list[int]) -> DecodeLayout:
        """held: cache slots of every decode sequence of the batch; rows: those to cover."""
        device = held[0].device
        picked = None if rows == list(range(len(held))) else torch.tensor(rows, device=device)
        slots = [held[row] for row in rows]
        lengths = [s.shape[0] for s in slots]
        if len(slots) == 1:
            only = slots[0]
            first, last = int(only[0]), int(only[-1])
            in_order = last - first == lengths[0] - 1 and bool((only[1:] > only[:-1]).all())
            return cls(picked, only[None], None, slice(first, last + 1) if in_order else None)
        padded = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True)
        if min(lengths) == max(lengths):
            return cls(picked, padded, None, None)
        counts = torch.tensor(lengths, device=device)
        mask = torch.arange(padded.shape[1], device=device) < counts[:, None]
        return cls(picked, padded, mask[:, None, None, :], None)


def _similar_lengths(lengths: list[int]) -> list[list[int]]:
    """Rows in groups that padding makes at most half as long again: work follows the tokens held."""
    groups: list[list[int]] = []
    shortest = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[row] > 1.5 * shortest + 32:
            groups.append([])
            shortest = lengths[row]
        groups[-1].append(row)
    return [sorted(group) for group in groups]


class Attention:
    """Attention of this rank's query heads.

    kv_index gives for each local query head the local KV head it reads; groups may be uneven, as when a
    KV head's queries straddle two ranks and both hold it.
    """

    def __init__(self, kv_index: list[int], head_dim: int, scale: float, window: int | None) -> None:
        self.num_heads = len(kv_index)
        self.num_kv_heads = (max(kv_index) + 1) if kv_index else 0
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.kv_index = torch.tensor(kv_index, dtype=torch.int64)
        sizes = [kv_index.count(head) for head in range(self.num_kv_heads)]
        self.group = max(sizes, default=0)
        self.uniform = all(size == self.group for size in sizes)
        # Place of each query head in the [kv_heads, group] layout that pads uneven groups.
        places = [head * self.group + j for head, size in enumerate(sizes) for j in range(size)]
        self.places = torch.tensor(places, dtype=torch.int64)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`, caches
        `[slots, kv_heads, head_dim]` (written to, of any dtype). Returns `[tokens, heads, head_dim]`."""
        if self.num_heads == 0:
            return q
        k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)  # as every later query will see them
        k_cache[batch.slot_mapping] = k
        v_cache[batch.slot_mapping] = v
        num_decode = batch.num_decode
        out = torch.empty_like(q)
        if num_decode:
            for layout in batch.decode_layouts(self.window):
                rows = slice(0, num_decode) if layout.rows is None else layout.rows
                out[rows] = self._decode(q[rows], k_cache, v_cache, layout)
        for span in batch.spans[num_decode:]:
            tokens = slice(span.query_start, span.query_start + span.query_len)
            if span.query_len == span.kv_len:
                keys, values = k[tokens], v[tokens]
            else:
                keys, values = k_cache[span.slots], v_cache[span.slots]
            out[tokens] = self._prefill(q[tokens], keys.to(q.dtype), values.to(q.dtype))
        return out

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[new, heads, head_dim]` are the last positions of k, v `[kv_len, kv_heads, head_dim]`."""
        new, kv_len = q.shape[0], k.shape[0]
        index = self.kv_index.to(q.device)
        keys, values = k[:, index].transpose(0, 1), v[:, index].transpose(0, 1)
        query = q.transpose(0, 1)
        windowed = self.window is not None and self.window < kv_len
        if new == kv_len and not windowed:
            out = F.scaled_dot_product_attention(
                query[None], keys[None], values[None], is_causal=True, scale=self.scale
            )
        else:
            key_position = torch.arange(kv_len, device=q.device)
            position = torch.arange(kv_len - new, kv_len, device=q.device)[:, None]
            mask = key_position <= position
            if self.window is not None:
                mask &= key_position > position - self.window
            out = F.scaled_dot_product_attention(
                query[None], keys[None], values[None], attn_mask=mask, scale=self.scale
            )
        return out[0].transpose(0, 1)

    def _decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: DecodeLayout) -> Tensor:
        """q `[sequences, heads, head_dim]`, one token each. The query heads of a KV head are stacked as
        query rows, so keys and values are read once."""
        sequences, longest = layout.slots.shape
        if layout.contiguous is not None:
            keys, values = k_cache[layout.contiguous][None], v_cache[layout.contiguous][None]
        else:
            flat = layout.slots.view(-1)
            shape = (sequences, longest, self.num_kv_heads, self.head_dim)
            keys, values = (
                k_cache.index_select(0, flat).view(shape),
                v_cache.index_select(0, flat).view(shape),
            )
        if self.uniform:
            query = q
        else:
            query = q.new_zeros(sequences, self.num_kv_heads * self.group, self.head_dim)
            query[:, self.places.to(q.device)] = q
        query = query.reshape(sequences, self.num_kv_heads, self.group, self.head_dim)
        keys, values = (part.to(q.dtype).transpose(1, 2) for part in (keys, values))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=layout.mask, scale=self.scale)
        out = out.reshape(sequences, self.num_kv_heads * self.group, self.head_dim)
        return out if self.uniform else out[:, self.places.to(q.device)]
