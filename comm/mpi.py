"""Collectives over MPI messages: for ranks on several nodes, and for GPU tensors staged through the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from mpi4py import MPI
from torch import Tensor

from spmd.comm.group import DEFAULT_TIMEOUT_S, RESERVED_TAG, Combine, Group
from spmd.comm.partition import Partition
from spmd.comm.pending import memory_of
from spmd.comm.reduce import sum_into
from spmd.comm.rounds import rounds


class MpiGroup(Group):
    """Group over non-blocking MPI calls. MPI carries bytes only; the ranks add the numbers, in rank order.

    A reduction of at most `one_shot_bytes` gathers all ranks' tensors on all of them; a larger one lets each
    rank sum its own part (the two phases of Rabenseifner's algorithm). Parts go straight to their rank, not
    by MPI_Ialltoallv, which in MPICH hardly moves while its callers sleep between looks. `piece_bytes`
    bounds one exchange, and so the extra memory and the 32-bit counts of MPI-3 libraries.
    """

    backend = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm,
        name: str = "group",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        one_shot_bytes: int = 32 << 10,
        piece_bytes: int = 256 << 20,
    ) -> None:
        super().__init__(comm, name, timeout_s)
        self.one_shot_bytes = one_shot_bytes
        self.piece_bytes = piece_bytes

    def barrier(self) -> None:
        self._wait(self.comm.Ibarrier(), "barrier")

    def _reduce(self, flat: Tensor, combine: Combine) -> None:
        what = f"all_reduce of {flat.numel() * flat.element_size()} bytes"
        if flat.numel() * flat.element_size() <= self.one_shot_bytes:
            received = torch.empty(self.size, flat.numel(), dtype=flat.dtype)
            self._gather_once(flat, [flat.numel()] * self.size, received, what)
            combine(flat, received.unbind())
            return
        for piece in flat.split(max(1, self.piece_bytes // flat.element_size())):
            counts = Partition.even(piece.numel(), self.size).counts
            summed = torch.empty(counts[self.rank], dtype=flat.dtype)
            self._scatter_once(piece, counts, summed, combine, what)
            self._gather_once(summed, counts, piece, what)

    def _all_gather(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        what = f"all_gather of {out.numel() * out.element_size()} bytes"
        if out.numel() * out.element_size() <= self.piece_bytes:
            self._gather_once(flat, counts, out, what)
            return
        parts = out.split(list(counts))
        for spans in rounds(counts, self._elements_a_rank(flat)):
            widths = [stop - start for start, stop in spans]
            received = torch.empty(sum(widths), dtype=flat.dtype)
            self._gather_once(flat[slice(*spans[self.rank])], widths, received, what)
            for part, span, piece in zip(parts, spans, received.split(widths)):
                part[slice(*span)].copy_(piece)

    def _reduce_scatter(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        what = f"reduce_scatter of {flat.numel() * flat.element_size()} bytes"
        if flat.numel() * flat.element_size() <= self.piece_bytes:
            self._scatter_once(flat, counts, out, sum_into, what)
            return
        parts = flat.split(list(counts))
        for spans in rounds(counts, self._elements_a_rank(flat)):
            packed = torch.cat([part[slice(*span)] for part, span in zip(parts, spans)])
            widths = [stop - start for start, stop in spans]
            self._scatter_once(packed, widths, out[slice(*spans[self.rank])], sum_into, what)

    def _broadcast(self, flat: Tensor, root: int) -> None:
        what = f"broadcast of {flat.numel() * flat.element_size()} bytes from {self._describe(root)}"
        for piece in flat.split(max(1, self.piece_bytes // flat.element_size())):
            self._wait(self.comm.Ibcast((memory_of(piece), MPI.BYTE), root), what)

    def _elements_a_rank(self, flat: Tensor) -> int:
        return max(1, self.piece_bytes // (flat.element_size() * self.size))

    def _gather_once(self, mine: Tensor, counts: Sequence[int], out: Tensor, what: str) -> None:
        """All ranks' parts, one after the other, in `out`."""
        target = (memory_of(out), _layout(counts, out.element_size()), MPI.BYTE)
        self._wait(self.comm.Iallgatherv((memory_of(mine), MPI.BYTE), target), what)

    def _scatter_once(
        self, flat: Tensor, counts: Sequence[int], out: Tensor, combine: Combine, what: str
    ) -> None:
        """This rank's part of all ranks' `flat`, combined in rank order, in `out`."""
        parts = flat.split(list(counts))
        received = torch.empty(self.size, counts[self.rank], dtype=flat.dtype)
        received[self.rank].copy_(parts[self.rank])
        requests = []
        for step in range(1, self.size):
            source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
            requests.append(self.comm.Irecv((memory_of(received[source]), MPI.BYTE), source, RESERVED_TAG))
            requests.append(self.comm.Isend((memory_of(parts[target]), MPI.BYTE), target, RESERVED_TAG))
        self._wait_all(requests, what)
        combine(out, received.unbind())


def _layout(counts: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Byte counts and byte offsets of parts that follow each other."""
    sizes = [count * width for count in counts]
    return sizes, [0, *accumulate(sizes[:-1])]
