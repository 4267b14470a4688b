"""Where every rank of a node is: the last collectives and waits of each, in a file that they all map."""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from spmd.comm.processes import pid_namespace, process_start

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

NAME = "spmd-ledger"
MAGIC = 0x53504D444C473031
RING, MAX_GROUPS, MAX_SITES = 32, 64, 256
WORD, ENTRY_BYTES, GROUP_BYTES, SITE_BYTES = 8, 64, 192, 160
HEAD_BYTES = 1024  # of the file: magic, slots, world size, then the job's name
NAME_START = 64
# Offsets in a rank's slot.
RING_START = 256
GROUPS_START = RING_START + RING * ENTRY_BYTES
SITES_START = GROUPS_START + MAX_GROUPS * GROUP_BYTES
SLOT_BYTES = -(-(SITES_START + MAX_SITES * SITE_BYTES) // 4096) * 4096
ENTRY = struct.Struct(
    "8q"
)  # number, packed place, number in the group, bytes, peer or root, 0, entered, left
IDLE_BIT = 1 << 7
_OTHERS_ARRIVE_S, _OTHERS_SPEAK_S = 0.2, 2.0
_THROUGH = (
    "comm/group.py",
    "comm/nccl.py",
    "comm/pending.py",
    "comm/agree.py",
    "spmd/clock.py",
    "contextlib.py",
)


class Place(IntEnum):
    """Words at the start of a slot."""

    rank = 0
    pid = 1
    started = 2  # the process's start, in clock ticks since boot: tells it from a later one of that pid
    state = 3
    count = 4  # entries made so far
    asked_for_stack = 5
    namespace = 6  # in which `pid` counts


class State(IntEnum):
    running = 1
    left = 2


class Operation:
    """What a rank can be in; plain integers, as an enumeration costs a third of an entry's time."""

    barrier: Final = 1
    all_reduce: Final = 2
    all_reduce_max: Final = 3
    all_gather: Final = 4
    reduce_scatter: Final = 5
    broadcast: Final = 6
    broadcast_object: Final = 7
    gather_objects: Final = 8
    all_gather_objects: Final = 9
    send: Final = 10
    recv: Final = 11
    kernel_reduce: Final = 12  # of a kernel, recorded only when it has to wait
    device_wait: Final = 13  # the host waits for its GPU


FIRST_UNNUMBERED = Operation.send  # these do not count in the numbers that ranks of a group have in common
OPERATION_NAMES = {number: name for name, number in vars(Operation).items() if isinstance(number, int)}


class Ledger:
    """This rank's slot, and the file all ranks of the node share; made by `Ledger.open`.

    Writing one entry and its end takes about a microsecond: no text is made but the first time a line of
    code is seen. The file has no name any more once all have opened it, so nothing is left behind however the
    job ends; `/proc/PID/fd` of a rank leads to it (see ledger_view.py). One thread writes. This file does not
    need MPI, which readers have not started.
    """

    def __init__(self, fd: int, slots: int, slot: int, rank: int) -> None:
        self.fd = fd
        self.memory = mmap.mmap(fd, HEAD_BYTES + slots * SLOT_BYTES)
        self.rank = rank
        self.closed = False
        self.explain: Callable[[], str] | None = None  # says where all ranks are, for errors
        self.checks: list[
            Callable[[], str | None]
        ] = []  # for a watchdog to call: what is broken, if anything
        start = HEAD_BYTES + slot * SLOT_BYTES
        self._slot = memoryview(self.memory)[start : start + SLOT_BYTES]
        self._words = self._slot.cast("q")
        self._all_words = memoryview(self.memory).cast("q")
        self._ring = start + RING_START
        self._count_word = start // WORD + Place.count
        self._number = 0
        self._counts: list[int] = []
        self._sites: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType] = []  # keeps them alive: sites are found by their address
        self._texts: list[str] = []
        words = self._words
        words[Place.rank] = rank
        words[Place.pid] = os.getpid()
        words[Place.started] = process_start(os.getpid())
        words[Place.namespace] = pid_namespace()
        words[Place.state] = State.running

    @classmethod
    def open(cls, comm: MPI.Comm, job: str, timeout_s: float) -> Ledger | None:
        """The ledger of this node's ranks of `comm`, or None where no file can be made. Collective.

        `job`: what to call it to people.
        """
        from mpi4py import MPI

        from spmd.comm.waiting import meet

        meet(comm, "the ledger of collectives", timeout_s)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        path = None
        if node.rank == 0:
            with suppress(OSError):
                path = _create(job, node.size, MPI.COMM_WORLD.size)
        path = node.bcast(path, 0)
        ledger = None
        if path is not None:
            with suppress(OSError):
                ledger = cls(os.open(path, os.O_RDWR), node.size, node.rank, MPI.COMM_WORLD.rank)
                atexit.register(ledger.leave)
        complete = all(node.allgather(ledger is not None))
        if node.rank == 0 and path is not None:
            Path(path).unlink(missing_ok=True)
        node.Free()
        return ledger if complete else None

    def add_group(self, name: str, ranks: tuple[int, ...]) -> int:
        """A number for the group, to give to `run`."""
        group = min(len(self._counts), MAX_GROUPS - 1)
        if group == len(self._counts):
            self._counts.append(0)
        self._put(GROUPS_START + group * GROUP_BYTES, f"{name} {pack_ranks(ranks)}", GROUP_BYTES)
        return group

    def run(
        self,
        group: int,
        operation: int,
        size: int,
        peer: int,
        idle: bool,
        call: Callable[..., T],
        *arguments: Any,
    ) -> T:
        """`call(*arguments)`, with this rank shown in `operation` of `size` bytes while it lasts.

        peer: the rank in the job of root or partner, or -1. idle: it may last for ever, which is no hang.
        The line shown is that of the first caller outside the communication layer.
        """
        frame = sys._getframe(2)
        site = self._sites.get((id(frame.f_code), frame.f_lasti), -1)
        if site < 0:
            site = self._find_site(frame)
        counts = self._counts
        sequence = counts[group]
        if operation < FIRST_UNNUMBERED:
            sequence += 1
            counts[group] = sequence
        self._number = number = self._number + 1
        at = self._ring + number % RING * ENTRY_BYTES
        packed = operation | group << 8 | site << 24
        ENTRY.pack_into(
            self.memory,
            at,
            number,
            packed | IDLE_BIT if idle else packed,
            sequence,
            size,
            peer,
            0,
            monotonic_ns(),
            0,
        )
        words = self._all_words
        words[self._count_word] = number
        left = (at >> 3) + 7
        try:
            result = call(*arguments)
        except BaseException as error:
            words[left] = -monotonic_ns()  # not done, but no longer waiting
            if self.explain is not None and isinstance(error, RuntimeError):
                self._add_explanation(error, self.explain)
            raise
        words[left] = monotonic_ns()
        return result

    def leave(self) -> None:
        """Say that this rank will call no further collective. Without effect in a child that was forked."""
        if os.getpid() == self._words[Place.pid]:
            self._words[Place.state] = State.left

    def close(self) -> None:
        """Say so, and that nobody need watch any more."""
        self.leave()
        if not self.closed:
            self.closed = True
            atexit.unregister(self.leave)
            os.close(self.fd)

    def claim(self) -> bool:
        """Whether this rank may speak for the node: true for one rank, from then on."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def ask_for_stack(self, slot: int) -> None:
        """Ask the watchdog of another rank of the node to print where that rank's main thread is."""
        at = HEAD_BYTES + slot * SLOT_BYTES + Place.asked_for_stack * WORD
        self.memory[at : at + WORD] = (1).to_bytes(WORD, "little")

    @property
    def asked_for_stack(self) -> bool:
        return bool(self._words[Place.asked_for_stack])

    def _add_explanation(self, error: RuntimeError, explain: Callable[[], str]) -> None:
        """Say where all ranks are in what Python (from 3.11 on) prints of the error, on one rank of the node.
        The others, which tend to fail for the same reason, let it speak first."""
        if self.claim():
            time.sleep(_OTHERS_ARRIVE_S)
            error.__notes__ = [explain()]  # type: ignore[attr-defined]
        else:
            time.sleep(_OTHERS_SPEAK_S)

    def _find_site(self, frame: FrameType) -> int:
        """The number of the line that called the communication layer. Slow for calls by way of helpers."""
        outer: FrameType | None = frame
        while outer is not None and outer.f_code.co_filename.endswith(_THROUGH):
            outer = outer.f_back
        chosen = frame if outer is None else outer
        key = (id(chosen.f_code), chosen.f_lasti)
        site = self._sites.get(key, -1)
        if site >= 0:
            return site
        code = chosen.f_code
        folder, name = os.path.split(code.co_filename)
        text = f"{os.path.basename(folder)}/{name}:{chosen.f_lineno} {code.co_name}"
        site = self._texts.index(text) if text in self._texts else len(self._texts)
        if site >= MAX_SITES - 1:
            site, text = MAX_SITES - 1, "(one of too many lines to list)"
        elif site == len(self._texts):
            self._texts.append(text)
        self._put(SITES_START + site * SITE_BYTES, text, SITE_BYTES)
        self._codes.append(code)
        self._sites[key] = site
        return site

    def _put(self, at: int, text: str, room: int) -> None:
        data = text.encode()[: room - 1]
        self._slot[at : at + room] = data.ljust(room, b"\0")


