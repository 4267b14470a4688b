"""Every rank of a node computes on cores of its own, as far as there are enough."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from mpi4py import MPI

from spmd.comm.group import make_group
from spmd.launch.cores import Topology, bind_cores, count_threads, divide_cores, format_cpus, parse_cpus


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


# NUMA domains and SMT siblings, on invented machines.


def machine(domains: list[str], threads: int = 1, cpus: int = 0) -> Callable[[str], str | None]:
    """A reader of /sys for these domains; the siblings of CPU c are c, c + cpus / threads, ..."""
    files = {f"/sys/devices/system/node/node{i}/cpulist": f"{text}\n" for i, text in enumerate(domains)}
    files["/sys/devices/system/node/online"] = f"0-{len(domains) - 1}\n"
    for cpu in range(cpus):
        stride = cpus // threads
        siblings = ",".join(str(cpu % stride + k * stride) for k in range(threads))
        files[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{siblings}\n"
    return files.get


DUAL = machine(["0-63", "64-127"])  # two sockets of 64 cores
DUAL_SMT = machine(["0-63,128-191", "64-127,192-255"], 2, 256)
QUARTERS = machine(["0-15", "16-31", "32-47", "48-63"])  # one socket as four domains


@pytest.mark.parametrize(
    ("reader", "allowed", "ranks", "expected", "threads"),
    [
        pytest.param(DUAL, "0-127", 1, ["0-127"], [128], id="a rank alone takes both domains"),
        pytest.param(DUAL, "0-127", 2, ["0-63", "64-127"], [64, 64], id="one a domain"),
        pytest.param(
            DUAL, "0-127", 4, ["0-31", "32-63", "64-95", "96-127"], [32] * 4, id="two a domain, none across"
        ),
        pytest.param(
            DUAL, "0-127", 3, ["0-31", "32-63", "64-127"], [32, 32, 64], id="three: none across either"
        ),
        pytest.param(DUAL, "0-79", 2, ["0-63", "64-79"], [64, 16], id="restricted, one a domain"),
        pytest.param(
            DUAL, "0-79", 5, ["0-15", "16-31", "32-47", "48-63", "64-79"], [16] * 5, id="restricted, by size"
        ),
        pytest.param(DUAL, "8-11", 2, ["8-9", "10-11"], [2, 2], id="restricted to one domain"),
        pytest.param(DUAL_SMT, "0-255", 2, ["0-63,128-191", "64-127,192-255"], [64, 64], id="siblings"),
        pytest.param(
            DUAL_SMT,
            "0-255",
            4,
            ["0-31,128-159", "32-63,160-191", "64-95,192-223", "96-127,224-255"],
            [32] * 4,
            id="siblings stay together",
        ),
        pytest.param(DUAL_SMT, "0,128", 2, ["0", "128"], [1, 1], id="one core for two ranks: siblings part"),
        pytest.param(DUAL_SMT, "0-3", 2, ["0-1", "2-3"], [2, 2], id="siblings not allowed"),
        pytest.param(QUARTERS, "0-63", 2, ["0-31", "32-63"], [32, 32], id="fewer ranks than domains"),
        pytest.param(QUARTERS, "0-63", 3, ["0-31", "32-47", "48-63"], [32, 16, 16], id="whole domains"),
        pytest.param(QUARTERS, "14-17", 4, ["14", "15", "16", "17"], [1] * 4, id="a core each"),
        pytest.param(QUARTERS, "15-16", 3, ["15-16"] * 3, [2] * 3, id="more ranks than cores share"),
    ],
)
def test_domains(
    reader: Callable[[str], str | None], allowed: str, ranks: int, expected: list[str], threads: list[int]
) -> None:
    topology = Topology.read(reader)
    sets = [divide_cores([cores(allowed)] * ranks, rank, topology) for rank in range(ranks)]
    assert [format_cpus(cpus) for cpus in sets] == expected
    assert [count_threads(cpus, topology) for cpus in sets] == threads


@pytest.mark.parametrize("reader", [DUAL, DUAL_SMT, QUARTERS], ids=["dual", "dual smt", "quarters"])
def test_any_number_of_ranks_gets_disjoint_cores_in_one_domain(reader: Callable[[str], str | None]) -> None:
    topology = Topology.read(reader)
    everything = frozenset().union(*topology.domains)
    for ranks in range(len(topology.domains), 40):
        sets = [divide_cores([everything] * ranks, rank, topology) for rank in range(ranks)]
        assert sorted(cpu for cpus in sets for cpu in cpus) == sorted(everything)
        assert all(any(cpus <= domain for domain in topology.domains) for cpus in sets)
        assert all(core <= cpus or not core & cpus for cpus in sets for core in topology.cores)


def test_launcher_bound_ranks_keep_their_cores_across_domains() -> None:
    sets = [cores("0-1,64-65"), cores("2-3,66-67")]
    assert [divide_cores(sets, rank, Topology.read(DUAL)) for rank in range(2)] == sets


def test_memory_without_cores_and_no_sys_at_all() -> None:
    assert Topology.read(machine(["0-3", "", "4-7"])).domains == (cores("0-3"), cores("4-7"))
    assert Topology.read(lambda path: None) == Topology()
    assert divide_cores([cores("0-7")] * 2, 1, Topology()) == cores("4-7")


def test_cpu_lists_read_and_write() -> None:
    for text in ("", "0", "0-3,8", "1,3,5-7,128-191"):
        assert format_cpus(parse_cpus(text)) == text
