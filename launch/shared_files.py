"""Files of shared memory that an MPI library leaves behind when a job is killed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd.comm.group import Group

_MAPPED = re.compile(r"/dev/shm/(?:mpich_shm_\w+|sm_segment\.\S+)$", re.MULTILINE)


def unlink_shared_files() -> None:
    """Remove the names of the MPI library's segments from /dev/shm. The memory lasts while it is mapped.

    MPICH (seen in 5.0) and Open MPI (5.0) remove them in `MPI_Finalize` only, so each job that is killed or
    aborted would leave megabytes behind until the node is rebooted. To be called when every rank of the node
    has mapped them (for MPICH that is after `MPI_Init` on all of them), or the job ends anyhow. Does nothing
    where there are no such files.
    """
    _unlink(_mapped_by("self"))


def unlink_common_files(node: Group) -> None:
    """`unlink_shared_files`, of those that every rank of the node has mapped. Collective over the node."""
    everyones: list[set[str]] = node.all_gather_objects(_mapped_by("self"))
    if node.rank == 0:
        _unlink(set.intersection(*everyones))


def unlink_once_shared(environment: Mapping[str, str]) -> None:
    """`unlink_shared_files`, if every rank of the node has mapped them; for the time before ranks meet.

    Each rank calls it after `MPI_Init`, and the last one to do so finds them all. That needs a launcher that
    tells how many ranks the node has and starts them itself, as Hydra does; without it nothing is done.
    """
    ranks = environment.get("MPI_LOCALNRANKS", "")
    if not ranks.isdigit() or int(ranks) < 2:
        return
    with suppress(OSError):
        names = _mapped_by("self")
        parent = os.getppid()
        siblings = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if names and sum(names <= _mapped_by(pid) for pid in siblings) >= int(ranks):
            _unlink(names)


def _unlink(names: set[str]) -> None:
    for name in names:
        with suppress(OSError):
            Path(name).unlink(missing_ok=True)


def _mapped_by(pid: str) -> set[str]:
    try:
        return set(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()
