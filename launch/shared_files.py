"""Files of shared memory that an MPI library leaves behind when a job is killed."""

from __future__ import annotations

import re
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
