"""What tests of faults have in common: jobs that go wrong on purpose, and what is left of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from support.mpirun import Finished

F = TypeVar("F")
JOB = Path(__file__).with_name("fault_job.py")
LIMIT_S = 2.0  # the ranks' --timeout, as the job has it
END_S = 10.0  # from the fault, or from the end of that time limit, to the end of the job
MARK = "SPMD_TEST_FAULT"  # a variable by which the processes of one job are known


def line(comment: str) -> str:
    """Where in the job the comment is, as reports show it."""
    numbers = [n for n, text in enumerate(JOB.read_text().splitlines(), 1) if text.endswith(f"# {comment}")]
    assert len(numbers) == 1
    return f"{JOB.name}:{numbers[0]} "


@dataclass(frozen=True)
class Ended:
    """A job that ended `at`, in seconds since the epoch, and what its ranks wrote down."""

    done: Finished
    at: float
    notes: list[list[str]]

    @classmethod
    def now(cls, done: Finished, folder: Path, fault: str) -> Ended:
        ended = time.time()
        notes = (folder / fault).read_text().splitlines()
        return cls(done, ended, [text.split(maxsplit=1) for text in notes])

    def told(self, what: str) -> list[str]:
        return [words[1] for words in self.notes if words[0] == what]

    @property
    def seconds(self) -> float:
        """From the fault to the end."""
        return self.at - float(self.told("fault")[0])


def chosen(request: pytest.FixtureRequest, faults: Sequence[F]) -> list[F]:
    """Those of the faults that the selected tests are about."""
    found = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [spec.params["fault"] for spec in found if spec is not None and "fault" in spec.params]
    return [fault for fault in faults if fault in wanted]


def processes_of(fault: str) -> list[str]:
    """Command lines of the job's processes that live, those on virtual hosts included."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"\0{MARK}={fault}\0".encode() in b"\0" + environment.read_bytes():
                found.append((environment.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
