"""The grid: who is where, for every way the world factors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from spmd.comm.errors import UserError
from spmd.comm.grid import Grid, factor_world

WORLD = MPI.COMM_WORLD
TIMEOUT_S = 60.0


def factorings(world: int) -> list[tuple[int, int, int]]:
    sizes = range(1, world + 1)
    return [(d, p, t) for d in sizes for p in sizes for t in sizes if d * p * t == world]


def test_dp_is_what_is_left_over() -> None:
    assert factor_world(8, 2, 2, None) == (2, 2, 2)
    assert factor_world(8, None, None, None) == (8, 1, 1)
    assert factor_world(8, 4, None, 2) == (2, 1, 4)
    assert factor_world(1, None, None, None) == (1, 1, 1)


@settings(deadline=None)
@given(st.integers(1, 24), *[st.none() | st.integers(1, 9)] * 3)
def test_factors_or_refuses(world: int, tp: int | None, pp: int | None, dp: int | None) -> None:
    fits = [
        (d, p, t)
        for d, p, t in factorings(world)
        if t == (tp or 1) and p == (pp or 1) and (dp is None or d == dp)
    ]
    if fits:
        assert [factor_world(world, tp, pp, dp)] == fits
    else:
        with pytest.raises(UserError, match=f"world: {world} ranks do not factor"):
            factor_world(world, tp, pp, dp)


def test_refusal_says_what_would_work() -> None:
    with pytest.raises(UserError) as refusal:
        factor_world(6, 4, None, None)
    assert str(refusal.value) == (
        "world: 6 ranks do not factor into tp 4 x pp 1 x dp (what is left over); "
        "start a multiple of 4 ranks, or use --tp 1, 2, 3 or 6"
    )
    with pytest.raises(UserError, match=r"start 12 ranks, or use --tp 2$"):
        factor_world(8, 3, 1, 4)
    with pytest.raises(UserError, match=r"start 8 ranks, or choose each size among 1, 2, 3 or 6$"):
        factor_world(6, 2, 2, 2)
    with pytest.raises(UserError, match="--tp: 0 is out of range"):
        factor_world(6, 0, None, None)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["auto", "mpi"])
def test_every_group_holds_the_ranks_it_should(backend: str) -> None:
    for dp, pp, tp in factorings(WORLD.size):
        grid = Grid.create(WORLD, tp=tp, pp=pp, backend=backend, timeout_s=TIMEOUT_S)
        assert (grid.dp_size, grid.pp_size, grid.tp_size) == (dp, pp, tp)
        d, p, t = grid.dp_rank, grid.pp_rank, grid.tp_rank
        assert (d * pp + p) * tp + t == grid.rank == WORLD.rank
        assert grid.tp.ranks == tuple((d * pp + p) * tp + other for other in range(tp))
        assert grid.pp.ranks == tuple((d * pp + other) * tp + t for other in range(pp))
        assert grid.dp.ranks == tuple((other * pp + p) * tp + t for other in range(dp))
        assert grid.replica.ranks == tuple(range(d * pp * tp, (d + 1) * pp * tp))
        assert grid.replica.rank == p * tp + t
        assert grid.world.ranks == tuple(range(WORLD.size))
        assert WORLD.rank in grid.node.ranks
        assert grid.node_size == grid.node.size
        assert grid.is_first_stage == (p == 0)
        assert grid.is_last_stage == (p == pp - 1)
        for group in (grid.tp, grid.pp, grid.dp, grid.replica, grid.world, grid.node):
            assert int(group.all_reduce(torch.tensor([WORLD.rank]))) == sum(group.ranks)
        assert f"rank {WORLD.rank}/{WORLD.size}" in str(grid)
        grid.free()


@pytest.mark.mpi
def test_a_world_that_does_not_factor_is_refused_on_every_rank() -> None:
    with pytest.raises(UserError, match="do not factor"):
        Grid.create(WORLD, tp=WORLD.size + 1)
    with pytest.raises(UserError, match="'nccl' needs ranks with a GPU each"):
        Grid.create(WORLD, backend="nccl")
    with pytest.raises(UserError, match="'gloo' is unknown"):
        Grid.create(WORLD, backend="gloo")
    assert WORLD.allreduce(1) == WORLD.size  # nobody is left behind in a collective
