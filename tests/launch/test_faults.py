"""The table of faults: whatever befalls a rank, the job ends in time, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.mpirun import Finished, mpirun

from spmd.comm.ledger import NAME, ledger_folder

LIMIT_S = 2.0  # the ranks' --timeout
END_S = 10.0  # from the fault, or from the end of that time limit, to the end of the job
MARK = "SPMD_TEST_FAULT"

SCRIPT = """
import os, resource, signal, sys, time
from pathlib import Path

import torch
from mpi4py import MPI

import spmd.llm
from spmd.launch.start import start_grid

fault, backend = sys.argv[1].split(":")
notes = open(Path(sys.argv[2]) / fault, "a")
world = MPI.COMM_WORLD
rank = world.rank
x = torch.ones(1000)

def tell(*words):
    print(*words, file=notes, flush=True)

def strike():
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        if "/dev/shm/" in line:
            tell("shared", line.split()[5])
    tell("fault", time.time())

def launcher():
    pid = os.getpid()
    while True:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith(("mpirun", "mpiexec", "prterun", "orterun")):
            return pid

if fault == "killed early":
    world.Barrier()
    if rank == 1:
        strike()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if fault == "left early" and rank == 1:
    strike()
    sys.exit()
if fault == "missing early" and rank == 1:
    strike()
    time.sleep(60)
tp = start_grid(world, world.size, backend=backend, timeout_s=2.0).tp
for _ in range(3):
    tp.all_reduce(x)
if rank == 1:
    strike()
    if fault == "exception":
        raise RuntimeError("the fault")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "interrupted":
        os.kill(launcher(), signal.SIGINT)
    if fault == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        tp.all_reduce(torch.ones(1 << 30))
    if fault == "left":
        sys.exit()
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "busy":
        while True:
            x.add(1)  # busy here
    if fault == "in MPI":
        world.Recv(bytearray(8), source=0, tag=55)  # stuck here
    if fault == "other call":
        tp.broadcast(x, 0)  # another call
    if fault == "skipped call":
        tp.all_gather(x, [1000] * tp.size)  # one call too early
        tp.recv(x, 0)
if fault == "skipped call":
    tp.all_reduce(x)  # the call that rank 1 skips
    tp.all_gather(x, [1000] * tp.size)
    tp.recv(x, 0)
tp.all_reduce(x)  # waits here
if fault == "ends well":
    if rank == 0:
        time.sleep(1.5)  # longer than others take for granted
    tell("done", rank)
    sys.exit()
