"""Start a bench on some ranks, or a peer in its own environment, and read the JSON it ends with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
# A bench runs from a plain checkout as well as with the package installed.
sys.path.insert(0, str(BENCH.parent))
_LAUNCHER = ("PMI_", "PMIX_", "HYDRA_", "OMPI_", "MPI_LOCAL")


def run_ranks(ranks: int, script: str, arguments: Sequence[str], timeout_s: float = 1800) -> dict[str, Any]:
    """`mpirun -n ranks python bench/script arguments`; one rank runs without mpirun."""
    return run_json([*launcher(ranks), sys.executable, str(BENCH / script), *arguments], timeout_s)


def launcher(ranks: int) -> list[str]:
    """What starts so many ranks; nothing for one."""
    if ranks == 1:
        return []
    beside = Path(sys.executable).with_name("mpirun")
    return [str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun", "-n", str(ranks)]


def pin_rank(rank: int, ranks: int) -> None:
    """Give each rank a core of its own, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def run_json(
    command: Sequence[str], timeout_s: float = 1800, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command; the last line of its output that is a JSON object is its result."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER)}
    clean["PYTHONPATH"] = os.pathsep.join([str(BENCH.parent), clean.get("PYTHONPATH", "")])
    done = subprocess.run(
        list(command), capture_output=True, text=True, timeout=timeout_s, env={**clean, **(environment or {})}
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain table, columns as wide as they need to be."""
    text = [list(map(str, header)), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    for row in text:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip())


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
