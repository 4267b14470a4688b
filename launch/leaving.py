"""Ranks start and end together: a rank that leaves early is noticed by those that need it."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress

from mpi4py import MPI

from spmd.comm.ledger_view import list_ranks
from spmd.comm.waiting import HangError

_HERE_TAG, _LEFT_TAG, _END_TAG = 32764, 32765, 32763
_QUIET_S = 1.0
_LOOK_S = 0.2
_HEAD_START_S = 5.0


def install_exit_hook() -> None:
    """At the end of the program, wait asleep for the other ranks' ends; tell them if they are not near.

    Ranks that wait for this one then end the job (see `assemble` and watchdog.py), instead of waiting until
    their time limit. Without effect in a job of one rank, or after `MPI_Finalize`.
    """
    if MPI.COMM_WORLD.size > 1:
        atexit.register(_end_together, os.getpid())


def assemble(comm: MPI.Comm, timeout_s: float) -> None:
    """Wait, asleep, until every rank of `comm` has called this.

    Raises `HangError` after `timeout_s` seconds, which on the first rank names those that are missing, and
    `RuntimeError` when one of them has left the job.
    """
    if comm.size == 1:
        return
    ranks = world_ranks(comm)
    began = time.monotonic()
    limit = timeout_s if comm.rank == 0 else timeout_s + _HEAD_START_S

    def meanwhile(missing: list[int]) -> None:
        left = [rank for rank in ranks_that_left() if rank in ranks]
        if left:
            raise RuntimeError(
                f"{list_ranks(left)} left the job while rank {ranks[comm.rank]} waited for all ranks to start"
            )
        if time.monotonic() - began > limit:
            raise HangError(
                f"{list_ranks([ranks[rank] for rank in missing])} did not come within {limit:g} s to where "
                "all ranks start together"
            )

    _star(comm, _HERE_TAG, meanwhile)


def ranks_that_left() -> list[int]:
    """Ranks of the job that have said so since the last call."""
    world, status, left = MPI.COMM_WORLD, MPI.Status(), []
    while world.iprobe(MPI.ANY_SOURCE, _LEFT_TAG, status):
        world.recv(source=status.Get_source(), tag=_LEFT_TAG)
        left.append(status.Get_source())
    return left


def world_ranks(comm: MPI.Comm) -> list[int]:
    """Ranks in the job of the ranks of `comm`."""
    world, mine = MPI.COMM_WORLD.Get_group(), comm.Get_group()
    ranks = list(MPI.Group.Translate_ranks(mine, None, world))
    world.Free()
    mine.Free()
    return ranks


def _end_together(pid: int) -> None:
    if MPI.Is_finalized() or os.getpid() != pid:  # or in a child that was forked
        return
    world = MPI.COMM_WORLD
    began = time.monotonic()
    told: list[MPI.Request] = []

    def meanwhile(missing: list[int]) -> None:
        if not told and time.monotonic() - began > _QUIET_S:
            told.extend(
                world.isend(None, rank, _LEFT_TAG) for rank in range(world.size) if rank != world.rank
            )

    with suppress(KeyboardInterrupt):
        _star(world, _END_TAG, meanwhile)
        # What was told has to be received before MPI_Finalize: with messages left over, MPICH's ranks may
        # leave it at different times, and its launcher kills those that are still inside.
        _wait(dict(enumerate(told)), lambda missing: None)
        _star(world, _END_TAG, lambda missing: None)
    ranks_that_left()


def _star(comm: MPI.Comm, tag: int, meanwhile: Callable[[list[int]], None]) -> None:
    """Return once every rank is here: all tell the first one, which then tells them. Not a barrier, because
    one that a rank is in for another reason would be completed by it. `meanwhile` gets the ranks that have
    not come, as far as this rank knows, several times a second."""
    if comm.rank == 0:
        awaited = {rank: comm.irecv(source=rank, tag=tag) for rank in range(1, comm.size)}
        _wait(awaited, meanwhile)
        _wait({rank: comm.isend(None, rank, tag) for rank in range(1, comm.size)}, meanwhile)
    else:
        _wait({0: comm.isend(None, 0, tag)}, meanwhile)
        _wait({0: comm.irecv(source=0, tag=tag)}, meanwhile)


def _wait(requests: dict[int, MPI.Request], meanwhile: Callable[[list[int]], None]) -> None:
    pause, looked = 0.0005, time.monotonic()
    while True:
        for rank in [rank for rank, request in requests.items() if request.test()[0]]:
            del requests[rank]
        if not requests:
            return
        time.sleep(pause)
        pause = min(0.01, pause * 1.5)
        if time.monotonic() - looked > _LOOK_S:
            looked = time.monotonic()
            meanwhile(sorted(requests))
