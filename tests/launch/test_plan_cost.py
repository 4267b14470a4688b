"""Predicted times, by formulas."""

from __future__ import annotations

from typing import Any

import pytest

from spmd.comm.partition import Partition
from spmd.launch.plan_cost import (
    Cluster,
    Compute,
    GridSize,
    LinkSpeed,
    Workload,
    estimate,
    interpolate,
)
from spmd.launch.plan_model import SHAPES, ModelShape

FAST = LinkSpeed(3e-6, 450e9)
SLOW = LinkSpeed(10e-6, 25e9)
ANY = Compute(3.3e12, 800e12)

ROUND = ModelShape("round", 10, 1000, 10, 10, 100, 4000, 20000)
LAYER, HEAD = 4 * 1000 * 1000 + 3 * 1000 * 4000, 20000 * 1000


def cost_of(grid: GridSize, concurrency: int, cluster: Cluster) -> Any:
    work = Workload(1000, concurrency, 400, 200, "float16")
    return estimate(ROUND, Partition.even(10, grid.pp), grid, cluster, work)


def test_time_of_a_token() -> None:
    # 1 TB/s, flops never the limit, no overhead; 500 tokens of context on average, 2 x 1000 values each.
    read_only = Compute(1e12, 1e30)
    cluster = Cluster(1, 2, 1e12, read_only, LinkSpeed(1e-6, 1e11), SLOW)
    alone = (2 * (10 * LAYER + HEAD) + 4 * 500 * 10 * 2 * 1000 * 2) / 1e12
    assert cost_of(GridSize(1, 1, 1), 4, cluster).time_per_token == pytest.approx(alone)
    # Two copies: two requests each, so half the cached keys, and twice the tokens in a turn.
    half = (2 * (10 * LAYER + HEAD) + 2 * 500 * 10 * 2 * 1000 * 2) / 1e12
    two = cost_of(GridSize(2, 1, 1), 4, cluster)
    assert two.time_per_token == pytest.approx(half)
    assert two.decode_rate == pytest.approx(4 / half)
    # Tensor parallel: half of everything, 21 reductions of 4 x 1000 halves, one of 4 x 16 bytes.
    reduce = [2 * 1e-6 + 2 * (1 / 2) * size / 1e11 for size in (4 * 1000 * 2, 4 * 16)]
    shared = cost_of(GridSize(1, 1, 2), 4, cluster)
    assert shared.time_per_token == pytest.approx(alone / 2 + 21 * reduce[0] + reduce[1])
    assert (shared.bytes_inside, shared.bytes_across) == (2 * 1000 * 2 * 21, 0)
    # Pipeline of two: the last stage with the head is slower and sets the pace of both micro-batches of 2.
    first = (2 * 5 * LAYER + 2 * 500 * 5 * 2 * 1000 * 2) / 1e12
    last = first + 2 * HEAD / 1e12
    piped = cost_of(GridSize(1, 2, 1), 4, cluster)
    assert piped.time_per_token == pytest.approx(2 * last)
    assert piped.bubble == pytest.approx(1 - (first + last) / (2 * last))
    assert (piped.bytes_inside, piped.bytes_across) == (1000 * 2, 0)
    # With one request there is one micro-batch: it goes through both stages and its id goes back.
    hop = 2e-6 + (1000 * 2 + 8) / 1e11
    one_way = (2 * (10 * LAYER + HEAD) + 500 * 10 * 2 * 1000 * 2) / 1e12
    assert cost_of(GridSize(1, 2, 1), 1, cluster).time_per_token == pytest.approx(one_way + hop)


def test_time_of_a_prompt() -> None:
    # Now arithmetic is the limit: 1 Tflop/s. Four prompts of 400 tokens are one batch of 1600.
    cluster = Cluster(1, 1, 1e12, Compute(1e30, 1e12), FAST, SLOW)
    attention = 4 * 1600 * 200 * 10 * 100 * 10  # 200 tokens before each on average
    prefill = (2 * 1600 * 10 * LAYER + 2 * 4 * HEAD + attention) / 1e12
    found = cost_of(GridSize(1, 1, 1), 4, cluster)
    assert found.first_token == pytest.approx(prefill)
    assert found.throughput == pytest.approx(4 * 200 / (prefill + 199 * found.time_per_token))


def test_experts_are_read_as_far_as_they_are_picked() -> None:
    shape = SHAPES["mixtral-8x22b"]
    cluster = Cluster(1, 1, 1e12, Compute(1e12, 1e30, kv_s_per_byte=0.0), FAST, SLOW)
    expert = 3 * 6144 * 16384
    rest = 56 * (6144 * 128 * (2 * 48 + 2 * 8) + 6144 * 8) + 32768 * 6144
    for requests, picked in ((1, 2.0), (4, 8 * (1 - 0.75**4)), (1000, 8.0)):
        work = Workload(1000, requests, 10, 10, "float16", batch_sequences=1000)
        found = estimate(shape, Partition.even(56, 1), GridSize(1, 1, 1), cluster, work)
        assert found.time_per_token == pytest.approx(2 * (rest + 56 * picked * expert) / 1e12)


def test_links_that_leave_a_node() -> None:
    grid, cluster = GridSize(1, 2, 4), Cluster(2, 4, 1e12, ANY, FAST, SLOW)
    assert not grid.tp_crosses(cluster)
    assert grid.pp_crosses(cluster, 0)
    assert GridSize(1, 1, 8).tp_crosses(cluster)
    # Three ranks do not divide a node of four: the second group straddles.
    assert GridSize(4, 1, 3).tp_crosses(Cluster(3, 4, 1e12, ANY, FAST, SLOW))
    assert not GridSize(2, 2, 2).pp_crosses(cluster, 0)


def test_measured_speeds_of_a_tp_group_hold_its_reductions() -> None:
    # 1 ns a byte with one row, 3 ns with five; 10 us a layer with its reductions; 100 us a step.
    curve = ((1, 1e-9), (5, 3e-9))
    run = Compute(1e9, 1e30, curve, ((1, 10e-6),), ((1, 100e-6),), ((1, 7e-6),), kv_s_per_byte=0.0)
    cluster = Cluster(1, 2, 1e12, ANY, SLOW, SLOW, {2: run})
    expected = 2 * (10 * LAYER + HEAD) / 2 * 2.5e-9 + 10 * 10e-6 + 100e-6 + 7e-6
    assert cost_of(GridSize(1, 1, 2), 4, cluster).time_per_token == pytest.approx(expected)


def test_curves() -> None:
    curve = ((1, 10.0), (3, 14.0), (7, 10.0))
    assert [interpolate(curve, x) for x in (1, 2, 3, 5, 7, 9, 100)] == [10, 12, 14, 12, 10, 8, 0]
    assert interpolate(((4, 2.5),), 100) == 2.5
