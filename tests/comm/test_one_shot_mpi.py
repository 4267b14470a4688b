"""The one-shot kernel's own source, compiled for the host, over ranks that share memory: what it computes,
the order of its steps, and all that the group does around it. Not shown: a GPU's memory order, IPC, and
speed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from support.one_shot_host import COMPILER, HostRuntime
from support.recording_nccl import CURRENT_STREAM, RecordingNccl
from torch import Tensor

from spmd.comm.cuda_one_shot import OneShot, crossover
from spmd.comm.group import Group
from spmd.comm.mpi import MpiGroup
from spmd.comm.nccl import NcclGroup
from spmd.comm.one_shot_start import open_one_shot
from spmd.comm.shm import ShmGroup

WORLD = MPI.COMM_WORLD
CPU = torch.device("cpu")
TIMEOUT_S = 60.0
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(WORLD.size not in (2, 3), reason="for 2 or 3 ranks"),
    pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel for the host"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all ranks."""
    path = tmp_path_factory.mktemp("one-shot") if WORLD.rank == 0 else None
    return Path(WORLD.bcast(path, 0))


@pytest.fixture
def host() -> Iterator[Group]:
    group = ShmGroup(WORLD.Dup(), "tp", timeout_s=TIMEOUT_S)
    yield group
    group.free()


