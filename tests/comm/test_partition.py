"""Partitions: even, weighted and aligned splits, and the heads they give each rank."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.comm.errors import UserError
from spmd.comm.heads import HeadPartition
from spmd.comm.partition import Partition

totals = st.integers(0, 200)
parts_counts = st.integers(1, 12)


def test_nine_over_two_is_five_and_four() -> None:
    partition = Partition.even(9, 2)
    assert partition.counts == (5, 4)
    assert (partition.total, partition.parts) == (9, 2)
    assert (partition.start(1), partition.stop(1), partition.count(1)) == (5, 9, 4)
    assert list(range(9))[partition.slice(1)] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("total", "parts", "align", "counts"),
    [
        (5, 8, 1, (1, 1, 1, 1, 1, 0, 0, 0)),
        (0, 3, 1, (0, 0, 0)),
        (96, 2, 32, (64, 32)),
        (10, 2, 4, (8, 2)),
        (10, 5, 4, (4, 4, 0, 0, 2)),
        (130, 4, 1, (33, 33, 32, 32)),
    ],
)
def test_even_counts(total: int, parts: int, align: int, counts: tuple[int, ...]) -> None:
    assert Partition.even(total, parts, align).counts == counts


@settings(deadline=None)
@given(totals, parts_counts, st.integers(1, 40))
def test_even_is_balanced_aligned_and_complete(total: int, parts: int, align: int) -> None:
    partition = Partition.even(total, parts, align)
    assert partition.parts == parts
    assert sum(partition.counts) == total
    assert all(bound % align == 0 for bound in partition.bounds[1:-1])
    if align == 1:
        assert max(partition.counts) - min(partition.counts) <= 1
        assert list(partition.counts) == sorted(partition.counts, reverse=True)
    blocks = [math.ceil(count / align) for count in partition.counts]
    assert max(blocks) <= math.ceil(math.ceil(total / align) / parts)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_owner_is_the_part_that_holds_the_index(counts: list[int]) -> None:
    partition = Partition.from_counts(counts)
    assert list(partition.counts) == counts
    for part in range(partition.parts):
        for index in range(partition.start(part), partition.stop(part)):
            assert partition.owner(index) == part
    for index in (-1, partition.total):
        with pytest.raises(ValueError, match="outside the partition"):
            partition.owner(index)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_weighted_is_as_good_as_the_best_of_all_splits(weights: list[int], parts: int) -> None:
    partition = Partition.weighted(weights, parts)
    assert (partition.total, partition.parts) == (len(weights), parts)
    assert partition == Partition.weighted(weights, parts)

    def loads(bounds: tuple[int, ...]) -> list[int]:
        return [sum(weights[low:high]) for low, high in pairwise(bounds)]

    if len(weights) < parts:
        assert max(partition.counts) == 1
        return
    assert min(partition.counts) >= 1
    cuts = combinations(range(1, len(weights)), parts - 1)
    best = min(
        (max(found), sum(load**2 for load in found)) for found in (loads((0, *c, len(weights))) for c in cuts)
    )
    found = loads(partition.bounds)
    assert (max(found), sum(load**2 for load in found)) == best


def test_weighted_shares_what_the_heaviest_part_leaves() -> None:
    assert Partition.weighted([1] * 30, 4).counts == (8, 8, 7, 7)
    assert Partition.weighted([10, 1, 1, 1, 1, 1], 2).counts == (1, 5)
    assert Partition.weighted([0.1] * 6, 3).counts == (2, 2, 2)


@pytest.mark.parametrize("bounds", [(0,), (), (1, 2), (0, 3, 2)])
def test_bad_bounds(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bounds"):
        Partition(bounds)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="parts: 0"):
        Partition.even(4, 0)
    with pytest.raises(ValueError, match="total: -1"):
        Partition.even(-1, 2)
    with pytest.raises(ValueError, match="align: 0"):
        Partition.even(4, 2, 0)
    with pytest.raises(ValueError, match=r"weights\[1\]"):
        Partition.weighted([1.0, float("nan")], 2)
    with pytest.raises(ValueError, match="counts"):
        Partition.from_counts([2, -1])
    with pytest.raises(ValueError, match="part: 2"):
        Partition.even(4, 2).slice(2)


def test_a_kv_head_that_straddles_two_ranks_lives_on_both() -> None:
    heads = HeadPartition(9, 3, 2)
    assert heads.q.counts == (5, 4)
    assert (heads.kv_range(0), heads.kv_range(1)) == ((0, 2), (1, 3))
    assert heads.kv_index(0) == [0, 0, 0, 1, 1]
    assert heads.kv_index(1) == [0, 1, 1, 1]


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), parts_counts)
def test_every_query_head_finds_its_kv_head(num_kv_heads: int, group: int, parts: int) -> None:
    heads = HeadPartition(num_kv_heads * group, num_kv_heads, parts)
    seen = []
    for part in range(parts):
        start, stop = heads.kv_range(part)
        assert 0 <= start <= stop <= num_kv_heads
        local = heads.kv_index(part)
        assert len(local) == heads.q.count(part)
        assert set(local) == set(range(stop - start))
        seen += [start + index for index in local]
    assert seen == [head // group for head in range(num_kv_heads * group)]


def test_heads_that_form_no_groups() -> None:
    with pytest.raises(UserError, match="num_attention_heads: 9 is not a multiple of num_key_value_heads 2"):
        HeadPartition(9, 2, 1)
    with pytest.raises(UserError, match="at least 1"):
        HeadPartition(9, 0, 1)