def pack_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks in short: "0-3", or "0-12:4" for 0, 4, 8, 12; lists with no step as they are.

    >>> pack_ranks((0, 1, 2)), pack_ranks((1, 5, 9)), pack_ranks((3,)), pack_ranks((0, 1, 5))
    ('0-2', '1-9:4', '3', '0,1,5')
    """
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) < 2 or len(steps) > 1:
        return ",".join(map(str, ranks))
    step = steps.pop()
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")


def unpack_ranks(text: str) -> tuple[int, ...]:
    """The ranks that `pack_ranks` wrote. A list that was cut off lacks its last ranks."""
    if "-" in text:
        span, _, step = text.partition(":")
        first, last = map(int, span.split("-"))
        return tuple(range(first, last + 1, int(step or 1)))
    return tuple(int(part) for part in text.split(",") if part)


def ledger_folder() -> Path:
    """Where ledger files are made: in memory if the node has a place for that."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _create(job: str, slots: int, world: int) -> str:
    """Make the file, for this user only, after removing those of jobs that died while they made theirs."""
    folder = ledger_folder()
    prefix = f"{NAME}-{os.getuid()}-"
    for stale in folder.glob(f"{prefix}*"):
        maker = stale.name.rpartition("-")[2]
        if maker.isdigit() and process_start(int(maker)) == -1:
            with suppress(OSError):
                stale.unlink()
    path = folder / f"{prefix}{os.getpid()}"
    with suppress(FileNotFoundError):
        path.unlink()
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, HEAD_BYTES + slots * SLOT_BYTES)
        head = struct.pack("3q", MAGIC, slots, world).ljust(NAME_START, b"\0")
        os.pwrite(fd, head + job.encode()[: HEAD_BYTES - NAME_START - 1], 0)
    finally:
        os.close(fd)
    return str(path)
