"""Bring finished requests from the replicas to rank 0 while they all work on."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from spmd.comm.grid import Grid
from spmd.comm.waiting import wait_until
from spmd.outputs import RequestOutput

_TAG = 7


class OutputCollector:
    """Rank 0 gets every replica's outputs through `on_output`; the first rank of each other replica sends.

    Ranks that are neither do nothing here.
    """

    def __init__(self, grid: Grid, on_output: Callable[[RequestOutput], None], timeout_s: float) -> None:
        self._comm = grid.world.comm
        self._root = grid.world.rank == 0
        self._sender = grid.replica.rank == 0 and not self._root
        self._on_output = on_output
        self._timeout_s = timeout_s
        self._open = grid.dp_size - 1 if self._root else 0
        self._sends: list[MPI.Request] = []

    def put(self, outputs: list[RequestOutput]) -> None:
        """Hand over what this rank's replica has finished, and take in what has arrived. Never waits."""
        if self._root:
            for output in outputs:
                self._on_output(output)
            self._receive()
        elif self._sender:
            self._sends = [send for send in self._sends if not send.Test()]
            if outputs:
                self._sends.append(self._comm.isend(outputs, 0, _TAG))

    def close(self) -> None:
        """Rank 0 returns when all replicas have closed, the others when their outputs are under way."""
        if self._root:
            while self._open:
                wait_until(self._receive, "outputs of the other replicas", self._timeout_s, None)
        elif self._sender:
            self._sends.append(self._comm.isend(None, 0, _TAG))
            wait_until(
                lambda: MPI.Request.Testall(self._sends), "rank 0 to take outputs", self._timeout_s, None
            )
            self._sends = []

    def _receive(self) -> bool:
        received = False
        while self._open and self._comm.iprobe(MPI.ANY_SOURCE, _TAG):
            outputs = self._comm.recv(source=MPI.ANY_SOURCE, tag=_TAG)
            received = True
            if outputs is None:
                self._open -= 1
            else:
                for output in outputs:
                    self._on_output(output)
        return received
