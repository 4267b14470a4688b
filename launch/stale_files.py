"""`python -m spmd.launch.stale_files`: clear away shared memory that killed MPICH jobs left on this node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def remove_stale_files(folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove this user's start-up segments that no process has mapped any more, and return their names.

    A Slurm job that is requeued after a kill has the number it had, so MPICH gives its segment the same name,
    finds the old one and fails in `MPI_Init` (seen in 5.0).
    """
    mapped = set(_mapped_everywhere())
    stale = []
    for path in folder.glob("mpich_shm_*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid() and str(path) not in mapped:
                path.unlink()
                stale.append(path.name)
    return sorted(stale)


def _mapped_everywhere() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            for line in maps.read_text().splitlines():
                words = line.split(maxsplit=5)
                if len(words) == 6 and "/mpich_shm_" in words[5]:
                    yield words[5]


if __name__ == "__main__":
    remove_stale_files()
