"""Collectives on tensors: results equal arithmetic, for any number of ranks and every CPU backend."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from spmd.comm.errors import UserError
from spmd.comm.group import Group, SingleGroup, make_group
from spmd.comm.hierarchical import HierarchicalGroup
from spmd.comm.mpi import MpiGroup
from spmd.comm.shm import CollectiveMismatch, ShmGroup

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
TIMEOUT_S = 60.0
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64]

MAKERS: dict[str, Callable[[], Group]] = {
    "mpi": lambda: MpiGroup(WORLD.Dup(), timeout_s=TIMEOUT_S),
    "mpi-pieces": lambda: MpiGroup(WORLD.Dup(), timeout_s=TIMEOUT_S, one_shot_bytes=64, piece_bytes=9000),
    "shm": lambda: ShmGroup(WORLD.Dup(), timeout_s=TIMEOUT_S),
    "shm-pieces": lambda: ShmGroup(WORLD.Dup(), timeout_s=TIMEOUT_S, one_shot_bytes=64, slot_bytes=4096),
}
# This node's ranks as if they were on several nodes: neighbours together, and one here, one there.
NODES = {"nodes": [0, 0, 1, 1], "nodes-pieces": [5, 2, 5, 2]}
if 2 <= WORLD.size <= 4:
    MAKERS |= {
        "nodes": lambda: HierarchicalGroup(WORLD.Dup(), NODES["nodes"][: WORLD.size], timeout_s=TIMEOUT_S),
        "nodes-pieces": lambda: HierarchicalGroup(
            WORLD.Dup(),
            NODES["nodes-pieces"][: WORLD.size],
            timeout_s=TIMEOUT_S,
            slot_bytes=4096,
            one_shot_bytes=64,
        ),
    }


@pytest.fixture(scope="module", params=list(MAKERS))
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = MAKERS[request.param]()
    made.name = request.param
    yield made
    made.free()
    torch.set_num_threads(threads)


def values(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `rank` puts in: known to every rank, so that each can work out the answer."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(dtype)


def summed(group: Group, inputs: list[Tensor]) -> Tensor:
    """Sum in rank order, if there are nodes first inside each; 16-bit floats in fp32, rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    node_of_rank = NODES.get(group.name, [0] * len(inputs))
    totals: dict[int, Tensor] = {}
    for node, x in zip(node_of_rank, inputs):
        totals[node] = totals[node] + x.to(wide) if node in totals else x.to(wide)
    first, *others = totals.values()
    for other in others:
        first = first + other
    return first.to(dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (17, 191), (3, 4001)], ids=str)
