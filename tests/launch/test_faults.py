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
from support.faults import END_S, JOB, LIMIT_S, MARK, Ended, chosen, line, processes_of
from support.mpirun import mpirun

from spmd.comm.ledger import NAME, ledger_folder


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


ENDS_WELL = Fault("ends well", ranks=3)


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Ended]]]:
    """The jobs of all tests that were selected, a few at a time: they mostly import and wait."""
    folder = tmp_path_factory.mktemp("faults")

    def run(fault: Fault) -> Ended:
        arguments = [str(JOB), f"{fault.name}:{fault.backend}", str(folder)]
        done = mpirun(fault.ranks, arguments, 100, environment={MARK: fault.name})
        return Ended.now(done, folder, fault.name)

    with ThreadPoolExecutor(3) as pool:
        yield {fault.name: pool.submit(run, fault) for fault in [*chosen(request, FAULTS), ENDS_WELL]}


def ledger_files() -> list[str]:
    """Those of other jobs included, which have a name for some milliseconds."""
    return [str(path) for path in ledger_folder().glob(f"{NAME}-{os.getuid()}-*")]


SMOKE = ("exception", "killed")
PARAMETERS = [
    pytest.param(f, id=f.name, marks=[pytest.mark.smoke] if f.name in SMOKE else []) for f in FAULTS
]


@pytest.mark.parametrize("fault", PARAMETERS)
def test_a_fault_ends_the_job(fault: Fault, jobs: dict[str, Future[Ended]]) -> None:
    ended = jobs[fault.name].result()
    done = ended.done
    if fault.code is None:
        assert done.code != 0, done.output
    else:
        assert done.code == fault.code, done.output
    print(f"{fault.name}: the job ended {ended.seconds:.1f} s after the fault")
    assert ended.seconds < END_S + (LIMIT_S if fault.waits else 0), done.output
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


@pytest.mark.smoke
def test_ranks_that_end_at_different_times_end_well(jobs: dict[str, Future[Ended]]) -> None:
    ended = jobs["ends well"].result()
    done = ended.done
    assert done.code == 0, done.output
    assert sorted(ended.told("done")) == ["0", "1", "2"], done.output
    assert "spmd" not in done.stderr, done.output