time.sleep(60)
"""


def line(comment: str) -> str:
    """Where in the script the comment is, as reports show it."""
    numbers = [n for n, text in enumerate(SCRIPT.splitlines(), 1) if text.endswith(f"# {comment}")]
    assert len(numbers) == 1
    return f"job.py:{numbers[0]} "


@dataclass(frozen=True)
class Fault:
    """What rank 1 does, and what is seen of it: the exit code (None: any but 0) and texts of the output.

    waits: it is noticed when the time limit is over.
    """

    name: str
    said: tuple[str, ...] = ()
    code: int | None = 1
    waits: bool = False
    backend: str = "auto"
    ranks: int = 2


NOT_COME = (
    "rank 1 did not come to all_reduce of 4000 bytes, number 4 of the tp group (ranks 0, 1) at "
    f".*{line('waits here')}"
)
FAULTS = [
    Fault("exception", ("spmd: rank 1 of 2 failed\n", "RuntimeError: the fault")),
    Fault("killed", ("(Killed|signal 9)",), code=None),
    Fault("killed early", ("(Killed|signal 9)",), code=None),
    Fault("terminated", ("(Terminated|signal 15)",), code=None),
    Fault("interrupted", code=None),
    Fault("memory", ("spmd: rank 1 of 2 failed\n", "spmd: rank 1 ran out of memory: ")),
    Fault("left", ("spmd: rank 0 waits in vain: rank 1 has left the job", line("waits here"))),
    Fault("left early", ("RuntimeError: rank 1 left the job while rank 0 waited",)),
    Fault("missing early", ("HangError: rank 1 did not come within 2 s",), waits=True),
    Fault("stopped", (NOT_COME,), waits=True),
    Fault(
        "busy",
        (NOT_COME, "spmd: rank 1 is here", line("busy here")[:-1].replace(":", '", line ')),
        waits=True,
    ),
    Fault("in MPI", (NOT_COME, line("stuck here")[:-1].replace(":", '", line ')), waits=True),
    Fault(
        "other call",
        (
            "CollectiveMismatch",
            "spmd: rank 1 parted from the others: "
            f"ranks 0, 2 called all_reduce .* at .*{line('waits here')}.*; "
            f"rank 1 called broadcast .* at .*{line('another call')}",
        ),
        ranks=3,
    ),
    Fault(
        "skipped call",
        (
            "spmd: rank . has waited .*: rank 1 parted from the others: "
            f"ranks 0, 2 called all_reduce .* at .*{line('the call that rank 1 skips')}.*; "
            f"rank 1 called all_gather .* at .*{line('one call too early')}",
        ),
        waits=True,
        backend="mpi",
        ranks=3,
    ),
]


@dataclass(frozen=True)
class Ended:
    done: Finished
    at: float  # seconds since the epoch
    notes: list[list[str]]  # what the ranks wrote down, in a file: launchers may lose output

    def told(self, what: str) -> list[str]:
        return [words[1] for words in self.notes if words[0] == what]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    """All jobs of the table, a few at a time: they mostly import and wait."""
    script = tmp_path_factory.mktemp("faults") / "job.py"
    script.write_text(SCRIPT)

    def run(fault: Fault) -> Ended:
        arguments = [str(script), f"{fault.name}:{fault.backend}", str(script.parent)]
        done = mpirun(fault.ranks, arguments, 100, environment={MARK: fault.name})
        ended = time.time()
        notes = (script.parent / fault.name).read_text().splitlines()
        return Ended(done, ended, [line.split(maxsplit=1) for line in notes])

    with ThreadPoolExecutor(3) as pool:
        everything = [*FAULTS, Fault("ends well", ranks=3)]
        yield {fault.name: pool.submit(run, fault) for fault in everything}


def processes_of(fault: str) -> list[str]:
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"\0{MARK}={fault}\0".encode() in b"\0" + environment.read_bytes():
                found.append((environment.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def ledger_files() -> list[str]:
    """Those of other jobs included, which have a name for some milliseconds."""
    return [str(path) for path in ledger_folder().glob(f"{NAME}-{os.getuid()}-*")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_ends_the_job(fault: Fault, jobs: dict[str, Future[Ended]]) -> None:
    ended = jobs[fault.name].result()
    done = ended.done
    if fault.code is None:
        assert done.code != 0, done.output
    else:
        assert done.code == fault.code, done.output
    seconds = ended.at - float(ended.told("fault")[0])
    print(f"{fault.name}: the job ended {seconds:.1f} s after the fault")
    assert seconds < END_S + (LIMIT_S if fault.waits else 0), done.output
    for text in fault.said:
        # Ranks are listed in brackets; everything else in these texts is a pattern.
        pattern = text.replace("(ranks 0, 1)", r"\(ranks 0, 1\)")
        assert re.search(pattern, done.stdout + done.stderr), f"{text}\n{done.output}"
    for reported in ("has waited", "waits in vain", "where the ranks of the job are"):
        assert done.stderr.count(reported) <= 1, done.output
    assert not [name for name in ended.told("shared") if Path(name).exists()], done.output
    deadline = time.monotonic() + END_S
    while left := [*processes_of(fault.name), *ledger_files()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_ranks_that_end_at_different_times_end_well(jobs: dict[str, Future[Ended]]) -> None:
    ended = jobs["ends well"].result()
    done = ended.done
    assert done.code == 0, done.output
    assert sorted(ended.told("done")) == ["0", "1", "2"], done.output
    assert "spmd" not in done.stderr, done.output