def test_all_reduce(group: Group, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = [values(1, rank, shape, dtype) for rank in range(group.size)]
    x = inputs[group.rank].clone()
    assert group.all_reduce(x) is x
    assert same_bits(x, summed(group, inputs))
    x = inputs[group.rank].clone()
    assert group.all_reduce_max(x) is x
    assert same_bits(x, torch.stack(inputs).amax(0))


@pytest.mark.smoke
def test_all_reduce_of_more_than_a_slot(group: Group) -> None:
    inputs = [values(6, rank, (150_001,), torch.float32) for rank in range(group.size)]
    assert same_bits(group.all_reduce(inputs[group.rank].clone()), summed(group, inputs))


@pytest.mark.smoke
def test_sum_is_in_rank_order(group: Group) -> None:
    # The large numbers cancel: what is left of the ones tells the order of the additions.
    terms = [1.0, 2.0**25, 1.0, -(2.0**25), 1.0, 1.0, 2.0**25, -(2.0**25)][: group.size]
    expected = summed(group, [torch.tensor(term) for term in terms])
    for size in (1, 9_000):
        x = torch.full((size,), terms[group.rank])
        assert bool((group.all_reduce(x) == expected).all())


def test_max_keeps_nan(group: Group) -> None:
    x = torch.tensor([float("nan") if group.rank == group.size - 1 else 1.0, float(group.rank)])
    group.all_reduce_max(x)
    assert x[0].isnan()
    assert x[1] == group.size - 1


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_uneven(group: Group, dtype: torch.dtype, dim: int) -> None:
    chooser = random.Random(group.size)
    for scale in (1, 3, 700):
        sizes = [chooser.choice([0, 1, 2, 5]) * scale for _ in range(group.size)]
        for lead in (1, 4):
            shape = [lead, 3, 2]
            inputs = []
            for rank, size in enumerate(sizes):
                shape[dim] = size
                inputs.append(values(2, rank, tuple(shape), torch.float32).to(dtype))
            found = group.all_gather(inputs[group.rank], sizes, dim)
            expected = torch.cat([part.float() for part in inputs], dim)
            assert found.dtype == dtype
            assert found.is_contiguous()
            assert same_bits(found.float(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter_uneven(group: Group, dtype: torch.dtype, dim: int) -> None:
    chooser = random.Random(group.size)
    for scale in (1, 3, 700):
        sizes = [chooser.choice([0, 1, 2, 5]) * scale for _ in range(group.size)]
        for lead in (1, 4):
            shape = [lead, 3, 2]
            shape[dim] = sum(sizes)
            inputs = [values(3, rank, tuple(shape), dtype) for rank in range(group.size)]
            found = group.reduce_scatter(inputs[group.rank].clone(), sizes, dim)
            expected = summed(group, inputs).split(sizes, dim)[group.rank]
            assert found.is_contiguous()
            assert same_bits(found, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (), (5,), (3, 4001)], ids=str)
def test_broadcast_from_every_root(group: Group, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for root in range(group.size):
        x = values(4, group.rank, shape, torch.float32).to(dtype)
        assert group.broadcast(x, root) is x
        assert same_bits(x, values(4, root, shape, torch.float32).to(dtype))


@pytest.mark.smoke
def test_tensors_that_are_not_contiguous(group: Group) -> None:
    inputs = [values(5, rank, (40, 30), torch.float32) for rank in range(group.size)]
    mine = inputs[group.rank]
    x = mine.clone().T
    group.all_reduce(x)
    assert same_bits(x.T, summed(group, inputs))
    x = mine.clone()
    group.all_reduce(x[:, 3:7])
    assert same_bits(x[:, 3:7], summed(group, inputs)[:, 3:7])
    assert same_bits(x[:, 7:], mine[:, 7:])
    x = mine.clone().T
    group.broadcast(x, group.size - 1)
    assert same_bits(x, inputs[-1].T)
    sizes = [30] * group.size
    assert same_bits(group.all_gather(mine.T, sizes), torch.cat([other.T for other in inputs]))
    sizes = [30] + [0] * (group.size - 1)
    expected = summed(group, inputs).T if group.rank == 0 else torch.empty(0, 40)
    assert same_bits(group.reduce_scatter(mine.T, sizes), expected)


def test_slots_outlive_inference_mode(group: Group) -> None:
    with torch.inference_mode():
        for size in (7, 5000):
            assert bool((group.all_reduce(torch.ones(size)) == group.size).all())
    for size in (7, 5000, 11):
        assert bool((group.all_reduce(torch.ones(size)) == group.size).all())
        assert bool((group.broadcast(torch.ones(size)) == 1).all())


@pytest.mark.smoke
def test_barrier_waits_for_the_last(group: Group) -> None:
    group.barrier()
    if group.rank == group.size - 1:
        time.sleep(0.1)
    entered = time.monotonic()  # one clock for all processes of a node
    group.barrier()
    left = time.monotonic()
    assert min(group.all_gather_objects(left)) >= max(group.all_gather_objects(entered))


@pytest.mark.smoke
def test_thousands_of_random_operations(group: Group) -> None:
    shared, own = random.Random(7), random.Random(group.rank)
    everyone = range(group.size)
    for step in range(1500 if group.backend == "shm" else 500):
        dtype = shared.choice(DTYPES)
        operation = shared.randrange(6)
        length = shared.choice([0, 1, 3, 16, 100, 576, shared.randrange(3000)])
        root = shared.randrange(group.size)
        sizes = [shared.choice([0, 1, length // 4]) for _ in everyone]
        if own.random() < 0.01:
            time.sleep(own.random() * 0.002)
        if operation <= 1:
            inputs = [values(step, rank, (length,), dtype) for rank in everyone]
            x = inputs[group.rank].clone()
            if operation == 0:
                assert same_bits(group.all_reduce(x), summed(group, inputs)), step
            else:
                assert same_bits(group.all_reduce_max(x), torch.stack(inputs).amax(0)), step
        elif operation == 2:
            inputs = [values(step, rank, (size,), dtype) for rank, size in enumerate(sizes)]
            assert same_bits(group.all_gather(inputs[group.rank], sizes), torch.cat(inputs)), step
        elif operation == 3:
            inputs = [values(step, rank, (sum(sizes),), dtype) for rank in everyone]
            expected = summed(group, inputs).split(sizes)[group.rank]
            assert same_bits(group.reduce_scatter(inputs[group.rank], sizes), expected), step
        elif operation == 4:
            x = values(step, group.rank, (length,), dtype)
            assert same_bits(group.broadcast(x, root), values(step, root, (length,), dtype)), step
        else:
            group.barrier()


def test_wrong_arguments_are_named(group: Group) -> None:
    sizes = [2] * group.size
    with pytest.raises(ValueError, match="does not fit sizes"):
        group.all_gather(torch.ones(3), sizes)
    with pytest.raises(ValueError, match="does not fit sizes"):
        group.reduce_scatter(torch.ones(2 * group.size + 1), sizes)
    with pytest.raises(ValueError, match="one a rank"):
        group.all_gather(torch.ones(2), [*sizes, 2])
    with pytest.raises(ValueError, match="dim: 1"):
        group.all_gather(torch.ones(2), sizes, 1)
    with pytest.raises(ValueError, match="peer"):
        group.broadcast(torch.ones(2), group.size)
    with pytest.raises(TypeError, match="bool"):
        group.all_reduce(torch.ones(2, dtype=torch.bool))


def test_auto_takes_shared_memory_on_one_node() -> None:
    node = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    made = make_group(node, timeout_s=TIMEOUT_S)
    assert made.backend == ("single" if node.size == 1 else "shm")
    made.free()
    node.Free()
    made = make_group(MPI.COMM_SELF, "shm")
    assert isinstance(made, SingleGroup)
    assert made.ranks == (WORLD.rank,)
    x = torch.ones(3)
    assert made.all_reduce(x) is x
    assert made.all_gather(x, [3]) is x
    assert made.reduce_scatter(x, [3]) is x
    assert made.all_gather_objects("a") == ["a"]
    made.free()


@pytest.mark.smoke
def test_auto_goes_by_the_nodes_of_a_group() -> None:
    ranks = range(WORLD.size)
    layouts = {
        "one node": [7] * WORLD.size,
        "one rank each": list(ranks),
        "two nodes": [r % 2 for r in ranks],
    }
    expected = {"one node": "shm", "one rank each": "mpi", "two nodes": "hierarchical"}
    if WORLD.size < 3:
        expected["two nodes"] = "mpi"
    for layout, nodes in layouts.items():
        for backend in ("auto", "hierarchical"):
            made = make_group(WORLD, backend, TIMEOUT_S, node_of_rank=nodes)
            assert made.backend == ("single" if WORLD.size == 1 else expected[layout]), layout
            assert int(made.all_reduce(torch.tensor(made.rank))) == sum(ranks)
            made.free()
        made = make_group(WORLD, "mpi", TIMEOUT_S, node_of_rank=nodes)
        assert made.backend == ("single" if WORLD.size == 1 else "mpi")
        made.free()
        if layout != "one node" and WORLD.size > 1:
            with pytest.raises(UserError, match=f"'shm' needs all {WORLD.size} ranks .* on one node"):
                make_group(WORLD, "shm", TIMEOUT_S, node_of_rank=nodes)


def test_ranks_of_a_node_that_part_are_noticed() -> None:
    if WORLD.size < 3:
        pytest.skip("needs two ranks on a node and one on another")
    made = HierarchicalGroup(WORLD.Dup(), [min(rank, 2) // 2 for rank in range(WORLD.size)], timeout_s=2.0)
    if made.rank == 0:
        with pytest.raises(CollectiveMismatch, match="rank 0 is in all_reduce of 40 bytes, but rank 1"):
            made.all_reduce(torch.ones(10))
    elif made.rank == 1:
        with pytest.raises(CollectiveMismatch, match=r"rank 1 is in broadcast of 40 bytes"):
            made.broadcast(torch.ones(10))
    WORLD.Barrier()  # the group cannot be used any more, so it is not given back


@pytest.mark.parametrize("several_nodes", [False, True])
def test_freed_groups_leave_no_shared_mappings(several_nodes: bool) -> None:
    def mappings() -> int:
        return sum(" rw-s " in line for line in Path("/proc/self/maps").read_text().splitlines())

    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    nodes = [rank // 2 for rank in range(WORLD.size)]
    shares = nodes.count(nodes[WORLD.rank]) > 1 if several_nodes else WORLD.size > 1
    counts = []
    for _ in range(4):
        made: Group = ShmGroup(WORLD.Dup(), timeout_s=TIMEOUT_S)
        if several_nodes:
            made.free()
            made = HierarchicalGroup(WORLD.Dup(), nodes, timeout_s=TIMEOUT_S)
        made.all_reduce(torch.ones(10))
        during = mappings()
        made.free()
        made.free()
        counts.append(mappings())
        assert counts[-1] < during or not shares
    assert counts[1] == counts[-1]
