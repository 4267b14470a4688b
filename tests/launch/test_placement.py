"""The line that says where ranks run."""

from __future__ import annotations

import pytest

from spmd.launch.cores import parse_cpus
from spmd.launch.placement import Place, describe_places


def place(node: int, device: str, cpus: str, threads: int, *domains: int) -> Place:
    return Place(node, device, parse_cpus(cpus), threads, domains)


@pytest.mark.parametrize(
    ("places", "line"),
    [
        pytest.param(
            [place(0, "cpu", "0-1", 2, 0)], "1 rank on 1 node: cpu; cores 0-1; 2 threads", id="alone"
        ),
        pytest.param(
            [place(0, "cpu", "0", 1, 0), place(0, "cpu", "1", 1, 0)],
            "2 ranks on 1 node: cpu; cores 0 | 1; 1 thread each",
            id="two cores",
        ),
        pytest.param(
            [place(n, f"cuda:{i}", f"{16 * i}-{16 * i + 15}", 16, i) for n in (0, 2) for i in (0, 1)],
            "4 ranks on 2 nodes: each with cuda:0 | cuda:1; cores 0-15 | 16-31; NUMA domain 0 | 1; "
            "16 threads each",
            id="nodes alike",
        ),
        pytest.param(
            [place(0, "cpu", "0-7", 8, 0), place(1, "cpu", "0-3", 4, 0)],
            "2 ranks on 2 nodes: cpu; cores 0-7; 8 threads / cpu; cores 0-3; 4 threads",
            id="nodes that differ",
        ),
        pytest.param(
            [place(0, "cpu", "0-63", 64, 0), place(0, "cpu", "64-79", 16, 1)],
            "2 ranks on 1 node: cpu; cores 0-63 | 64-79; NUMA domain 0 | 1; 64 | 16 threads",
            id="threads that differ",
        ),
        pytest.param(
            [place(0, "cpu", str(i), 1, 0) for i in range(10)],
            "10 ranks on 1 node: cpu; cores 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | ...; 1 thread each",
            id="many",
        ),
        pytest.param(
            [place(0, "cpu", "", 8)], "1 rank on 1 node: cpu; 8 threads", id="a system that cannot bind"
        ),
    ],
)
def test_line(places: list[Place], line: str) -> None:
    assert describe_places(places) == line
