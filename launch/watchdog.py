"""A thread on each rank that ends the job when its rank waits for others in vain, and says why."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping

from mpi4py import MPI

from spmd.comm.ledger import Ledger
from spmd.comm.ledger_view import current_entry, list_ranks, read_header, read_ranks, someone_is_gone
from spmd.launch.hang_report import Verdict, describe, find_cause, find_missing, format_report
from spmd.launch.leaving import ranks_that_left

HEAD_START_S = 5.0  # before the waiting itself gives up, which says less
EXIT_HANG = 1
_TICK_S = 1.0
_SURE_S = 1.5  # for others to leave together, and for a launcher to end the job by itself
_OTHERS_SPEAK_S = 1.0
_PATIENCE_S = 15.0
_MOST_ASKED = 4
_TELL_TAG = 32762
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "FLUX_JOB_ID")


def open_watched(comm: MPI.Comm, timeout_s: float, end: Callable[[int, str], object]) -> Ledger | None:
    """A ledger with a watchdog on each rank of `comm`; None for one rank, or where no ledger can be made.

    Collective. end: ends the whole job with an exit code and a message; called from the watchdog's thread.
    """
    if comm.size == 1:
        return None
    ledger = Ledger.open(comm, job_name(os.environ), timeout_s)
    if ledger is not None:
        Watchdog(ledger, timeout_s, end).start()
    return ledger


def job_name(environment: Mapping[str, str]) -> str:
    """What users call the job: the scheduler's number, or else the process that started this one."""
    for name in _SCHEDULERS:
        if environment.get(name):
            return environment[name]
    return str(os.getppid())


class _WatchThread(threading.Thread):
    def __init__(self, watch: Callable[[], None]) -> None:
        super().__init__(target=watch, name="spmd watchdog", daemon=True)
        self.leaving = threading.Event()


def stop_watching() -> None:
    """End this rank's watchdogs, before `MPI_Finalize`: they may not be inside MPI during it, nor after."""
    for thread in threading.enumerate():
        if isinstance(thread, _WatchThread):
            thread.leaving.set()
            thread.join(_PATIENCE_S)


