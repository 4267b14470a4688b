"""What goes wrong with NCCL reaches every rank, in the same words, over the stand-in of recording_nccl.py.
How NCCL itself fails, and how long it takes to notice, is not shown."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI
from support.mpirun import mpirun
from support.recording_nccl import RecordingNccl

from spmd.comm.errors import UserError
from spmd.comm.grid import Grid
from spmd.comm.group import Group, make_group
from spmd.comm.nccl import NcclGroup
from spmd.comm.nccl_choice import over_nccl
from spmd.comm.nccl_library import find_library, find_problem
from spmd.comm.shm import ShmGroup

WORLD = MPI.COMM_WORLD
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
several = pytest.mark.skipif(not 2 <= WORLD.size <= 4, reason="for 2 to 4 ranks")


@pytest.fixture
def host() -> Iterator[Group]:
    group = ShmGroup(WORLD.Dup(), "tp", timeout_s=60.0)
    yield group
    group.free()


def message_of(host: Group, library: RecordingNccl) -> str:
    """What opening a group raises: the same on every rank, within seconds."""
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        NcclGroup.open(host, library, CPU)
    assert time.monotonic() - began < 10.0
    library.give_up()
    message = str(caught.value)
    assert set(host.all_gather_objects(message)) == {message}
    return message


@pytest.mark.mpi
@several
def test_an_id_that_cannot_be_made(host: Group) -> None:
    message = message_of(host, RecordingNccl(fail_id=[0]))
    assert "rank 0 of the tp group cannot make the id of a communicator" in message
    assert "no network interface" in message


@pytest.mark.mpi
@several
@pytest.mark.parametrize("failing", [0, -1], ids=["first", "last"])
def test_a_rank_that_cannot_join_while_the_others_wait_in_nccl(host: Group, failing: int) -> None:
    rank = failing % WORLD.size
    message = message_of(host, RecordingNccl(fail_join=[rank]))
    assert f"rank {rank} of the tp group cannot join its communicator: StandInError: out of memory" in message


@pytest.mark.mpi
@several
def test_a_first_sum_that_is_wrong_on_one_rank(host: Group) -> None:
    library = RecordingNccl(wrong_sums=[1])
    message = message_of(host, library)
    assert "came out wrong on rank 1;" in message
    assert library.communicators[0].state == "aborted"


@pytest.mark.mpi
@several
def test_the_device_is_bound_and_all_have_the_id_before_anybody_joins(host: Group) -> None:
    library = RecordingNccl()
    group = NcclGroup.open(host, library, CPU)
    names = [call.name for call in library.calls[:4]]
    # Bound again in the thread that joins: a thread has a device of its own.
    if WORLD.rank == 0:
        assert names == ["use_device", "unique_id", "use_device", "communicator"]
    else:
        assert names[:3] == ["use_device", "use_device", "communicator"]
        assert "unique_id" not in names
    threads = [call.arguments[1] for call in library.calls if call.name == "use_device"]
    assert threads == ["MainThread", "spmd nccl"]
    # Each group, and each route of messages, has an id of its own.
    others = NcclGroup.open(ShmGroup(WORLD.Dup(), "pp", timeout_s=60.0), library, CPU)
    others.open_messages([(0, 1, 4), (1, 0, 4), (0, 1, 5)])
    mine = [communicator.unique_id for communicator in library.communicators]
    assert len(set(mine)) == len(mine)
    if WORLD.rank < 2:
        assert len(mine) == 5
    others.free()
    for communicator in library.communicators[:1]:
        communicator.destroy()
    assert group.find_fault() is None


@pytest.mark.mpi
@several
def test_a_fault_that_nccl_reports_later(host: Group) -> None:
    library = RecordingNccl()
    group = NcclGroup.open(host, library, CPU)
    assert group.find_fault() is None
    library.async_error = "remote process exited"
    fault = group.find_fault()
    assert fault is not None
    assert "NCCL of tp group (nccl)" in fault
    assert fault.endswith("reports StandInError: remote process exited")
    # Aborted, so that no kernel waits for ever; and only once.
    assert library.communicators[0].state == "aborted"
    assert group.find_fault() == fault


@pytest.mark.mpi
@several
def test_auto_does_without_nccl_where_it_must_and_nccl_is_refused(
    host: Group, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = [0] * WORLD.size
    shared = RecordingNccl(card="0000:01:00.0")  # one card for all
    assert over_nccl(host, nodes, CPU, required=False, library=shared) is host
    warning = "share the GPU 0000:01:00.0"
    assert (warning in capfd.readouterr().err) == (WORLD.rank == 0)
    with pytest.raises(UserError, match=r"'nccl' cannot serve the tp group: ranks 0 and 1 share the GPU"):
        over_nccl(host, nodes, CPU, required=True, library=shared)
    assert "communicator" not in [call.name for call in shared.calls]
    own = RecordingNccl()
    group = over_nccl(host, nodes, CPU, required=True, library=own)
    assert group.backend == "nccl"
    own.communicators[0].destroy()
    if torch.cuda.is_available():
        return
    # No GPU here, so the real library cannot serve: every rank hears why, or with auto goes on.
    with pytest.raises(UserError, match="'nccl' cannot serve the tp group: rank 0 on "):
        over_nccl(host, nodes, GPU, required=True)
    assert over_nccl(host, nodes, GPU, required=False) is host


@pytest.mark.mpi
@several
def test_ranks_on_different_kinds_of_device_are_refused_together() -> None:
    with pytest.raises(UserError, match="rank 1 computes on a GPU, but rank 0 on the CPU"):
        Grid.create(WORLD, take_device=lambda node: CPU if WORLD.rank == 0 else GPU)
    with pytest.raises(UserError, match="'nccl' needs ranks with a GPU each"):
        Grid.create(WORLD, backend="nccl", take_device=lambda node: CPU)


@pytest.mark.mpi
@several
@pytest.mark.parametrize("backend", ["auto", "nccl", "mpi"])
def test_a_grid_asks_for_nccl_where_tensors_of_the_device_travel(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, torch.device, bool]] = []
    taken: list[int] = []

    def over(host: Group, nodes: object, device: torch.device, required: bool) -> Group:
        assert taken, "a group of the device before it is bound"
        asked.append((host.name, device, required))
        return host

    def take(node: Group) -> torch.device:
        taken.append(node.rank)
        return GPU

    monkeypatch.setattr("spmd.comm.nccl_choice.over_nccl", over)
    grid = Grid.create(WORLD, tp=1, pp=WORLD.size, backend=backend, take_device=take)
    assert grid.device == GPU
    assert len(taken) == 1
    assert asked == ([] if backend == "mpi" else [("pp", GPU, backend == "nccl")])
    assert grid.world.all_gather_objects(1) == [1] * WORLD.size
    grid.free()


def test_the_watchdog_is_answered_while_communicators_end() -> None:
    answers: list[str | None] = []

    class Ending:
        def destroy(self) -> None:
            thread = threading.Thread(target=lambda: answers.append(group.find_fault()), daemon=True)
            thread.start()
            thread.join(10.0)

    group = NcclGroup(make_group(MPI.COMM_SELF), RecordingNccl(), CPU, Ending())  # type: ignore[arg-type]
    group.free()
    assert answers == [None]


def test_which_ranks_can_have_a_communicator() -> None:
    cards = [("a", "01", ""), ("a", "02", ""), ("b", "01", ""), ("b", "02", "")]
    assert find_problem(range(4), [0, 0, 1, 1], cards) is None
    # Hosts may have one name; nodes are told apart by their ranks' shared memory.
    assert find_problem(range(2), [0, 1], [("x", "01", ""), ("x", "01", "")]) is None
    assert "ranks 4 and 6 share the GPU 01 of a" in str(
        find_problem([4, 5, 6], [0, 0, 0], [("a", "01", ""), ("a", "02", ""), ("a", "01", "")])
    )
    lacking = [("a", "01", ""), ("b", "", "CuPy is not installed")]
    assert find_problem([2, 3], [0, 1], lacking) == "rank 3 on b: CuPy is not installed"


@pytest.mark.skipif("cupy" in sys.modules, reason="CuPy is loaded")
def test_a_missing_cupy_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    library, why = find_library()
    assert library is None
    assert why.startswith("CuPy is not installed; pip install 'spmd[cuda12]'")


_FAULT = """
import time
import torch
from mpi4py import MPI
from support.recording_nccl import RecordingNccl
from spmd.comm.nccl import NcclGroup
from spmd.comm.shm import ShmGroup
from spmd.launch.abort import end_job
from spmd.launch.watchdog import open_watched

world = MPI.COMM_WORLD
library = RecordingNccl()
group = NcclGroup.open(ShmGroup(world.Dup(), "tp", timeout_s=60.0), library, torch.device("cpu"))
ledger = open_watched(world, 60.0, end_job)
group.record_in(ledger)
group.all_reduce(torch.ones(4))
if world.rank == 1:
    library.async_error = "remote process exited"

class Stuck:
    def synchronize(self):
        time.sleep(60)  # a kernel that waits for the other rank

group.wait_device(Stuck())
"""


def test_the_watchdog_ends_a_job_whose_nccl_has_failed() -> None:
    done = mpirun(2, ["-c", f"import sys; sys.path.insert(0, 'tests'){_FAULT}"], 60.0)
    assert done.code != 0
    assert done.seconds < 40.0, done.output
    assert "rank 1 cannot go on: NCCL of tp group" in done.stderr, done.output
    assert "remote process exited" in done.stderr
    assert "in device_wait, the tp group" in done.stderr, done.output
