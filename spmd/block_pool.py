"""Who holds which cache block: reference counts, prefix cache and eviction.

Paging as in vLLM (Kwon et al., 2023); full blocks are found again by a hash over all tokens up to their end,
so equal prefixes share blocks. Deterministic: every rank of a replica does the same.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

BLOCK_SIZE = 16  # tokens


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


def slots_of(blocks: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Cache slots, int64 `[stop - start]`, of token positions start..stop of a sequence with these blocks."""
    positions = np.arange(start, stop, dtype=np.int64)
    return np.asarray(blocks, dtype=np.int64)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def block_key(previous: bytes, token_ids: np.ndarray) -> bytes:
    """Key of a full block from the key of the block before it (b"" for the first) and its own tokens.

    128 bits of BLAKE2b over the whole prefix: what a block holds depends on nothing else.
    """
    return blake2b(
        previous + np.ascontiguousarray(token_ids, dtype=np.int64).tobytes(), digest_size=16
    ).digest()


class BlockPool:
    """Blocks 0 to num_blocks - 1: each is held by sequences, or cached (full, found by its key), or free.

    With `caching` off nothing is ever shared. Hit counters: `cached_tokens` of `queried_tokens`.
    """

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self.queried_tokens = 0
        self.cached_tokens = 0
        self.num_evictions = 0
        # Lowest numbers are handed out first, so that a short run stays compact.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks nobody holds, oldest first

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones, and cached ones that would be evicted."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of `keys`, from the first on, that are in the pool. Takes nothing."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `find` found."""
        for block in blocks:
            self._idle.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` new blocks, evicting the least recently used cached ones when none is free.

        Raises ValueError when there are not as many: callers check `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} can be had")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Make a full block that the caller holds findable. A key that is already known keeps its block."""
        if self.caching and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks. Of its cached ones the last is evicted first."""
        unused = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    unused.append(block)
        self._free.extend(sorted(unused, reverse=True))

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with `tables`, the block tables of all sequences."""
        held = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._references):
            if count != held[block]:
                raise AssertionError(f"block {block}: {count} references, held by {held[block]} sequences")
        unheld = [block for block, count in enumerate(self._references) if count == 0]
        if sorted(self._free + list(self._idle)) != unheld:
            raise AssertionError("a block that nobody holds is neither free nor cached, or is both")
        if any(block in self._key_of for block in self._free):
            raise AssertionError("a free block still has a key")
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise AssertionError("the two directions of the prefix cache disagree")

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self.num_evictions += 1
        return block
