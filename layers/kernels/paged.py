"""Where the tokens of a batch live in the cache, as GPU kernels read it: tables on the device, no spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd.layers.attention import AttentionBatch

BLOCK_SIZE = 16  # tokens, as in spmd/block_pool.py
_WORTH_SPLITTING = 256  # keys a decode program should have at least; rounding may halve them


@dataclass(frozen=True)
class HeadGroups:
    """Which KV head each query head of this rank reads, for any split of the heads.

    kv_index: int32 `[heads]`, never decreasing. groups: int32 `[kv_heads, 2]`, first query head and number
    of query heads of each KV head. largest: most query heads of one KV head.
    """

    kv_index: Tensor
    groups: Tensor
    largest: int

    @classmethod
    def build(
        cls, kv_index: Sequence[int], num_kv_heads: int, device: torch.device | str = "cpu"
    ) -> HeadGroups:
        """Raises `ValueError` when a KV head's query heads are not neighbours, or name no KV head."""
        index = list(kv_index)
        if index != sorted(index) or (index and not 0 <= index[0] <= index[-1] < num_kv_heads):
            raise ValueError(f"kv_index {index}: expected non-decreasing numbers below {num_kv_heads}")
        counts = [index.count(head) for head in range(num_kv_heads)]
        table = [[sum(counts[:head]), count] for head, count in enumerate(counts)]
        return cls(
            torch.tensor(index, dtype=torch.int32, device=device),
            torch.tensor(table, dtype=torch.int32, device=device).reshape(-1, 2),
            max(counts, default=0),
        )

    @property
    def num_heads(self) -> int:
        return self.kv_index.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.groups.shape[0]


@dataclass(frozen=True)
class PagedBatch:
    """One micro-batch. All tensors are on the device, so a captured graph sees what they hold at replay.

    slot_mapping: int64 `[tokens]`, the cache slot each token's key and value go to; -1 in padding rows.
    block_tables: int32 `[sequences, max_blocks]`: position p of a sequence is in slot
    `block_tables[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE`.
    query_starts: int32 `[sequences + 1]`, each sequence's first token in the batch.
    kv_lens: int32 `[sequences]`, tokens held, those of this batch included; 0 in padding sequences.
    num_decode: the first `num_decode` sequences have one query each, token i that of sequence i.
    num_splits: parts of the keys that a decode sequence's programs share (`choose_splits`).
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    num_decode: int
    num_splits: int = 1

    @property
    def num_sequences(self) -> int:
        return self.kv_lens.shape[0]

    @classmethod
    def build(cls, batch: AttentionBatch, num_splits: int = 1) -> PagedBatch:
        """The same batch from its spans. Waits for the device, so it has no place in a captured step."""
        device = batch.slot_mapping.device
        tables = [span.slots[::BLOCK_SIZE].div(BLOCK_SIZE, rounding_mode="floor") for span in batch.spans]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True) if tables else torch.zeros(0, 0)
        starts = [0, *(span.query_start + span.query_len for span in batch.spans)]
        lengths = [span.kv_len for span in batch.spans]
        return cls(
            batch.slot_mapping,
            padded.to(device, torch.int32),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            batch.num_decode,
            num_splits,
        )


def choose_splits(sequences: int, num_kv_heads: int, max_kv_len: int, multiprocessors: int) -> int:
    """Parts to cut decode sequences of up to `max_kv_len` tokens into: 1, 2, 4, ... 64, each a kernel.

    Enough programs to give every multiprocessor two (decode waits for memory: more in flight is faster),
    but none with so few keys that starting it costs more than reading them.
    """
    programs = max(1, sequences * num_kv_heads)
    wanted = -(-2 * multiprocessors // programs)
    splits = max(1, min(wanted, -(-max_kv_len // _WORTH_SPLITTING), 64))
    return 1 << (splits - 1).bit_length()
