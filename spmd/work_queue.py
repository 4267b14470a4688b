"""Hand requests to the replicas as they get free, through counters in MPI shared or remote memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from spmd.comm.grid import Grid
from spmd.request import Request

_TAKEN, _FINISHED = 0, 1  # counters: requests, and the cost of those that are done
_CALLS_BETWEEN = 8  # a replica that holds its part does not ask at every step


class SharedCounters:
    """Integers on rank 0 that any rank reads and adds to by one-sided MPI; nobody has to answer.

    Collective to make and free.
    """

    def __init__(self, grid: Grid, count: int) -> None:
        self._group = grid.world
        self._group.barrier()
        self._window = MPI.Win.Allocate(8 * count if self._group.rank == 0 else 0, 8, comm=self._group.comm)
        if self._group.rank == 0:
            zeros = np.zeros(count, dtype=np.int64)
            self._window.Lock(0)
            self._window.Put(zeros, 0)
            self._window.Unlock(0)
        self._group.barrier()

    def add(self, number: int, amount: int) -> int:
        """Add `amount` to a counter and return the value before."""
        added, before = np.array([amount], dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._window.Lock(0, MPI.LOCK_SHARED)
        self._window.Fetch_and_op(added, before, 0, number, MPI.SUM)
        self._window.Unlock(0)
        return int(before[0])

    def free(self) -> None:
        self._group.barrier()
        self._window.Free()


class WorkQueue:
    """The requests of a run, as one replica takes them.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987): a replica with room takes a share of what is
    left, so shares shrink towards the end. It never holds more than its part of all the work that is not
    finished, which keeps the first to ask from taking what the others will need: what a replica has taken,
    it keeps. Its first rank asks the counters and tells the others of the replica. A single replica takes
    everything at once.
    """

    def __init__(self, requests: Sequence[Request], grid: Grid) -> None:
        """Collective over the grid."""
        self._requests = requests
        self._grid = grid
        self._counters = SharedCounters(grid, 2) if grid.dp_size > 1 else None
        costs = [_cost(request) for request in requests]
        self._costs = {request.request_id: cost for request, cost in zip(requests, costs)}
        self._before = np.concatenate([[0], np.cumsum(costs, dtype=np.int64)])  # cost of all before the i-th
        self._held = 0
        self._calls_to_skip = 0
        self.exhausted = False

    def close(self) -> None:
        """Take nothing more, here or on any other replica. The same call on every rank of the replica."""
        if self._counters is not None and self._grid.replica.rank == 0:
            self._counters.add(_TAKEN, len(self._requests))
        self.exhausted = True

    def take(self, room: int) -> Sequence[Request]:
        """At most `room` further requests. The same call on every rank of the replica."""
        if self.exhausted or room < 1:
            return []
        if self._counters is None:
            self.exhausted = True
            return self._requests
        if self._calls_to_skip:
            self._calls_to_skip -= 1
            return []
        span = self._claim(self._counters, room) if self._grid.replica.rank == 0 else None
        start, stop = self._grid.replica.broadcast_object(span)
        self.exhausted = stop >= len(self._requests)
        self._calls_to_skip = _CALLS_BETWEEN if start == stop else 0
        mine = self._requests[start:stop]
        self._held += sum(self._costs[request.request_id] for request in mine)
        return mine

    def finished(self, request_ids: Sequence[str]) -> None:
        """These requests of this replica have ended. The same call on every rank of the replica."""
        if self._counters is None or not request_ids:
            return
        cost = sum(self._costs[request_id] for request_id in request_ids)
        self._held -= cost
        self._calls_to_skip = 0
        if self._grid.replica.rank == 0:
            self._counters.add(_FINISHED, cost)

    def free(self) -> None:
        """Collective over the grid."""
        if self._counters is not None:
            self._counters.free()

    def _claim(self, counters: SharedCounters, room: int) -> tuple[int, int]:
        """The span of requests to take, empty when this replica holds its part already."""
        taken = counters.add(_TAKEN, 0)
        left = len(self._requests) - taken
        if left > 0:
            unfinished = int(self._before[-1]) - counters.add(_FINISHED, 0)
            part = unfinished / self._grid.dp_size - self._held
            if part <= 0 and self._held:
                return taken, taken
            fitting = int(np.searchsorted(self._before[taken + 1 :], self._before[taken] + part, "right"))
            room = min(room, max(1, fitting))
        count = max(1, min(room, -(-left // (2 * self._grid.dp_size))))
        start = counters.add(_TAKEN, count)
        return start, start + count


def _cost(request: Request) -> int:
    """Tokens to compute."""
    return len(request.prompt_token_ids) + request.params.n * request.max_tokens
