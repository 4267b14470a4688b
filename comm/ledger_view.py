"""Reading a ledger: where each rank of a node is, as plain data."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spmd.comm.ledger import (
    ENTRY,
    ENTRY_BYTES,
    FIRST_UNNUMBERED,
    GROUP_BYTES,
    GROUPS_START,
    HEAD_BYTES,
    IDLE_BIT,
    MAGIC,
    NAME,
    NAME_START,
    OPERATION_NAMES,
    RING,
    RING_START,
    SITE_BYTES,
    SITES_START,
    SLOT_BYTES,
    WORD,
    Operation,
    Place,
    State,
    unpack_ranks,
)
from spmd.comm.processes import pid_namespace, process_start

_ROOTED = (Operation.broadcast, Operation.broadcast_object, Operation.gather_objects)
_SAME_SIZE = (
    Operation.all_reduce,
    Operation.all_reduce_max,
    Operation.all_gather,
    Operation.reduce_scatter,
    Operation.broadcast,
)


@dataclass(frozen=True)
class Entry:
    """One collective or wait of a rank. Times are `time.monotonic_ns`, which the ranks of a node share.

    sequence: how many collectives of the group this is (messages have none). peer: root or partner, a rank
    of the job. left_ns: 0 while the rank is in it, negative when it gave up.
    """

    number: int
    operation: int
    group: str
    members: tuple[int, ...]
    sequence: int
    size: int
    peer: int
    idle: bool
    site: str
    entered_ns: int
    left_ns: int

    @property
    def waiting(self) -> bool:
        return self.left_ns == 0

    @property
    def is_message(self) -> bool:
        return self.operation in (Operation.send, Operation.recv)

    @property
    def is_numbered(self) -> bool:
        """Whether `sequence` is the same on all ranks of the group that are in this."""
        return self.operation < FIRST_UNNUMBERED

    @property
    def signature(self) -> tuple[int, int, int]:
        """What all ranks of the group must agree on."""
        return (
            self.operation,
            self.size if self.operation in _SAME_SIZE else 0,
            self.peer if self.operation in _ROOTED else -1,
        )

    def describe(self) -> str:
        """Such as "all_reduce of 4096 bytes, number 7 of the tp group (ranks 0-2)"."""
        text = OPERATION_NAMES.get(self.operation, f"operation {self.operation}")
        if self.size or self.is_message:
            text += f" of {self.size} bytes"
        if self.operation in (Operation.send, Operation.gather_objects):
            text += f" to rank {self.peer}"
        elif self.operation in _ROOTED or self.operation == Operation.recv:
            text += f" from rank {self.peer}"
        if self.is_message:
            return f"{text}, {self.group} group"
        number = f"number {self.sequence} of " if self.is_numbered else ""
        return f"{text}, {number}the {self.group} group ({list_ranks(self.members)})"


@dataclass(frozen=True)
class RankState:
    """A rank of this node: its process, its place in the file, its last collectives, oldest first."""

    slot: int
    rank: int
    pid: int
    alive: bool
    left: bool
    entries: tuple[Entry, ...]

    @property
    def last(self) -> Entry | None:
        return self.entries[-1] if self.entries else None

    @property
    def waiting(self) -> Entry | None:
        """What this rank sits in, if it does."""
        last = self.last
        return last if last is not None and last.waiting and self.alive and not self.left else None


@dataclass(frozen=True)
class Header:
    """What a ledger says of itself. world: number of ranks of the job, on all nodes."""

    job: str
    slots: int
    world: int


def read_header(memory: mmap.mmap) -> Header | None:
    """None when this is no ledger (of this version)."""
    if len(memory) < HEAD_BYTES:
        return None
    magic, slots, world = struct.unpack_from("3q", memory, 0)
    if magic != MAGIC or len(memory) < HEAD_BYTES + slots * SLOT_BYTES:
        return None
    return Header(_text(memory, NAME_START, HEAD_BYTES - NAME_START), slots, world)


def read_ranks(memory: mmap.mmap) -> list[RankState]:
    """Every rank of the node, by rank; slots that are not taken yet are left out."""
    header = read_header(memory)
    slots = 0 if header is None else header.slots
    states = [_read_slot(memory, slot) for slot in range(slots)]
    return sorted((state for state in states if state is not None), key=lambda state: state.rank)


def current_entry(memory: mmap.mmap, slot: int) -> tuple[int, int, int, bool]:
    """(number, entered, left, idle) of a slot's last entry, cheaply; number 0 when there is none."""
    start = HEAD_BYTES + slot * SLOT_BYTES
    (number,) = struct.unpack_from("q", memory, start + Place.count * WORD)
    if number == 0:
        return 0, 0, 1, False
    found = ENTRY.unpack_from(memory, start + RING_START + number % RING * ENTRY_BYTES)
    return found[0], found[6], found[7], bool(found[1] & IDLE_BIT)


