"""Files of shared memory that an MPI library leaves behind when a job is killed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_MAPPED = re.compile(r"/dev/shm/mpich_shm_\w+$", re.MULTILINE)


def unlink_shared_files() -> None:
    """Remove the name of MPICH's start-up segment from /dev/shm. The memory itself lasts while it is mapped.

    MPICH (seen in 5.0) removes it in `MPI_Finalize` only, so each job that is killed or aborted would leave
    megabytes behind until the node is rebooted. To be called when every rank of the node has mapped it, that
    is after `MPI_Init` on all of them. Does nothing where there is no such file.
    """
    with suppress(OSError):
        for name in set(_MAPPED.findall(Path("/proc/self/maps").read_text())):
            Path(name).unlink(missing_ok=True)


def unlink_once_shared(environment: Mapping[str, str]) -> None:
    """`unlink_shared_files`, if every rank of the node has mapped them; for the time before ranks meet.

    Each rank calls it after `MPI_Init`, and the last one to do so finds them all. That needs a launcher that
    tells how many ranks the node has and starts them itself, as Hydra does; without it nothing is done.
    """
    ranks = environment.get("MPI_LOCALNRANKS", "")
    if not ranks.isdigit() or int(ranks) < 2:
        return
    with suppress(OSError):
        names = set(_MAPPED.findall(Path("/proc/self/maps").read_text()))
        parent = os.getppid()
        siblings = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if names and sum(names <= _mapped_by(pid) for pid in siblings) >= int(ranks):
            unlink_shared_files()


def _mapped_by(pid: str) -> set[str]:
    try:
        return set(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()
