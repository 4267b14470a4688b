"""Making NCCL communicators so that what goes wrong on one rank is heard on all."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from mpi4py import MPI

from spmd.comm.errors import UserError
from spmd.comm.group import RESERVED_TAG, Group
from spmd.comm.nccl_library import Communicator, NcclLibrary
from spmd.comm.waiting import wait_until

_ADVICE = "see NCCL_DEBUG=INFO, or use --comm-backend mpi, which does without NCCL"


def open_communicators(
    host: Group, library: NcclLibrary, device: torch.device, sets: Sequence[Sequence[int]]
) -> list[Communicator | None]:
    """For each set of ranks of `host` a communicator, in the order of `sets`; None where this rank is not in
    the set. Collective over `host`, with the same sets.

    The first rank of a set makes its id, which travels over MPI. Raises `UserError`, the same on every rank
    of `host`, when an id cannot be made or a rank cannot join, though the others of the set then wait inside
    NCCL for ever: each rank joins in a thread of its own, which is left there.
    """
    library.use_device(device)
    mine: dict[int, object] = {}
    trouble: str | None = None
    for number, ranks in enumerate(sets):
        if ranks[0] == host.rank and trouble is None:
            try:
                mine[number] = library.unique_id()
            except Exception as error:  # whatever it is, the other ranks wait for news
                trouble = f"cannot make the id of a communicator: {type(error).__name__}: {error}"
    ids: dict[int, object] = {}
    troubles: list[str | None] = []
    for made, failure in host.all_gather_objects((mine, trouble)):
        ids.update(made)
        troubles.append(failure)
    _raise_alike(host, troubles)
    host.barrier()

    joined: list[Communicator | None] = []
    failures: list[str] = []
    done = threading.Event()

    def join() -> None:
        try:
            library.use_device(device)
            for number, ranks in enumerate(sets):
                inside = host.rank in ranks
                place = ranks.index(host.rank) if inside else -1
                joined.append(library.communicator(len(ranks), ids[number], place) if inside else None)
        except Exception as error:
            failures.append(f"cannot join its communicator: {type(error).__name__}: {error}")
        finally:
            done.set()

    threading.Thread(target=join, name="spmd nccl", daemon=True).start()
    comm = host.comm
    try:
        wait_until(
            lambda: done.is_set() or comm.Iprobe(MPI.ANY_SOURCE, RESERVED_TAG),
            f"joining the NCCL communicators of {host}",
            host.timeout_s,
        )
    except BaseException:
        _abort(joined)
        raise
    failure = failures[0] if done.is_set() and failures else None
    others = [rank for rank in range(host.size) if rank != host.rank]
    nothing = bytearray(0)
    # A rank that has failed frees the others from waiting.
    news = [comm.Isend((nothing, MPI.BYTE), rank, RESERVED_TAG) for rank in others] if failure else []
    troubles = host.all_gather_objects(failure)
    for rank in others:
        if troubles[rank] is not None:
            comm.Recv((nothing, MPI.BYTE), rank, RESERVED_TAG)
    for request in news:
        request.Wait()
    if any(troubles):
        _abort(joined)
    _raise_alike(host, troubles)
    return joined


def _raise_alike(host: Group, troubles: Sequence[str | None]) -> None:
    for rank, trouble in enumerate(troubles):
        if trouble is not None:
            raise UserError(
                f"communication backend: nccl: rank {host.ranks[rank]} of the {host.name} group {trouble}; "
                f"{_ADVICE}"
            )


def _abort(communicators: Sequence[Communicator | None]) -> None:
    for communicator in communicators:
        if communicator is not None:
            communicator.abort()
