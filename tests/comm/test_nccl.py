"""NCCL groups over a stand-in whose collectives are real, over MPI (support/recording_nccl.py).

Shown here: that the group calls NCCL with the right addresses, counts, types, roots and streams, in the same
order on all ranks, and that the results are what the ranks' numbers add up to. Not shown: that NCCL, CuPy and
a GPU do what the stand-in does (bench/gpu.py, on a machine that has them).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI
from support.recording_nccl import CURRENT_STREAM, Call, RecordingNccl
from torch import Tensor

from spmd.comm.group import Group
from spmd.comm.mpi import MpiGroup
from spmd.comm.nccl import NcclGroup
from spmd.comm.nccl_library import DataType, Reduction
from spmd.comm.nccl_messages import DeviceRecv, DeviceSend
from spmd.comm.shm import ShmGroup

WORLD = MPI.COMM_WORLD
CPU = torch.device("cpu")
TIMEOUT_S = 60.0
SUMMED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8]
MOVED = [*SUMMED, torch.uint8, torch.bool, torch.int16, torch.float8_e4m3fn]

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not 2 <= WORLD.size <= 4, reason="for 2 to 4 ranks")]


def make_host() -> Group:
    return ShmGroup(WORLD.Dup(), "tp", timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[NcclGroup, RecordingNccl]]:
    library = RecordingNccl()
    group = NcclGroup.open(make_host(), library, CPU)
    yield group, library
    group.free()
    assert [communicator.state for communicator in library.communicators] == ["destroyed"] * len(
        library.communicators
    )


@pytest.fixture
def group(made: tuple[NcclGroup, RecordingNccl]) -> NcclGroup:
    made[1].take_calls()
    return made[0]


@pytest.fixture
def library(made: tuple[NcclGroup, RecordingNccl]) -> RecordingNccl:
    return made[1]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every type."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) * (rank + 2)) % 7).reshape(shape).to(torch.float32).to(dtype)


def equal(found: Tensor, expected: Tensor) -> bool:
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(found.double(), expected.double())
    )


def everyones(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [values(rank, shape, dtype) for rank in range(WORLD.size)]


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0).to(parts[0].dtype)


@pytest.mark.parametrize("shape", [(0,), (), (5,), (3, 65)], ids=str)
def test_sums_and_maxima_equal_arithmetic(group: NcclGroup, shape: tuple[int, ...]) -> None:
    for dtype in [*SUMMED, torch.int16]:
        parts = everyones(shape, dtype)
        x = parts[group.rank].clone()
        assert group.all_reduce(x) is x
        assert equal(x, total(parts))
        x = parts[group.rank].clone()
        assert group.all_reduce_max(x) is x
        assert equal(x, torch.stack(parts).amax(0))
    x = torch.tensor([float("nan") if group.rank == group.size - 1 else 1.0, float(group.rank)])
    group.all_reduce_max(x)
    assert x[0].isnan()
    assert x[1] == group.size - 1


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_gathering_scattering_and_broadcasting_equal_arithmetic(
    group: NcclGroup, even: bool, dim: int
) -> None:
    sizes = [3] * group.size if even else [(rank * 5 + 1) % 4 for rank in range(group.size)]
    for dtype in MOVED:
        shapes = [(size, 2) if dim == 0 else (2, size) for size in sizes]
        parts = [values(rank, shape, dtype) for rank, shape in enumerate(shapes)]
        gathered = group.all_gather(parts[group.rank], sizes, dim)
        assert gathered.is_contiguous()
        assert equal(gathered.float(), torch.cat([part.float() for part in parts], dim))
        for root in range(group.size):
            x = values(group.rank, (5,), dtype)
            assert equal(group.broadcast(x, root), values(root, (5,), dtype))
    shape = (sum(sizes), 2) if dim == 0 else (2, sum(sizes))
    for dtype in [*SUMMED, torch.int16]:
        wholes = everyones(shape, dtype)
        mine = wholes[group.rank].clone()
        found = group.reduce_scatter(mine, sizes, dim)
        assert found.is_contiguous()
        assert equal(found, total(wholes).split(sizes, dim)[group.rank])
        assert equal(mine, wholes[group.rank])


def test_tensors_that_are_not_contiguous(group: NcclGroup) -> None:
    parts = everyones((4, 6), torch.float32)
    x = parts[group.rank].clone()
    group.all_reduce(x[:, 1:3])
    assert equal(x[:, 1:3], total(parts)[:, 1:3])
    assert equal(x[:, 3:], parts[group.rank][:, 3:])
    x = parts[group.rank].clone().T
    assert equal(group.broadcast(x, 1), parts[1].T)
    sizes = [6] * group.size
    assert equal(group.all_gather(parts[group.rank].T, sizes), torch.cat([part.T for part in parts]))


def test_what_nccl_is_called_with(group: NcclGroup, library: RecordingNccl) -> None:
    x = torch.ones(6, dtype=torch.bfloat16)
    group.all_reduce(x)
    address = x.data_ptr()
    arguments = (address, address, 6, int(DataType.bfloat16), int(Reduction.sum), CURRENT_STREAM)
    assert library.take_calls() == [Call("allReduce", arguments, 0)]
    numbers = torch.ones(2, dtype=torch.int32)
    group.all_reduce_max(numbers)
    (call,) = library.take_calls()
    assert call.arguments[2:] == (2, int(DataType.int32), int(Reduction.max), CURRENT_STREAM)
    # A maximum of floats keeps a NaN, which NCCL's does not promise: the parts are gathered.
    group.all_reduce_max(x)
    (call,) = library.take_calls()
    assert call.name == "allGather"

    flags = torch.ones(4, dtype=torch.bool)
    group.broadcast(flags, 1)
    address = flags.data_ptr()
    assert library.take_calls() == [
        Call("broadcast", (address, address, 4, int(DataType.uint8), 1, CURRENT_STREAM), 0)
    ]
    group.broadcast(torch.ones(3, dtype=torch.int16))
    (call,) = library.take_calls()
    assert call.arguments[2:4] == (6, int(DataType.uint8))  # bytes

    out = group.all_gather(x, [6] * group.size)
    arguments = (x.data_ptr(), out.data_ptr(), 6, int(DataType.bfloat16), CURRENT_STREAM)
    assert library.take_calls() == [Call("allGather", arguments, 0)]
    whole = torch.ones(2 * group.size)
    out = group.reduce_scatter(whole, [2] * group.size)
    arguments = (whole.data_ptr(), out.data_ptr(), 2, int(DataType.float32), 0, CURRENT_STREAM)
    assert library.take_calls() == [Call("reduceScatter", arguments, 0)]
    for nothing in (group.all_reduce(torch.ones(0)), group.broadcast(torch.ones(0, 3))):
        assert nothing.numel() == 0
    assert library.take_calls() == []


def test_uneven_parts_are_one_group_of_calls(group: NcclGroup, library: RecordingNccl) -> None:
    sizes = [2, 0, 5, 1][: group.size]
    roots = [rank for rank, size in enumerate(sizes) if size]
    group.all_gather(torch.ones(sizes[group.rank]), sizes)
    calls = library.take_calls()
    assert [call.name for call in calls] == ["group_start", *["broadcast"] * len(roots), "group_end"]
    assert [call.arguments[2] for call in calls[1:-1]] == [sizes[root] for root in roots]
    assert [call.arguments[4] for call in calls[1:-1]] == roots
    x = torch.ones(sum(sizes))
    out = group.reduce_scatter(x, sizes)
    calls = library.take_calls()
    assert [call.name for call in calls] == ["group_start", *["reduce"] * len(roots), "group_end"]
    starts = [sum(sizes[:root]) for root in roots]
    assert [call.arguments[0] for call in calls[1:-1]] == [x.data_ptr() + 4 * start for start in starts]
    targets = {call.arguments[5]: call.arguments[1] for call in calls[1:-1]}
    assert targets.get(group.rank) == (out.data_ptr() if out.numel() else None)


def test_messages_travel_on_streams_of_their_own(group: NcclGroup, library: RecordingNccl) -> None:
    last = group.size - 1
    routes = [(rank, rank + 1, 10) for rank in range(last)] + [(last, 0, 11)]
    group.open_messages(routes)
    opened = library.take_calls()
    assert sum(call.name == "communicator" for call in opened) == 2
    group.open_messages(routes)  # again: nothing new
    assert not [call for call in library.take_calls() if call.name == "communicator"]

    before = group.rank - 1 if group.rank else last
    after = (group.rank + 1) % group.size
    tag_in, tag_out = (11 if group.rank == 0 else 10), (11 if group.rank == last else 10)
    into = torch.zeros(4, 3, dtype=torch.bfloat16)
    receive = group.irecv(into, before, tag_in)
    # What comes from a later rank is asked for when it is waited for: see NcclGroup.irecv.
    assert [call.name for call in library.calls if call.name == "recv"] == ["recv"] * (before < group.rank)
    library.take_calls()
    mine = values(group.rank, (3, 4), torch.bfloat16).T
    send = group.isend(mine, after, tag_out)
    assert isinstance(send, DeviceSend)
    assert isinstance(receive, DeviceRecv)
    record, wait, sent, mark = library.take_calls()
    stream = sent.arguments[4]
    assert stream != CURRENT_STREAM
    assert record == Call("record", (CURRENT_STREAM,))
    assert wait == Call("wait", (stream, CURRENT_STREAM))  # not before the tensor is computed
    assert sent.name == "send"
    assert sent.arguments[1:4] == (12, int(DataType.bfloat16), 1)
    assert sent.communicator != 0  # nor behind a collective
    assert mark == Call("record", (stream,))
    assert (sent.arguments[0], stream) in library.kept
    assert receive.wait() is into
    assert equal(into, values(before, (3, 4), torch.bfloat16).T)
    assert library.take_calls()[-1].arguments[0] == CURRENT_STREAM
    send.wait()
    assert send.test()

    # Several under way on one route arrive in order, into tensors that need not be contiguous.
    inputs = [values(before + step, (2, 3), torch.float32) for step in range(3)]
    targets = [torch.zeros(3, 2).T for _ in range(3)]
    receives = [group.irecv(target, before, tag_in) for target in targets]
    sends = [
        group.isend(values(group.rank + step, (2, 3), torch.float32), after, tag_out) for step in range(3)
    ]
    for receive, expected in zip(receives, inputs):
        assert equal(receive.wait(), expected)
    for send in sends:
        send.wait()
    # A route that was not opened goes over MPI.
    library.take_calls()
    if group.rank == 0:
        group.send(torch.ones(3), 1, tag=3)
    elif group.rank == 1:
        assert equal(group.recv(torch.zeros(3), 0, tag=3), torch.ones(3))
    assert library.take_calls() == []
    with pytest.raises(ValueError, match="peer"):
        group.isend(torch.ones(1), group.size)


def test_objects_and_tensors_elsewhere_go_over_mpi(library: RecordingNccl) -> None:
    library.take_calls()
    nowhere = torch.device("cuda", 0)
    group = NcclGroup(MpiGroup(WORLD.Dup(), "pp", TIMEOUT_S), library, nowhere, library.communicators[0])
    group._open.clear()  # it is the other group's
    parts = everyones((5,), torch.float32)
    assert equal(group.all_reduce(parts[group.rank].clone()), total(parts))
    assert equal(group.all_gather(parts[group.rank], [5] * group.size), torch.cat(parts))
    whole = torch.ones(group.size)
    assert equal(group.reduce_scatter(whole, [1] * group.size), torch.tensor([float(group.size)]))
    assert equal(group.broadcast(parts[group.rank].clone(), 1), parts[1])
    assert group.all_gather_objects(group.rank) == list(range(group.size))
    group.barrier()
    assert library.take_calls() == []
    group.free()
