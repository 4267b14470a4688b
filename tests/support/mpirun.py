"""Start programs under mpirun with a watchdog: nothing that a test starts outlives its time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPEN_MPI_OPTIONS = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
_LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "OMPI_", "MPI_LOCAL")


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, less what an MPI launcher has put there, with the checkout importable."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_VARIABLES)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    )
    environment.update(extra or {})
    return environment


@cache
def launcher() -> tuple[str, ...]:
    """`mpirun` of the MPI library in use; Open MPI's with what more ranks than cores, and root, want."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        raise RuntimeError("no mpirun found: install an MPI, for example with pip install '.[local]'")
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        return (program, *OPEN_MPI_OPTIONS)
    return (program,)


def run(
    command: Sequence[str],
    timeout_s: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command in a process group of its own; kill the whole group when `timeout_s` is over."""
    started = time.monotonic()
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or ROOT,
        env=clean_environment(environment),
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"{' '.join(command)}\nstill ran after {timeout_s} s\n{stdout[-8000:]}\n{stderr[-8000:]}"
        ) from None
    return Finished(process.returncode, stdout, stderr, time.monotonic() - started)


def mpirun(
    ranks: int,
    arguments: Sequence[str],
    timeout_s: float = 120.0,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """`mpirun -n ranks python arguments...`; one rank runs without mpirun."""
    return run(command_line(ranks, arguments), timeout_s, cwd, environment)


def command_line(ranks: int, arguments: Sequence[str]) -> list[str]:
    """What `mpirun` above runs."""
    start = [] if ranks == 1 else [*launcher(), "-n", str(ranks)]
    return [*start, sys.executable, *arguments]
