"""Collectives through memory that the ranks of one node share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from spmd.comm.group import DEFAULT_TIMEOUT_S, Combine, Group
from spmd.comm.ledger import Operation as Recorded
from spmd.comm.partition import Partition
from spmd.comm.reduce import sum_into
from spmd.comm.rounds import rounds
from spmd.comm.waiting import meet, wait_until
from spmd.comm.window import WORD_BITS, ReductionWindow

PAGE_BYTES = 4096
CACHED_VIEWS = 128


class Operation(IntEnum):
    barrier = 1
    all_reduce = 2
    all_reduce_max = 3
    all_gather = 4
    reduce_scatter = 5
    broadcast = 6


def _check(operation: Operation, size: int, root: int) -> int:
    return operation << 20 | (size * 64 + root) % 1048573


class CollectiveMismatch(RuntimeError):
    """Two ranks are in different collectives, or in the same one with different sizes or roots."""


class ShmGroup(Group):
    """Group over an MPI shared window, opened when first needed.

    Every rank owns one page with its published word and two data slots of `slot_bytes`. A collective is a
    sequence of steps: write to the slot of this step, publish (sequence number, operation), wait until all
    have published it, read. Steps alternate between the two slots: whoever publishes step n has read
    step n - 1, so writing step n + 1 over the slot of n - 1 needs no further wait.

    A reduction of at most `one_shot_bytes` is one step, every rank summing all slots; a larger one is two
    a piece, every rank summing its own part and then copying the others'. One step reads `size - 2` slots
    more and saves one wait, hence the default: everything for two ranks, 128 KiB / (size - 2) for more.

    The published word also carries what is being done, so ranks that part ways raise `CollectiveMismatch`
    instead of computing garbage.
    """

    backend = "shm"

    def __init__(
        self,
        comm: MPI.Intracomm,
        name: str = "group",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        one_shot_bytes: int | None = None,
        slot_bytes: int = 512 << 10,
    ) -> None:
        super().__init__(comm, name, timeout_s)
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        if one_shot_bytes is None:
            one_shot_bytes = (128 << 10) // (self.size - 2) if self.size > 2 else self.slot_bytes
        self.one_shot_bytes = min(one_shot_bytes, self.slot_bytes)
        self._window: MPI.Win | None = None
        self._words: list[memoryview] = []  # per rank: published word, bytes, root
        self._bytes: list[Tensor] = []  # per rank: its two slots, one after the other
        self._views: dict[tuple[torch.dtype, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._tables = np.zeros((3, self.size), dtype=np.int64)  # addresses: words, first slots, second slots
        self._sequence = 0

    def reduction_window(self, part_bytes: int) -> ReductionWindow | None:
        if not 0 < part_bytes <= self.one_shot_bytes:
            return None
        if self._window is None:
            self._open()
        began = self._sequence

        def wait(sequence: int) -> None:
            self._sequence = sequence
            word = sequence << WORD_BITS | check
            shown = Recorded.kernel_reduce
            self._run(self._number, shown, part_bytes, -1, False, self._wait_for_all, word)

        def close(sequence: int, seconds: float) -> None:
            self._sequence = sequence

        check = _check(Operation.all_reduce, part_bytes, 0)
        words, slots = self._tables[0].ctypes.data, self._tables[1].ctypes.data
        return ReductionWindow(self.size, self.rank, words, slots, began, check, wait, close)

    def barrier(self) -> None:
        if self._window is None:
            self._open()
        self._step(Operation.barrier, 0)

    def _reduce(self, flat: Tensor, combine: Combine) -> None:
        operation = Operation.all_reduce if combine is sum_into else Operation.all_reduce_max
        size = flat.numel() * flat.element_size()
        if size <= self.one_shot_bytes:
            slots = self._slots(flat.dtype, flat.numel())
            slots[self.rank].copy_(flat)
            self._step(operation, size)
            combine(flat, slots)
            return
        for piece in flat.split(self.slot_bytes // flat.element_size()):
            parts = Partition.even(piece.numel(), self.size, align=64)  # no cache line has two writers
            mine = parts.slice(self.rank)
            slots = self._slots(flat.dtype, piece.numel())
            slots[self.rank].copy_(piece)
            self._step(operation, size)
            sums = self._slots(flat.dtype, piece.numel())
            if parts.count(self.rank):
                combine(sums[self.rank][mine], [slot[mine] for slot in slots])
            self._step(operation, size)
            for rank, summed in enumerate(sums):
                if parts.count(rank):
                    piece[parts.slice(rank)].copy_(summed[parts.slice(rank)])

    def _all_gather(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        size = out.numel() * out.element_size()
        parts = out.split(list(counts))
        for spans in rounds(counts, self.slot_bytes // flat.element_size()):
            widths = [stop - start for start, stop in spans]
            slots = self._slots(flat.dtype, max(widths))
            if widths[self.rank]:
                slots[self.rank][: widths[self.rank]].copy_(flat[slice(*spans[self.rank])])
            self._step(Operation.all_gather, size)
            for slot, part, span, width in zip(slots, parts, spans, widths):
                if width:
                    part[slice(*span)].copy_(slot[:width])

    def _reduce_scatter(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        size = flat.numel() * flat.element_size()
        room = self.slot_bytes // flat.element_size()
        parts = flat.split(list(counts))
        for spans in rounds(counts, room if flat.numel() <= room else max(1, room // self.size)):
            bounds = [0, *accumulate(stop - start for start, stop in spans)]
            slots = self._slots(flat.dtype, bounds[-1])
            for part, span, low, high in zip(parts, spans, bounds, bounds[1:]):
                if high > low:
                    slots[self.rank][low:high].copy_(part[slice(*span)])
            self._step(Operation.reduce_scatter, size)
            low, high = bounds[self.rank], bounds[self.rank + 1]
            if high > low:
                sum_into(out[slice(*spans[self.rank])], [slot[low:high] for slot in slots])

    def _broadcast(self, flat: Tensor, root: int) -> None:
        size = flat.numel() * flat.element_size()
        for piece in flat.split(self.slot_bytes // flat.element_size()):
            slots = self._slots(flat.dtype, piece.numel())
            if self.rank == root:
                slots[root].copy_(piece)
            self._step(Operation.broadcast, size, root)
            if self.rank != root:
                piece.copy_(slots[root])

    def _slots(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Every rank's slot of the next step, as `count` elements of `dtype`."""
        pair = self._views.get((dtype, count))
        if pair is None:
            if self._window is None:
                self._open()
            if len(self._views) >= CACHED_VIEWS:
                self._views.clear()
            width = count * dtype.itemsize
            with torch.inference_mode(False):  # a view outlives the mode of the call that made it
                first, second = (
                    [slots[start : start + width].view(dtype) for slots in self._bytes]
                    for start in (0, self.slot_bytes)
                )
            pair = self._views[dtype, count] = (first, second)
        return pair[(self._sequence + 1) & 1]

    def _step(self, operation: Operation, size: int, root: int = 0) -> None:
        """Publish the next step and return when every rank has; `size` is that of the whole collective."""
        window = self._window
        assert window is not None
        self._sequence += 1
        word = self._sequence << WORD_BITS | _check(operation, size, root)
        words = self._words
        mine = words[self.rank]
        mine[1] = size
        mine[2] = root
        window.Sync()  # data and description are visible before the word is
        mine[0] = word
        for line in words:
            if line[0] != word:
                self._wait_for_all(word)
                break
        window.Sync()  # no data is read before the words were

    def _wait_for_all(self, word: int) -> None:
        window, words, sequence = self._window, self._words, word >> WORD_BITS
        assert window is not None
        missing = [rank for rank in range(self.size) if words[rank][0] != word]

        def all_published() -> bool:
            while missing:
                found = words[missing[-1]][0]
                if found != word:
                    if found >> WORD_BITS < sequence:
                        return False
                    # A rank that is a step ahead has seen this step published as it expected.
                    if found >> WORD_BITS == sequence:
                        raise CollectiveMismatch(self._mismatch(missing[-1], sequence))
                missing.pop()
            return True

        def late() -> str:
            absent = [rank for rank in missing if words[rank][0] >> WORD_BITS < sequence]
            names = ", ".join(str(self.ranks[rank]) for rank in absent)
            return f"{self._doing(self.rank)} in {self}, step {sequence}: rank {names} has not arrived"

        wait_until(all_published, late, self.timeout_s, self.comm.Iprobe)

    def _mismatch(self, other: int, sequence: int) -> str:
        return (
            f"step {sequence} of {self}: rank {self.ranks[self.rank]} is in {self._doing(self.rank)}, "
            f"but rank {self.ranks[other]} is in {self._doing(other)}; ranks must call the same collectives"
        )

    def _doing(self, rank: int) -> str:
        word, size, root = self._words[rank][:3]
        operation = Operation(word >> 20 & 15)
        source = f" from rank {self.ranks[root]}" if operation is Operation.broadcast else ""
        return f"{operation.name} of {size} bytes{source}"

    def _open(self) -> None:
        meet(self.comm, f"the shared memory of {self}", self.timeout_s)
        window = MPI.Win.Allocate_shared(PAGE_BYTES + 2 * self.slot_bytes, 1, comm=self.comm)
        window.Lock_all(MPI.MODE_NOCHECK)
        for rank in range(self.size):
            memory, _ = window.Shared_query(rank)
            self._words.append(memoryview(cast(Any, memory))[:PAGE_BYTES].cast("q"))
            with torch.inference_mode(False):
                self._bytes.append(torch.frombuffer(memory, dtype=torch.uint8)[PAGE_BYTES:])
            slots = self._bytes[-1].data_ptr()
            self._tables[:, rank] = slots - PAGE_BYTES, slots, slots + self.slot_bytes
        self._words[self.rank][0] = 0
        window.Sync()
        self._window = window
        meet(self.comm, f"the shared memory of {self}", self.timeout_s)

    def _free_memory(self) -> None:
        self._views.clear()
        self._bytes.clear()
        for words in self._words:
            words.release()
        self._words.clear()
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
            self._window = None