def someone_is_gone(memory: mmap.mmap) -> bool:
    """Whether a rank of the node has left or died, cheaply."""
    header = read_header(memory)
    for slot in range(0 if header is None else header.slots):
        head = struct.unpack_from("7q", memory, HEAD_BYTES + slot * SLOT_BYTES)
        state = head[Place.state]
        if state == State.left or (state and not _is_alive(head)):
            return True
    return False


def list_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """ "rank 3", "ranks 0-2", "ranks 1, 4, 6"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered))}"


def running_ledgers() -> Iterator[tuple[int, mmap.mmap]]:
    """(process id of a rank, its ledger) for every job of this user's, or, as root, of anybody's, on this
    node. The files have no name, but the ranks that hold them open lead there. Linux only."""
    seen = set()
    for folder in sorted(Path("/proc").glob("[0-9]*/fd"), key=lambda path: int(path.parent.name)):
        with suppress(OSError):
            for link in folder.iterdir():
                if not Path(os.readlink(link)).name.startswith(f"{NAME}-"):
                    continue
                status = os.stat(link)
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    fd = os.open(link, os.O_RDONLY)
                    try:
                        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
                    finally:
                        os.close(fd)
                    if read_header(memory) is not None:
                        yield int(folder.parent.name), memory


def _is_alive(head: tuple[int, ...]) -> bool:
    """Whether a slot's process is there. One in another container's numbering is taken to be."""
    return head[Place.namespace] != pid_namespace() or process_start(head[Place.pid]) == head[Place.started]


def _read_slot(memory: mmap.mmap, slot: int) -> RankState | None:
    start = HEAD_BYTES + slot * SLOT_BYTES
    head = struct.unpack_from("7q", memory, start)
    state = head[Place.state]
    if state == 0:
        return None
    pid = head[Place.pid]
    count = head[Place.count]
    entries = []
    for number in range(max(1, count - RING + 2), count + 1):  # the rank may be writing over the oldest
        found = ENTRY.unpack_from(memory, start + RING_START + number % RING * ENTRY_BYTES)
        if found[0] == number:
            entries.append(_entry(memory, start, found))
    alive = _is_alive(head)
    return RankState(slot, head[Place.rank], pid, alive, state == State.left, tuple(entries))


def _entry(memory: mmap.mmap, start: int, found: tuple[int, ...]) -> Entry:
    number, packed, sequence, size, peer, _, entered, left = found
    group = packed >> 8 & 0xFFFF
    name, _, ranks = _text(memory, start + GROUPS_START + group * GROUP_BYTES, GROUP_BYTES).rpartition(" ")
    site = _text(memory, start + SITES_START + (packed >> 24) * SITE_BYTES, SITE_BYTES)
    operation = packed & (IDLE_BIT - 1)
    members = unpack_ranks(ranks)
    idle = bool(packed & IDLE_BIT)
    return Entry(number, operation, name, members, sequence, size, peer, idle, site, entered, left)


def _text(memory: mmap.mmap, start: int, room: int) -> str:
    return memory[start : start + room].partition(b"\0")[0].decode(errors="replace")
