"""Rules that hold for every test: several ranks never hang, and only rank 0 talks."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
# A multi-rank test that takes longer has hung: every rank prints where it stands, and the job ends.
MULTI_RANK_LIMIT_S = 240.0
# More ranks than these show nothing new about a single collective: of tests/comm only smoke tests run.
FOR_COLLECTIVES = (2, 3)


def pytest_report_header() -> str:
    version = ".".join(map(str, MPI.get_vendor()[1]))
    return f"MPI: {MPI.get_vendor()[0]} {version}, rank {WORLD.rank} of {WORLD.size}"


def pytest_sessionstart(session: pytest.Session) -> None:
    if WORLD.rank != 0:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WORLD.size > 1:
        # Plain tests need one rank; some of them start mpirun themselves.
        plain = [item for item in items if item.get_closest_marker("mpi") is None]
        config.hook.pytest_deselected(items=plain)
        items[:] = [item for item in items if item.get_closest_marker("mpi") is not None]
    if WORLD.size > 1 and WORLD.size not in FOR_COLLECTIVES:
        left_out = [item for item in items if item.path.parent.name == "comm" and not _is_smoke(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_smoke(item: pytest.Item) -> bool:
    return item.get_closest_marker("smoke") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if WORLD.size > 1:
        faulthandler.dump_traceback_later(MULTI_RANK_LIMIT_S, exit=True)
    try:
        return (yield)
    finally:
        if WORLD.size > 1:
            faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if WORLD.size > 1 and report.failed:
        # The other ranks may be waiting for this one: end the job with the first failure.
        message = f"\nrank {WORLD.rank} of {WORLD.size}: {report.nodeid} failed\n{report.longreprtext}\n"
        os.write(2, message.encode())
        WORLD.Abort(1)


def pytest_internalerror(excrepr: object) -> None:
    if WORLD.size > 1:
        os.write(2, f"rank {WORLD.rank}: {excrepr}\n".encode())
        traceback.print_exc(file=sys.__stderr__)
        WORLD.Abort(1)


@pytest.fixture
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder that is the same on every rank."""
    from spmd.comm.group import make_group

    group = make_group(WORLD)
    path = tmp_path_factory.mktemp("shared") if WORLD.rank == 0 else None
    yield group.broadcast_object(path)
    group.free()
