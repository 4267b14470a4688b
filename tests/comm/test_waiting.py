"""Waits that end: with the thing waited for, or with an error that names who is missing."""

from __future__ import annotations

import time

import pytest
import torch
from mpi4py import MPI

from spmd.comm.mpi import MpiGroup
from spmd.comm.shm import CollectiveMismatch, ShmGroup
from spmd.comm.waiting import HangError, meet, wait_until

WORLD = MPI.COMM_WORLD
TIMEOUT_S = 60.0


def test_wait_ends_when_the_predicate_holds() -> None:
    for delay in (0.0, 1e-4, 3e-3, 0.05):
        ready = time.perf_counter() + delay
        wait_until(lambda ready=ready: time.perf_counter() >= ready, "the clock", 10.0)  # type: ignore[misc]
        assert time.perf_counter() >= ready


def test_wait_that_hangs_names_what_and_for_how_long() -> None:
    calls: list[int] = []
    with pytest.raises(HangError, match=r"the impossible: not done after 0\.\d s"):
        wait_until(lambda: False, "the impossible", 0.1, lambda: calls.append(1))
    assert calls
    with pytest.raises(HangError, match="asked only now"):
        wait_until(lambda: False, lambda: "asked only now", 0.0)


def test_a_true_predicate_is_never_late() -> None:
    wait_until(lambda: True, "nothing", 0.0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [MpiGroup, ShmGroup])
def test_a_missing_rank_is_named(kind: type[MpiGroup] | type[ShmGroup]) -> None:
    group = kind(WORLD.Dup(), "tp", timeout_s=TIMEOUT_S)
    last = group.size - 1
    group.barrier()
    group.timeout_s = 1.0
    if group.rank != last:
        with pytest.raises(HangError) as hang:
            group.all_reduce(torch.ones(5))
        assert "all_reduce of 20 bytes in tp group" in str(hang.value)
        if kind is ShmGroup:
            assert "step 2: rank " in str(hang.value)
            assert f"{last} has not arrived" in str(hang.value)
    group.timeout_s = TIMEOUT_S
    meet(WORLD, "the late rank", TIMEOUT_S)
    if group.rank == last:
        group.all_reduce(torch.ones(5))
    group.free()


@pytest.mark.mpi
def test_a_receive_that_hung_can_still_succeed() -> None:
    group = MpiGroup(WORLD.Dup(), timeout_s=TIMEOUT_S)
    receiving = group.irecv(torch.zeros(2), group.rank, tag=9)
    with pytest.raises(HangError, match=f"receive from rank {WORLD.rank}, tag 9"):
        receiving.wait(timeout_s=0.05)
    group.send(torch.ones(2), group.rank, tag=9)
    assert torch.equal(receiving.wait(), torch.ones(2))
    group.free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", ["operation", "size", "root"])
def test_ranks_that_part_ways_are_told(odd: str) -> None:
    group = ShmGroup(WORLD.Dup(), "tp", timeout_s=TIMEOUT_S)
    last = group.size - 1
    calls = {
        "operation": (lambda: group.all_reduce(torch.ones(3)), lambda: group.broadcast(torch.ones(3))),
        "size": (lambda: group.all_reduce(torch.ones(3)), lambda: group.all_reduce(torch.ones(4))),
        "root": (lambda: group.broadcast(torch.ones(3), 0), lambda: group.broadcast(torch.ones(3), 1)),
    }[odd]
    with pytest.raises(CollectiveMismatch) as mismatch:
        calls[group.rank == last]()
    for name in {
        "operation": ("all_reduce of 12 bytes", "broadcast of 12 bytes from rank 0"),
        "size": ("all_reduce of 12 bytes", "all_reduce of 16 bytes"),
        "root": ("broadcast of 12 bytes from rank 0", "broadcast of 12 bytes from rank 1"),
    }[odd]:
        assert name in str(mismatch.value)
    assert f"rank {last} is in" in str(mismatch.value)
    group.free()
