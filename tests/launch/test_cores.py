"""Every rank of a node computes on cores of its own, as far as there are enough."""

from __future__ import annotations

import os

import pytest
from mpi4py import MPI

from spmd.comm.group import make_group
from spmd.launch.cores import bind_cores, divide_cores


def cores(text: str) -> frozenset[int]:
    """`0-3,8` as Linux writes it."""
    parts = [part.partition("-")[::2] for part in text.split(",")]
    return frozenset(core for first, last in parts for core in range(int(first), int(last or first) + 1))


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        pytest.param(["0-7"], ["0-7"], id="a rank alone keeps them all"),
        pytest.param(["0-7"] * 2, ["0-3", "4-7"], id="two ranks, two halves"),
        pytest.param(["0-7"] * 3, ["0-2", "3-5", "6-7"], id="what is left over goes to the first ranks"),
        pytest.param(["0-3"] * 4, ["0", "1", "2", "3"], id="one core each"),
        pytest.param(["0-1"] * 3, ["0-1"] * 3, id="more ranks than cores share them"),
        pytest.param(["5"], ["5"], id="one core"),
        pytest.param(["0-3", "4-7"], ["0-3", "4-7"], id="the launcher gave each rank its own"),
        pytest.param(["0-3", "0-3", "4-7", "4-7"], ["0-1", "2-3", "4-5", "6-7"], id="two ranks a socket"),
        pytest.param(
            ["4-7", "0-3", "4-7", "0-3"], ["4-5", "0-1", "6-7", "2-3"], id="two a socket, round robin"
        ),
        pytest.param(["2,4,6,8"] * 2, ["2,4", "6,8"], id="cores need not be neighbours"),
        pytest.param(["0-3", "2-5"], ["0-3", "2-5"], id="sets that overlap in part are left alone"),
        pytest.param(["0-7", "0-7", "4-7"], ["0-7", "0-7", "4-7"], id="so are sets inside others"),
    ],
)
def test_divide_cores(allowed: list[str], expected: list[str]) -> None:
    sets = [cores(text) for text in allowed]
    assert [divide_cores(sets, rank) for rank in range(len(sets))] == [cores(text) for text in expected]


@pytest.mark.parametrize("count", [1, 2, 12, 32])
def test_ranks_that_share_a_set_split_it_without_rest_or_overlap(count: int) -> None:
    everything = frozenset(range(count))
    for ranks in range(1, count + 1):
        shares = [divide_cores([everything] * ranks, rank) for rank in range(ranks)]
        assert sorted(core for share in shares for core in share) == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for ranks in (count + 1, 2 * count, 5 * count):
        assert [divide_cores([everything] * ranks, rank) for rank in range(ranks)] == [everything] * ranks


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind processes to cores")
def test_bind_cores() -> None:
    node = make_group(MPI.COMM_WORLD)
    before = node.all_gather_objects(os.sched_getaffinity(0))
    try:
        threads = bind_cores(node)
        after = node.all_gather_objects(os.sched_getaffinity(0))
        assert after == [set(divide_cores([frozenset(c) for c in before], rank)) for rank in range(node.size)]
        sharers = after.count(after[node.rank])
        assert threads == max(1, len(after[node.rank]) // sharers)
        assert bind_cores(node, threads=3) == 3
    finally:
        node.barrier()
        os.sched_setaffinity(0, before[node.rank])
    node.free()
