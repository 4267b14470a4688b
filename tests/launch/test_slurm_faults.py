"""The table of faults under `srun`, on two nodes: the job ends in time, says why, and leaves nothing behind.

Three ranks: 0 and 1 on one node, 2 on the other. The kernel kills a rank that runs out of memory as "killed"
does; "memory" is the allocation that fails.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cluster.hosts import HEAD
from support.cluster.slurm import Slurm, why_not
from support.faults import END_S, JOB, LIMIT_S, MARK, Ended, chosen, line, processes_of
from support.mpirun import ROOT, Finished

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")
RANKS = 3
# Slurm terminates a job's ranks and kills them KillWait (5) seconds later; its daemons take some time, too.
SLURM_S = 5.0


@dataclass(frozen=True)
class Fault:
    """What rank 1 does, or somebody outside; what is seen of it; seconds until it is noticed."""

    name: str
    said: tuple[str, ...] = ()
    noticed_s: float = 0.0


NOT_COME = "rank 1 did not come to all_reduce of 4000 bytes, number 4 of the tp group .ranks 0-2. at "
FAULTS = [
    Fault("exception", ("spmd: rank 1 of 3 failed\n", "RuntimeError: the fault")),
    Fault("killed"),
    Fault("memory", ("spmd: rank 1 of 3 failed\n", "spmd: rank 1 ran out of memory: ")),
    Fault("left", (f"rank 1 has left the job, but rank 0 waits for it in .*{line('waits here')}",)),
    Fault("stopped", (f"{NOT_COME}.*{line('waits here')}",), LIMIT_S),
    Fault("in MPI", (f"{NOT_COME}.*{line('waits here')}", "spmd: rank 1 is here"), LIMIT_S),
    Fault("Ctrl-C"),
    Fault("scancel"),
]


@pytest.fixture(scope="module")
def jobs(
    slurm: Slurm, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Ended]]]:
    folder = tmp_path_factory.mktemp("faults")
    mpi = subprocess.check_output([sys.executable, "-m", "spmd.launch.launcher"], cwd=ROOT, text=True).split()

    def run(fault: Fault) -> Ended:
        name = fault.name.replace(" ", "-")
        words = ["srun", "-K", *mpi, "-N2", f"-n{RANKS}", "-m", "block", f"--job-name={name}"]
        started = time.monotonic()
        srun = subprocess.Popen(
            slurm.hosts.on(HEAD, [*words, sys.executable, str(JOB), f"{fault.name}:auto", str(folder)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**slurm.environment, MARK: fault.name},
            start_new_session=True,
        )
        try:
            if fault.name in ("Ctrl-C", "scancel"):
                wait_for_note(folder / fault.name, srun)
                assert len(processes_of(fault.name)) > RANKS  # those on the nodes are seen from here
                if fault.name == "scancel":
                    slurm.query(f"scancel --name={name}")
                else:  # srun asks to be told twice
                    for _ in range(2):
                        srun.send_signal(signal.SIGINT)
                        time.sleep(0.2)
            stdout, stderr = srun.communicate(timeout=90)
        finally:
            if srun.poll() is None:
                os.killpg(srun.pid, signal.SIGKILL)
        done = Finished(srun.returncode, stdout, stderr, time.monotonic() - started)
        return Ended.now(done, folder, fault.name)

    with ThreadPoolExecutor(2) as pool:
        yield {fault.name: pool.submit(run, fault) for fault in chosen(request, FAULTS)}


def wait_for_note(notes: Path, srun: subprocess.Popen[str]) -> None:
    """Until rank 1 has noted that all ranks are at work."""
    deadline = time.monotonic() + 60
    while not notes.exists() or "fault" not in notes.read_text():
        assert srun.poll() is None, srun.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_ends_the_job_under_srun(fault: Fault, jobs: dict[str, Future[Ended]], slurm: Slurm) -> None:
    ended = jobs[fault.name].result()
    done = ended.done
    assert done.code != 0, done.output
    print(f"{fault.name}: srun ended {ended.seconds:.1f} s after the fault with code {done.code}")
    assert ended.seconds < END_S + fault.noticed_s, done.output
    for pattern in fault.said:
        assert re.search(pattern, done.stdout + done.stderr), f"{pattern}\n{done.output}"
    deadline = time.monotonic() + SLURM_S + END_S
    while left := processes_of(fault.name):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    shared = {Path(name).name for name in ended.told("shared")}
    for node in slurm.hosts.names:
        assert not shared.intersection(slurm.hosts.shared_files(node)), done.output


def test_nothing_is_left_in_shared_memory(jobs: dict[str, Future[Ended]], slurm: Slurm) -> None:
    for job in jobs.values():
        job.result()
    for node in slurm.hosts.names:
        assert slurm.hosts.shared_files(node) == []
