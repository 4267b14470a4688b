"""Waiting for another rank without burning the core that rank may need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpi4py import MPI

SPINS = 20  # a few microseconds
YIELD_S = 100e-6  # not longer: a Linux core shared by two ranks often goes back to the one that yielded
MIN_SLEEP_S = 20e-6
MAX_SLEEP_S = 1e-3
MAX_IDLE_SLEEP_S = 10e-3  # once it has waited for two seconds
LOOKS = 8  # after a sleep: each look at an MPI request also moves a part of its message

_yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class HangError(RuntimeError):
    """Another rank did not do its part within the time limit. The communicators involved are unusable."""


def wait_until(
    predicate: Callable[[], bool],
    what: str | Callable[[], str],
    timeout_s: float,
    progress: Callable[[], object] | None = None,
) -> None:
    """Return once `predicate()` is true; raise `HangError` when that takes longer than `timeout_s` seconds.

    Spins a few microseconds, then gives the core away between looks, then sleeps for a tenth of the time
    waited so far, between 20 us and 1 ms, and after 0.2 s for a 200th of it, up to 10 ms: the added delay
    stays near 10 % and an idle rank costs next to nothing. `what` names the awaited thing in the error (a
    callable is asked only then). `progress` is called now and then, to let the MPI library move this rank's
    pending messages.
    """
    if predicate():
        return
    began = time.perf_counter()
    for _ in range(SPINS):
        if predicate():
            return
    elapsed, turn = 0.0, 0
    while elapsed < YIELD_S:
        if progress is not None and turn % 8 == 0:
            progress()
        _yield_core()
        if predicate():
            return
        turn += 1
        elapsed = time.perf_counter() - began
    while elapsed < timeout_s:
        if progress is not None:
            progress()
        longest = min(MAX_IDLE_SLEEP_S, max(MAX_SLEEP_S, elapsed / 200))
        time.sleep(min(longest, max(MIN_SLEEP_S, elapsed / 10)))
        for _ in range(LOOKS):
            if predicate():
                return
        elapsed = time.perf_counter() - began
    raise HangError(f"{what if isinstance(what, str) else what()}: not done after {elapsed:.1f} s")


def meet(comm: MPI.Comm, what: str, timeout_s: float) -> None:
    """Wait, asleep, until every rank of `comm` is here, so that a blocking MPI call made next is brief."""
    wait_until(comm.Ibarrier().Test, f"ranks meeting for {what}", timeout_s)
