"""Ranks of a replica that compute in step agree, at the same step, that it is time to stop."""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from spmd.comm.grid import Grid
from spmd.comm.waiting import wait_until
from spmd.launch.signals import GO_ON, SignalWatch

_TAG = 8
_INTERVAL_S = 0.1
_MAX_STEPS = 8


class StopAgreement:
    """Turns signals that any rank got at any time into a level that all ranks of a replica see in one step.

    Every few steps the replica starts a non-blocking maximum of its ranks' levels and reads the one started
    before, which has been on its way for as many steps. That costs a few microseconds, keeps nobody waiting
    who is not steps ahead, and needs no message when nothing happens. The first rank of each replica tells
    those of the others. `close` is collective over the grid.
    """

    def __init__(self, grid: Grid, watch: SignalWatch) -> None:
        self._grid = grid
        self._watch = watch
        self._level = GO_ON
        self._steps = 0
        self._every = 1
        self._since = time.monotonic()
        self._mine = np.zeros(2)  # level, seconds since the last look
        self._all = np.zeros(2)
        self._request: MPI.Request | None = None
        per_replica = grid.replica.size
        leader = grid.replica.rank == 0
        firsts = range(0, grid.world.size, per_replica) if leader else range(0)
        self._others = [rank for rank in firsts if rank != grid.world.rank]
        self._told_by: set[int] = set()
        self._sends: list[MPI.Request] = []
        watch.attend()

    def step(self) -> int:
        """The agreed level. Call once a step, at the same place, on every rank of the replica."""
        self._steps += 1
        if self._steps < self._every:
            if self._request is not None:
                self._request.Test()  # moves it on
            return self._level
        self._finish()
        now = time.monotonic()
        self._listen()
        self._mine[:] = self._watch.level, now - self._since
        self._steps, self._since = 0, now
        if self._grid.replica.size == 1:
            self._take(self._mine)
        else:
            self._request = self._grid.replica.comm.Iallreduce(self._mine, self._all, MPI.MAX)
        return self._level

    def close(self) -> None:
        """Every replica has stopped or finished: take in what is still under way."""
        self._finish()
        told = self._grid.world.all_gather_objects(bool(self._sends))
        for rank in self._others:
            if told[rank] and rank not in self._told_by:
                self._grid.world.comm.recv(source=rank, tag=_TAG)
        for send in self._sends:
            wait_until(send.Test, "other replicas to hear of the stop", self._grid.world.timeout_s)

    def _finish(self) -> None:
        if self._request is not None:
            what = "ranks of the replica agreeing whether to stop"
            wait_until(self._request.Test, what, self._grid.replica.timeout_s)
            self._request = None
            self._take(self._all)

    def _take(self, agreed: np.ndarray) -> None:
        level, seconds = int(agreed[0]), float(agreed[1])
        self._every = int(min(max(self._every * _INTERVAL_S / max(seconds, 1e-6), 1), _MAX_STEPS))
        if level > self._level:
            self._level = level
            if not self._sends:
                self._sends = [self._grid.world.comm.isend(None, rank, _TAG) for rank in self._others]

    def _listen(self) -> None:
        comm = self._grid.world.comm
        for rank in self._others:
            if rank not in self._told_by and comm.iprobe(rank, _TAG):
                comm.recv(source=rank, tag=_TAG)
                self._told_by.add(rank)
                if self._watch.level == GO_ON:
                    self._watch.ask()
