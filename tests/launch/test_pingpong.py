"""Pairs of ranks are chosen so that every kind of link is seen, and their figures hold for both sides."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from spmd.launch.pingpong import LARGE_BYTES, choose_pairs, measure_links, typical


def test_few_ranks_are_measured_in_all_pairs() -> None:
    assert choose_pairs([0, 0, 1]) == [(0, 1), (0, 2), (1, 2)]
    assert choose_pairs([0]) == []


def test_many_ranks_are_sampled_inside_and_between_nodes() -> None:
    nodes = [rank // 8 for rank in range(256)]
    pairs = choose_pairs(nodes, max_pairs=40)
    assert len(pairs) == len(set(pairs)) <= 40
    assert all(a < b for a, b in pairs)
    inside = [pair for pair in pairs if nodes[pair[0]] == nodes[pair[1]]]
    assert 0 < len(inside) < len(pairs)
    assert len({node for a, b in pairs for node in (nodes[a], nodes[b])}) > 20
    assert len(choose_pairs([0] * 100, 40)) == 40


@pytest.mark.mpi
def test_every_rank_gets_the_same_positive_figures() -> None:
    world = MPI.COMM_WORLD.Dup()
    links = measure_links(world, timeout_s=60.0)
    assert [(link.first, link.second) for link in links] == choose_pairs([0] * world.size)
    assert world.allgather(links) == [links] * world.size
    for link in links:
        assert link.same_node
        assert 0 < link.latency_s < 1
        assert LARGE_BYTES < link.bandwidth < 1e13
    assert (typical(links, same_node=True) is None) == (world.size == 1)
    assert typical(links, same_node=False) is None
    world.Free()
