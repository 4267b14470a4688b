"""The ledger shows what a rank is in, from which line, and how long ago; others of its node can read it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from spmd.comm import ledger as ledger_module
from spmd.comm.group import make_group
from spmd.comm.ledger import RING, Ledger, Operation, pack_ranks, unpack_ranks
from spmd.comm.ledger_view import RankState, read_header, read_ranks, running_ledgers, someone_is_gone

WORLD = MPI.COMM_WORLD
NAME = "comm/test_ledger.py"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ledger]]:
    """The ledgers of ranks 4 and 5, in one process."""
    monkeypatch.setattr(ledger_module, "ledger_folder", lambda: tmp_path)
    path = ledger_module._create("job 7", 2, 6)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    made = [Ledger(os.open(path, os.O_RDWR), 2, slot, 4 + slot) for slot in range(2)]
    yield made
    for ledger in made:
        ledger.close()


def line() -> int:
    return sys._getframe(1).f_lineno


def all_reduce(ledger: Ledger, group: int, size: int) -> RankState:
    """Stands for `Group.all_reduce`: the ledger shows its caller. Returns what others see meanwhile."""
    return ledger.run(group, Operation.all_reduce, size, -1, False, state_of, ledger)


def state_of(ledger: Ledger) -> RankState:
    return next(state for state in read_ranks(ledger.memory) if state.rank == ledger.rank)


def test_a_collective_is_seen_while_it_lasts_and_after(pair: list[Ledger]) -> None:
    header = read_header(pair[1].memory)
    assert header is not None
    assert (header.job, header.slots, header.world) == ("job 7", 2, 6)
    group = pair[0].add_group("tp", (4, 5))
    during, here = all_reduce(pair[0], group, 640), line()
    entry = during.waiting
    assert entry is not None
    assert entry.describe() == "all_reduce of 640 bytes, number 1 of the tp group (ranks 4, 5)"
    function = "test_a_collective_is_seen_while_it_lasts_and_after"
    assert entry.site == f"{NAME}:{here} {function}"
    after = state_of(pair[0])
    assert after.waiting is None
    assert after.last is not None
    assert after.last.left_ns >= after.last.entered_ns == entry.entered_ns
    assert [state.rank for state in read_ranks(pair[1].memory)] == [4, 5]
    assert state_of(pair[1]).last is None


def test_a_failed_collective_is_not_a_wait_and_explains_itself(pair: list[Ledger]) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    pair[0].explain = lambda: "where all are"
    group = pair[0].add_group("tp", (4, 5))
    with pytest.raises(RuntimeError) as failure:
        pair[0].run(group, Operation.barrier, 0, -1, False, fail)
    assert failure.value.__notes__ == ["where all are"]  # type: ignore[attr-defined]
    last = state_of(pair[0]).last
    assert last is not None
    assert last.left_ns < 0
    assert state_of(pair[0]).waiting is None


def test_the_newest_entries_are_kept_and_messages_are_not_numbered(pair: list[Ledger]) -> None:
    group = pair[0].add_group("pp", (0, 5, 10))
    for size in range(3 * RING):
        all_reduce(pair[0], group, size)
    pair[0].run(group, Operation.recv, 8, 10, True, lambda: None)
    entries = state_of(pair[0]).entries
    sizes = [entry.size for entry in entries[:-1]]
    assert sizes == list(range(3 * RING))[-len(sizes) :]
    assert len(sizes) >= RING - 2
    assert [entry.sequence for entry in entries[:-1]] == [size + 1 for size in sizes]
    assert len({entry.site for entry in entries[:-1]}) == 1
    assert entries[-1].describe() == "recv of 8 bytes from rank 10, pp group"
    assert entries[-1].idle
    assert entries[-1].members == (0, 5, 10)


def test_who_left_or_died_is_seen(pair: list[Ledger]) -> None:
    assert not someone_is_gone(pair[0].memory)
    pair[1].leave()
    assert someone_is_gone(pair[0].memory)
    assert [state.left for state in read_ranks(pair[0].memory)] == [False, True]
    pair[0]._words[ledger_module.Place.started] += 1  # as if the process id had gone to another program
    assert [state.alive for state in read_ranks(pair[0].memory)] == [False, True]


def test_one_of_many_lines_too_many_does_no_harm(pair: list[Ledger]) -> None:
    group = pair[0].add_group("tp", (4, 5))
    source = "\n".join(["all_reduce(ledger, group, 8)"] * 300)
    names = {"all_reduce": all_reduce, "ledger": pair[0], "group": group}
    exec(compile(source, "x/many.py", "exec"), names)
    sites = [entry.site for entry in state_of(pair[0]).entries]
    assert all(site.startswith("(one of too many") for site in sites)
    assert all_reduce(pair[0], group, 8).waiting is not None


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20, unique=True).map(sorted).map(tuple))
def test_lists_of_ranks_survive(ranks: tuple[int, ...]) -> None:
    assert unpack_ranks(pack_ranks(ranks)) == ranks


def test_lists_of_ranks_are_short() -> None:
    assert [pack_ranks(r) for r in ((0, 1, 2), (1, 5, 9), (3,), (0, 1, 5))] == ["0-2", "1-9:4", "3", "0,1,5"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("backend", ["shm", "mpi", "hierarchical"])
def test_every_call_of_a_group_is_recorded_on_every_rank(backend: str) -> None:
    ledger = Ledger.open(WORLD, "test", 60.0)
    assert ledger is not None
    nodes = [rank // 2 for rank in range(WORLD.size)] if backend == "hierarchical" else None
    tp, size = make_group(WORLD, backend, 60.0, "tp", ledger, nodes), WORLD.size
    start = len(state_of(ledger).entries)
    tp.all_reduce(torch.ones(10))
    tp.all_reduce_max(torch.ones(11))
    tp.all_gather(torch.ones(3), [3] * size)
    tp.reduce_scatter(torch.ones(2 * size), [2] * size)
    tp.broadcast(torch.ones(4), 1)
    tp.barrier()
    tp.broadcast_object("x", 1)
    tp.gather_objects("x", 0)
    tp.all_gather_objects("x")
    first, last = tp.rank == 0, tp.rank == size - 1
    if first:
        tp.send(torch.ones(5), size - 1)
    if last:
        tp.recv(torch.ones(5), 0)
    WORLD.Barrier()
    names = [
        "all_reduce of 40 bytes",
        "all_reduce_max of 44 bytes",
        f"all_gather of {12 * size} bytes",
        f"reduce_scatter of {8 * size} bytes",
        "broadcast of 16 bytes from rank 1",
        "barrier",
        "broadcast_object from rank 1",
        "gather_objects to rank 0",
        "all_gather_objects",
    ]
    for state in read_ranks(ledger.memory):
        entries = state.entries[start:]
        assert [entry.describe().partition(", ")[0] for entry in entries[: len(names)]] == names
        assert [entry.sequence for entry in entries[: len(names)]] == list(range(1, len(names) + 1))
        assert all(entry.left_ns >= entry.entered_ns for entry in entries)
        assert all(entry.site.startswith(NAME) for entry in entries), [entry.site for entry in entries]
        messages = [entry.describe() for entry in entries[len(names) :]]
        assert messages == {
            0: [f"send of 20 bytes to rank {size - 1}, tp group"],
            size - 1: ["recv of 20 bytes from rank 0, tp group"],
        }.get(state.rank, [])
    if sys.platform == "linux":
        headers = [read_header(memory) for _, memory in running_ledgers()]
        assert any(header is not None and header.job == "test" for header in headers)
    WORLD.Barrier()
    tp.free()
    ledger.close()
