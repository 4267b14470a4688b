"""Paged key-value cache: which blocks are free, which sequence holds which, and the tensors themselves.

Paging as in vLLM (Kwon et al., 2023). Block tables are numpy arrays, the same on every rank of a replica;
the tensors hold this rank's layers and KV heads only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

BLOCK_SIZE = 16  # tokens


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


class BlockPool:
    """Free list of cache blocks. Lowest numbers are handed out first, so that a short run stays compact."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises ValueError when fewer are free: callers check `num_free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: Iterable[int]) -> None:
        self._free.extend(sorted(blocks, reverse=True))

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless every block is either free or in exactly one of `tables`."""
        owned = [block for table in tables for block in table]
        if sorted(owned + self._free) != list(range(self.num_blocks)):
            raise AssertionError("a cache block is lost, or held twice")


def slots_of(blocks: list[int], start: int, stop: int) -> np.ndarray:
    """Cache slots, int64 `[stop - start]`, of token positions start..stop of a sequence with these blocks."""
    positions = np.arange(start, stop, dtype=np.int64)
    return np.asarray(blocks, dtype=np.int64)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


class KVCache:
    """Key and value tensors `[num_blocks * BLOCK_SIZE, kv_heads, head_dim]` of each layer of this stage."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks * BLOCK_SIZE, num_kv_heads, head_dim)
        # torch.empty leaves host pages untouched, so memory grows with the tokens actually held.
        self.keys: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values: list[Tensor] = [
            torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)
        ]

    @staticmethod
    def bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * BLOCK_SIZE * num_kv_heads * head_dim * dtype.itemsize
