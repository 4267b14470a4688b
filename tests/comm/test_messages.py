"""Point-to-point messages on tensors, and collectives on picklable objects."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI

from spmd.comm.group import Group, make_group
from spmd.comm.objects import gather_objects
from spmd.comm.rounds import rounds

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
TIMEOUT_S = 60.0


@pytest.fixture(scope="module", params=["mpi", "shm"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = make_group(WORLD, request.param, timeout_s=TIMEOUT_S)
    yield made
    made.free()


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("size", [0, 1, 1000, 300_000])
def test_ring(group: Group, dtype: torch.dtype, size: int) -> None:
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = torch.full((size,), group.rank + 1).to(dtype)
    received = torch.zeros(size, dtype=dtype)
    receiving = group.irecv(received, preceding, tag=3)
    sending = group.isend(x, following, tag=3)
    assert receiving.wait() is received
    sending.wait()
    assert sending.test()
    assert receiving.test()
    assert bool((received == torch.tensor(preceding + 1).to(dtype)).all())


@pytest.mark.smoke
def test_messages_keep_their_order_and_their_tags(group: Group) -> None:
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent = [group.isend(torch.tensor([n]), following, tag=n % 2) for n in range(20)]
    odd = [int(group.recv(torch.empty(1, dtype=torch.int64), preceding, tag=1)) for _ in range(10)]
    even = [int(group.recv(torch.empty(1, dtype=torch.int64), preceding, tag=0)) for _ in range(10)]
    assert odd == list(range(1, 20, 2))
    assert even == list(range(0, 20, 2))
    for sending in sent:
        sending.wait()


def test_messages_that_are_not_contiguous(group: Group) -> None:
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    grid = torch.arange(12.0).view(3, 4) + 100 * group.rank
    received = torch.zeros(3, 4)
    receiving = group.irecv(received.T, preceding)
    group.send(grid.T, following)
    receiving.wait()
    assert torch.equal(received, torch.arange(12.0).view(3, 4) + 100 * preceding)


def test_a_message_of_the_wrong_size_is_an_error(group: Group) -> None:
    receiving = group.irecv(torch.zeros(4), group.rank)
    sending = group.isend(torch.ones(3), group.rank)
    with pytest.raises(RuntimeError, match="got 12 bytes, expected 16"):
        receiving.wait()
    sending.wait()
    with pytest.raises(ValueError, match="peer: -1"):
        group.isend(torch.ones(3), -1)
    with pytest.raises(ValueError, match="tag: 32767"):
        group.isend(torch.ones(3), group.rank, tag=32767)


@pytest.mark.smoke
def test_a_waiting_rank_goes_on_sending(group: Group) -> None:
    # Rank 0 posts a message too large to be buffered and waits in a collective, which the receiver
    # enters only when it has the message.
    size, last = 4 << 20, group.size - 1
    if group.rank == 0:
        sending = group.isend(torch.arange(size), last)
    if group.rank == last:
        received = torch.zeros(size, dtype=torch.int64)
        group.recv(received, 0)
        assert torch.equal(received, torch.arange(size))
    assert int(group.all_reduce(torch.tensor([1]))) == group.size
    if group.rank == 0:
        sending.wait()


@pytest.mark.smoke
@pytest.mark.parametrize("size", [0, 100, 1016, 1017, 5000, 3_000_000])
def test_objects_of_any_size(group: Group, size: int) -> None:
    for root in {0, group.size - 1}:
        obj = {"rank": group.rank, "data": bytes([root]) * size}
        assert group.broadcast_object(obj, root) == {"rank": root, "data": bytes([root]) * size}
        texts = [(rank, "x" * (size // (rank + 1))) for rank in range(group.size)]
        assert group.gather_objects(texts[group.rank], root) == (texts if group.rank == root else None)
        assert group.all_gather_objects(texts[group.rank]) == texts
    mine = object()
    if group.rank == 0:
        assert group.broadcast_object(mine) is mine if group.size == 1 else True


def test_objects_in_pieces(group: Group) -> None:
    objects = ["y" * 100 * rank for rank in range(group.size)]
    for root in (None, 0):
        found = gather_objects(group.comm, objects[group.rank], root, lambda request: request.Wait(), 64)
        assert found == (objects if root is None or group.rank == root else None)


def test_rounds_cover_every_count() -> None:
    assert list(rounds([5, 0, 2], 2)) == [
        [(0, 2), (0, 0), (0, 2)],
        [(2, 4), (0, 0), (2, 2)],
        [(4, 5), (0, 0), (2, 2)],
    ]
    assert list(rounds([0, 0], 4)) == []


@pytest.mark.parametrize("what", ["all_reduce", "broadcast_object", "recv"])
def test_waiting_costs_little_cpu(group: Group, what: str) -> None:
    group.all_reduce(torch.ones(4))
    group.barrier()
    began = time.process_time()
    if group.rank == 0:
        time.sleep(1.0)
    if what == "all_reduce":
        group.all_reduce(torch.ones(4))
    elif what == "broadcast_object":
        group.broadcast_object("news")
    elif group.rank == 0:
        for peer in range(1, group.size):
            group.send(torch.ones(4), peer)
    else:
        group.recv(torch.ones(4), 0)
    assert time.process_time() - began < 0.2