def random_values(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def rank_order_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def test_many_sums_one_after_the_other(host: Group, folder: Path) -> None:
    runtime = HostRuntime(WORLD, folder)
    one_shot, why_not = OneShot.open(host, runtime, "card", slot_bytes=4096, threads=4, blocks=3)
    assert one_shot is not None, why_not
    shared, own = random.Random(3), random.Random(WORLD.rank)
    for step in range(40):
        dtype = shared.choice(DTYPES)
        if own.random() < 0.2:
            host.wait_device(_Pause(own.random() * 0.003))
        if shared.random() < 0.5:
            count = 16 // dtype.itemsize * shared.choice([1, 2, 7, 40, 250])
            parts = [random_values(step, rank, (count,), dtype) for rank in range(WORLD.size)]
            x = parts[WORLD.rank].clone()
            assert one_shot.serves(x)
            one_shot.all_reduce(x, CURRENT_STREAM)
            assert torch.equal(x, rank_order_sum(parts)), step
            continue
        rows, hidden = shared.choice([(1, 8), (1, 64), (2, 24), (5, 40)])
        partial = [random_values(step, rank, (rows, hidden), dtype) for rank in range(WORLD.size)]
        residual = random_values(step, 10, (rows, hidden), dtype)
        weight = random_values(step, 11, (hidden,), dtype)
        expected = (rank_order_sum(partial).float() + residual.float()).to(dtype)
        scale = torch.rsqrt(expected.float().square().mean(-1, keepdim=True) + 1e-5)
        expected_norm = (expected.float() * scale).to(dtype).float() * weight.float()
        mine, normed = partial[WORLD.rank].clone(), torch.empty(rows, hidden, dtype=dtype)
        one_shot.all_reduce_norm(mine, residual, weight, 1e-5, normed, CURRENT_STREAM)
        assert torch.equal(residual, expected), step
        assert torch.equal(mine, partial[WORLD.rank])
        step_of_type = torch.finfo(dtype).eps
        assert torch.allclose(normed.float(), expected_norm, rtol=2 * step_of_type, atol=step_of_type), step
    # Odd addresses are the rank's own affair: others must not see them.
    x = torch.ones(9)[WORLD.rank % 2 :][:8]
    one_shot.all_reduce(x, CURRENT_STREAM)
    assert torch.equal(x, torch.full((8,), float(WORLD.size)))
    with pytest.raises(ValueError, match=r"weight: torch\.float32 of shape"):
        one_shot.all_reduce_norm(mine, residual, torch.ones(hidden + 1), 1e-5, normed, CURRENT_STREAM)
    assert not one_shot.serves(torch.ones(2))  # 8 bytes
    assert not one_shot.serves(torch.ones(2048))  # more than a slot
    assert not one_shot.serves(torch.ones(8, dtype=torch.int32))
    assert not one_shot.fuses_norm(1, 9, torch.float32)
    assert not one_shot.fuses_norm(100, 64, torch.float32)
    one_shot.close()
    assert runtime.mapped == 0


class _Pause:
    """In the place of an event of a device that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def synchronize(self) -> None:
        time.sleep(self.seconds)


def test_small_sums_of_a_group_are_the_kernels(folder: Path) -> None:
    library = RecordingNccl()
    group = NcclGroup.open(ShmGroup(WORLD.Dup(), "tp", timeout_s=TIMEOUT_S), library, CPU)
    weight, partial = torch.ones(8), torch.full((2, 8), float(group.rank))
    assert not group.fuses_norm(2, 8, torch.float32)
    assert group.fused_all_reduce_norm(partial, torch.ones(2, 8), weight, 1e-6) is None
    library.runtime = HostRuntime(WORLD, folder)
    # Kernel and NCCL in turn, at 4, 16, 64, 256 and 1024 KiB: the kernel loses at the third size. Only
    # rank 0's clock counts.
    times = iter([1, 2, 1, 2, 3, 2, 1, 2, 1, 2] if group.rank == 0 else [9.0] * 10)
    library.speed = lambda: float(next(times))
    group.prepare_sums(threads=4)
    assert group.one_shot is not None
    assert group.one_shot.limit_bytes == 16 << 10
    library.take_calls()
    library.runtime.launches.clear()
    x = torch.full((64,), float(group.rank))
    total = float(sum(range(group.size)))
    assert torch.equal(group.all_reduce(x), torch.full((64,), total))
    assert library.runtime.launches == [("all_reduce_float32", 4, 4, CURRENT_STREAM)]
    assert library.take_calls() == []
    residual = torch.ones(2, 8)
    assert group.fuses_norm(2, 8, torch.float32)
    normed = group.fused_all_reduce_norm(partial, residual, weight, 0.0)
    assert normed is not None
    assert torch.equal(residual, torch.full((2, 8), 1 + total))
    assert torch.allclose(normed, torch.ones(2, 8))
    out = torch.empty(2, 8)
    assert group.fused_all_reduce_norm(partial, residual, weight, 0.0, out) is out
    for large in (torch.ones((16 << 10) // 4 + 4), torch.ones(8, dtype=torch.float64)):
        assert torch.equal(group.all_reduce(large), torch.full_like(large, group.size))
    assert [call.name for call in library.take_calls()] == ["allReduce", "allReduce"]
    assert not group.fuses_norm(1 << 10, 8, torch.float32)
    group.free()
    assert library.runtime.mapped == 0


def test_a_group_does_without_a_kernel_that_is_wrong_or_cannot_be(host: Group, folder: Path) -> None:
    library = RecordingNccl()

    def why_not(runtime: HostRuntime, group: Group = host) -> str:
        one_shot, reason = open_one_shot(group, library, CPU, lambda x: None, runtime, threads=4)
        assert one_shot is None
        assert runtime.mapped == 0
        assert set(group.all_gather_objects(reason)) == {reason}
        return reason

    for kernel in ("all_reduce", "all_reduce_norm"):
        wrong = f"{kernel}_bfloat16" if WORLD.rank == 1 else None
        reason = why_not(HostRuntime(WORLD, folder, wrong=wrong))
        assert reason == f"the kernel's {kernel} of torch.bfloat16 came out wrong"
    assert "cannot read the memory of GPU 0000:01" in why_not(
        HostRuntime(WORLD, folder, unreachable="0000:01:00.0")
    )
    broken = why_not(HostRuntime(WORLD, folder / "missing" if WORLD.rank == 1 else folder))
    assert broken.startswith("rank 1: ")
    nodes = MpiGroup(WORLD.Dup(), "tp", timeout_s=TIMEOUT_S)
    assert why_not(HostRuntime(WORLD, folder), nodes) == "the ranks are on several nodes"
    nodes.free()
    library.speed = iter([2.0, 1.0] * 5).__next__
    assert why_not(HostRuntime(WORLD, folder)) == "NCCL is faster at every size"


def test_crossover_is_where_the_kernel_first_loses() -> None:
    assert crossover([1, 2, 4], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 4
    assert crossover([1, 2, 4], [1.0, 5.0, 3.0], [2.0, 2.0, 9.0]) == 1
    assert crossover([1, 2, 4], [3.0, 1.0, 1.0], [2.0, 2.0, 9.0]) == 0