class Watchdog:
    """Looks once a second where its rank is. It costs nothing while the rank gets on.

    It acts when the rank has been in one collective or wait for `timeout_s` seconds (a rank that computes, or
    idles where that may last for ever, is left alone); when a rank it waits for has left the job; when a rank
    of the node has died; and when the launcher is gone. One rank of each node prints the report.
    """

    def __init__(self, ledger: Ledger, timeout_s: float, end: Callable[[int, str], object]) -> None:
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._end = end
        self._main = threading.main_thread().ident
        self._parent = os.getppid()
        self._host = socket.gethostname()
        header = read_header(ledger.memory)
        assert header is not None
        self._several_nodes = header.world > header.slots
        # Then this thread may send and receive, too.
        self._messages = self._several_nodes and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._slot = next(s.slot for s in read_ranks(ledger.memory) if s.rank == ledger.rank)
        self._suspect: tuple[int, ...] | None = None
        self._left_elsewhere: set[int] = set()
        self._questions: list[MPI.Request] = []  # to ranks of other nodes
        self._stack_shown = False
        self._thread = _WatchThread(self._watch)

    def start(self) -> None:
        self._ledger.explain = self._explain
        self._thread.start()
        # Later than the hook that waits for the other ranks, so it runs before that.
        atexit.register(stop_watching)

    def report(self) -> str:
        """Where each rank of the node is."""
        states = read_ranks(self._ledger.memory)
        where = f"node {self._host}" if self._several_nodes else "the job"
        return format_report(states, time.monotonic_ns(), where)

    def _explain(self) -> str:
        cause = find_cause(read_ranks(self._ledger.memory))
        return f"spmd: {cause.reason}\n{self.report()}"

    def _watch(self) -> None:
        tick = min(_TICK_S, max(0.05, self._timeout_s / 4))
        while not self._ledger.closed and not self._thread.leaving.wait(tick):
            if not self._ledger.closed:
                self._look()

    def _look(self) -> None:
        ledger = self._ledger
        if os.getppid() != self._parent:
            self._end(EXIT_HANG, "lost its launcher, so the job ends")
        if ledger.asked_for_stack and not self._stack_shown:
            self._stack_shown = True
            self._show_stack()
        if self._messages and not self._stack_shown and MPI.COMM_WORLD.iprobe(MPI.ANY_SOURCE, _TELL_TAG):
            self._stack_shown = True
            mine = next(state for state in read_ranks(ledger.memory) if state.slot == self._slot)
            place = describe(mine, time.monotonic_ns())
            os.write(2, f"spmd:   rank {ledger.rank} on node {self._host}: {place}\n".encode())
            self._show_stack()
        number, entered, left, idle = current_entry(ledger.memory, self._slot)
        waited_s = (time.monotonic_ns() - entered) / 1e9 if number and left == 0 else 0.0
        for check in ledger.checks:
            fault = check()
            if fault is not None:
                self._speak(Verdict((ledger.rank,), fault), f"rank {ledger.rank} cannot go on")
        verdict = self._find_gone(waited_s)
        if verdict is not None:
            if verdict.ranks == self._suspect:
                self._speak(verdict, f"rank {ledger.rank} waits in vain")
            self._suspect = verdict.ranks
        elif waited_s > self._timeout_s and not idle:
            time.sleep(min(0.5, 0.02 * self._slot))  # the first rank that waits speaks
            if current_entry(ledger.memory, self._slot)[:3] == (number, entered, 0):
                title = f"rank {ledger.rank} has waited {waited_s:.1f} s (--timeout {self._timeout_s:g})"
                self._speak(find_cause(read_ranks(ledger.memory)), title)

    def _find_gone(self, waited_s: float) -> Verdict | None:
        """A rank that died; or one that left while this rank waits for it."""
        memory = self._ledger.memory
        if someone_is_gone(memory):
            states = read_ranks(memory)
            for state in states:
                if not state.alive and not state.left:
                    return Verdict((state.rank,), f"rank {state.rank} (process {state.pid}) died")
            if waited_s > _SURE_S:
                return find_missing(
                    [state for state in states if state.rank == self._ledger.rank or state.left]
                )
        if self._messages and waited_s > _SURE_S:
            self._left_elsewhere.update(ranks_that_left())
            mine = next(state for state in read_ranks(memory) if state.slot == self._slot).waiting
            awaited = () if mine is None else (mine.peer,) if mine.is_message else mine.members
            gone = sorted(self._left_elsewhere.intersection(awaited))
            if mine is not None and gone:
                waits = f"rank {self._ledger.rank} waits for it in {mine.describe()} at {mine.site}"
                return Verdict(tuple(gone), f"{list_ranks(gone)} has left the job, but {waits}")
        return None

    def _speak(self, verdict: Verdict, title: str) -> None:
        ledger = self._ledger
        if not ledger.claim():  # another rank of this node does
            time.sleep(_PATIENCE_S)
            self._end(EXIT_HANG, "gave up waiting for the end of a job that hangs")
        os.write(2, f"spmd: {title}: {verdict.reason}\n{self.report()}\n".encode())
        here = {
            state.rank: state.slot for state in read_ranks(ledger.memory) if state.alive and not state.left
        }
        self._stack_shown = True
        self._show_stack()
        asked = [here[rank] for rank in verdict.ranks if rank in here and rank != ledger.rank]
        for slot in asked[:_MOST_ASKED]:
            ledger.ask_for_stack(slot)
        for rank in verdict.elsewhere[:_MOST_ASKED] if self._messages else ():
            self._questions.append(MPI.COMM_WORLD.isend(None, rank, _TELL_TAG))
        if asked or self._several_nodes:
            time.sleep(_OTHERS_SPEAK_S + min(_TICK_S, self._timeout_s / 4))
        self._end(EXIT_HANG, f"ends the job: {verdict.reason}")

    def _show_stack(self) -> None:
        frame = sys._current_frames().get(self._main or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (no main thread)\n"
        os.write(2, f"spmd: rank {self._ledger.rank} is here (most recent call last):\n{stack}".encode())
