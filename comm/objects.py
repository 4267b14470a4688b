"""Pickled objects of any size between the ranks of a communicator, by non-blocking MPI calls."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from spmd.comm.rounds import rounds

HEAD_BYTES = 1024  # a broadcast object this small travels in one message
PIECE_BYTES = 1 << 30

Wait = Callable[[MPI.Request], None]


def broadcast_object(comm: MPI.Intracomm, obj: Any, root: int, wait: Wait) -> Any:
    """The root's `obj` on every rank; the root gets its own object back, unpickled ones go to the others."""
    head = bytearray(HEAD_BYTES)
    room = HEAD_BYTES - 8
    data = bytearray()
    if comm.rank == root:
        data = bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
        head[:8] = len(data).to_bytes(8, "little")
        head[8 : 8 + min(room, len(data))] = data[:room]
    wait(comm.Ibcast((head, MPI.BYTE), root))
    size = int.from_bytes(head[:8], "little")
    if comm.rank != root:
        data = bytearray(size)
        data[:room] = head[8 : 8 + min(room, size)]
    view = memoryview(data)
    for start in range(room, size, PIECE_BYTES):
        wait(comm.Ibcast((view[start : start + PIECE_BYTES], MPI.BYTE), root))
    return obj if comm.rank == root else pickle.loads(data)


def gather_objects(
    comm: MPI.Intracomm, obj: Any, root: int | None, wait: Wait, piece_bytes: int = PIECE_BYTES
) -> list[Any] | None:
    """Every rank's object in rank order, on `root` (elsewhere None) or, with root None, on every rank."""
    data = memoryview(bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)))
    sizes = array("q", bytes(8 * comm.size))
    wait(comm.Iallgather(array("q", [len(data)]), sizes))
    here = root is None or comm.rank == root
    gathered = [bytearray() for _ in range(comm.size)]
    for spans in rounds(sizes, max(1, piece_bytes // comm.size)):
        low, high = spans[comm.rank]
        counts = [stop - start for start, stop in spans]
        starts = [sum(counts[:rank]) for rank in range(comm.size)]
        received = bytearray(sum(counts) if here else 0)
        target = (received, (counts, starts), MPI.BYTE)
        if root is None:
            wait(comm.Iallgatherv((data[low:high], MPI.BYTE), target))
        else:
            wait(comm.Igatherv((data[low:high], MPI.BYTE), target if here else None, root))
        if here:
            for part, start, count in zip(gathered, starts, counts):
                part += received[start : start + count]
    return [pickle.loads(part) for part in gathered] if here else None
