"""Hand requests to the replicas as they get free, through one counter in MPI shared or remote memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from spmd.comm.grid import Grid
from spmd.request import Request


class SharedCounter:
    """An integer on rank 0 that any rank reads and adds to by one-sided MPI; nobody has to answer.

    Collective to make and free.
    """

    def __init__(self, grid: Grid) -> None:
        self._group = grid.world
        self._group.barrier()
        self._window = MPI.Win.Allocate(8 if self._group.rank == 0 else 0, 8, comm=self._group.comm)
        if self._group.rank == 0:
            self._window.Lock(0)
            self._window.Put(np.zeros(1, dtype=np.int64), 0)
            self._window.Unlock(0)
        self._group.barrier()

    def add(self, amount: int) -> int:
        """Add `amount` and return the value before."""
        before = np.zeros(1, dtype=np.int64)
        self._window.Lock(0, MPI.LOCK_SHARED)
        self._window.Fetch_and_op(np.array([amount], dtype=np.int64), before, 0, 0, MPI.SUM)
        self._window.Unlock(0)
        return int(before[0])

    def free(self) -> None:
        self._group.barrier()
        self._window.Free()


class WorkQueue:
    """The requests of a run, as one replica takes them.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987): a replica with room takes a share of what is
    left, so shares shrink towards the end and all replicas finish together. Its first rank asks the
    counter and tells the others of the replica. A single replica takes everything at once.
    """

    def __init__(self, requests: Sequence[Request], grid: Grid, counter: SharedCounter | None) -> None:
        self._requests = requests
        self._grid = grid
        self._counter = counter
        self.exhausted = False

    def close(self) -> None:
        """Take nothing more, here or on any other replica. The same call on every rank of the replica."""
        if self._counter is not None and self._grid.replica.rank == 0:
            self._counter.add(len(self._requests))
        self.exhausted = True

    def take(self, room: int) -> Sequence[Request]:
        """At most `room` further requests. The same call on every rank of the replica."""
        if self.exhausted or room < 1:
            return []
        if self._counter is None:
            self.exhausted = True
            return self._requests
        span = None
        if self._grid.replica.rank == 0:
            left = len(self._requests) - self._counter.add(0)
            count = max(1, min(room, -(-left // (2 * self._grid.dp_size))))
            start = self._counter.add(count)
            span = (start, start + count)
        start, stop = self._grid.replica.broadcast_object(span)
        self.exhausted = stop >= len(self._requests)
        return self._requests[start:stop]
