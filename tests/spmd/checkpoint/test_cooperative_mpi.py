"""Ranks that read a checkpoint together get what one rank reads alone, whatever slices each asks for."""

from __future__ import annotations

import errno
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file, save_file
from support.models import grid_name, grids, on_rank_zero, same_everywhere

from spmd.checkpoint import load_plan
from spmd.checkpoint.cooperative import CooperativeWeights, Request
from spmd.checkpoint.gguf_source import GGUFSource
from spmd.checkpoint.open import Checkpoint
from spmd.checkpoint.safetensors_source import SafetensorsSource
from spmd.checkpoint.sharded_save import save_sharded
from spmd.checkpoint.sharded_source import INDEX_NAME, ShardedSource
from spmd.checkpoint.source import TensorSource
from spmd.comm.errors import UserError
from spmd.comm.grid import Grid

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and rounds so small that tiny tensors take many of them."""
    monkeypatch.setattr(load_plan, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(load_plan, "READ_BYTES", 2 << 10)
    monkeypatch.setattr(load_plan, "ARRIVING_BYTES", 8 << 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tensors of all float types and 0 to 3 dimensions, in two files. Collective over the world."""

    def write() -> Path:
        made = torch.Generator().manual_seed(0)
        tensors = {
            "bf16": torch.randn(48, 40, generator=made).bfloat16(),
            "fp16": torch.randn(33, 64, generator=made).half(),
            "fp64": torch.randn(7, 3, generator=made).double(),
            "vector": torch.randn(100, generator=made),
            "scalar": torch.tensor(2.5),
            "cube": torch.randn(5, 9, 16, generator=made),
            "empty": torch.zeros(0, 4),
        }
        save_file({name: tensors[name] for name in ("bf16", "cube", "empty")}, tmp_path / "1.safetensors")
        save_file(
            {name: tensors[name] for name in ("fp16", "fp64", "vector", "scalar")}, tmp_path / "2.safetensors"
        )
        return tmp_path

    return on_rank_zero(write)


@pytest.fixture
def gguf(write_gguf: Callable[..., Path]) -> Path:
    """Stored blocks of several kinds, and interleaved rows of queries, keys and biases. Collective."""

    def write() -> Path:
        values = np.random.default_rng(0).standard_normal
        return write_gguf(
            "llama",
            HEADS,
            {
                "token_embd.weight": (values((51, 96)).astype(np.float32), "Q8_0"),
                "blk.0.attn_q.weight": (values((32, 96)).astype(np.float32), "Q4_1"),
                "blk.0.attn_k.weight": (values((16, 96)).astype(np.float32), "F16"),
                "blk.0.attn_q.bias": (values(32).astype(np.float32), "F32"),
                "blk.0.ffn_down.weight": (values((24, 128)).astype(np.float32), "Q4_0"),
                "blk.0.ffn_up.weight": (values((24, 96)).astype(np.float32), "Q5_0"),
                "output_norm.weight": (values(96).astype(np.float32), "F32"),
            },
        )

    return on_rank_zero(write)


def some_requests(source: TensorSource, seed: int, count: int = 40) -> list[Request]:
    chance = random.Random(seed)
    requests = []
    for _ in range(count):
        name = chance.choice(source.names())
        shape = source.shape(name)
        bounds = tuple(tuple(sorted((chance.randint(0, size), chance.randint(0, size)))) for size in shape)
        if chance.random() < 0.3:
            bounds = tuple((0, size) for size in shape)
        elif len(shape) == 2 and chance.random() < 0.5:
            bounds = (bounds[0], tuple(bound // 32 * 32 for bound in bounds[1]))
        blocks = source.stored(name).block_kind(bounds) is not None and chance.random() < 0.7
        dtype = chance.choice([None, torch.float32, torch.bfloat16])
        requests.append(Request(name, bounds, None if blocks else dtype, blocks))
    return requests


def alone(source: TensorSource, request: Request) -> torch.Tensor:
    index = tuple(slice(*bound) for bound in request.bounds)
    if request.blocks:
        blocks = source.read_blocks(request.name, index)
        assert blocks is not None
        return blocks.blocks
    return source.read(request.name, index, request.dtype)


def got(weights: CooperativeWeights, source: TensorSource, request: Request) -> torch.Tensor:
    index = tuple(slice(*bound) for bound in request.bounds)
    shape = source.shape(request.name)
    if request.blocks:
        blocks = weights.get_blocks(request.name, shape, index)
        assert blocks is not None
        return blocks.blocks
    return weights.get(request.name, shape, index, request.dtype)


def opened(path: Path) -> TensorSource:
    return GGUFSource(path) if path.is_file() else SafetensorsSource(path)


@pytest.fixture
def grid(request: pytest.FixtureRequest) -> Iterator[Grid]:
    made = Grid.create(WORLD, **request.param)
    yield made
    made.free()


@pytest.mark.parametrize("grid", grids(), ids=grid_name, indirect=True)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_any_slices_on_any_grid(
    kind: str, grid: Grid, small_rounds: None, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    with opened(path) as source:
        wanted = some_requests(source, grid.replica.rank)
        weights = CooperativeWeights(source, grid, wanted)
        assert len(weights.plan.rounds) > 1
        with weights:
            for one in wanted:
                found, expected = got(weights, source, one), alone(source, one)
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected), one
        read = sum(WORLD.allgather(weights.exchange.files.bytes_read))
        assert read <= sum(source.stored(name).matrix.nbytes for name in source.names())


@pytest.mark.parametrize("grid", [grids()[-1], grids()[0]], ids=grid_name, indirect=True)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_sharded_copy_holds_the_same(
    kind: str, grid: Grid, small_rounds: None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(kind)
    copy = on_rank_zero(lambda: tmp_path / "copy")
    with opened(path) as source:
        # Every byte is wanted by someone, and many by several.
        whole = [Request(name, tuple((0, size) for size in source.shape(name))) for name in source.names()]
        wanted = some_requests(source, grid.replica.rank, 6) + (whole if grid.replica.rank == 0 else [])
        checkpoint = Checkpoint(path, {}, {}, source, {})
        size = save_sharded(copy, checkpoint, grid, wanted)
        assert size == sum(source.stored(name).matrix.nbytes for name in source.names())
        with ShardedSource(copy) as saved:
            assert saved.names() == source.names()
            for one in some_requests(source, seed=99):
                assert torch.equal(alone(saved, one), alone(source, one)), one
            weights = CooperativeWeights(saved, grid, wanted)
            with weights:
                for one in wanted:
                    assert torch.equal(got(weights, saved, one), alone(source, one)), one
    with pytest.raises(UserError, match=r"copy: the folder is not empty"):
        save_sharded(copy, checkpoint, grid, wanted)


class FullDisk(FileIO):
    """Takes little at a time, and says when it is closed on the last rank that it was too much."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:1000])

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if WORLD.rank == WORLD.size - 1:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("grid", [{"tp": WORLD.size}], ids=grid_name, indirect=True)
def test_a_copy_that_finds_no_room(
    folder: Path, grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = on_rank_zero(lambda: tmp_path / "copy")
    source = SafetensorsSource(folder)
    shapes = {name: source.shape(name) for name in source.names()}
    wanted = [Request(name, tuple((0, size) for size in shape)) for name, shape in shapes.items()]
    real_open = Path.open

    def opened_file(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        return FullDisk(path, mode) if mode == "xb" else real_open(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", opened_file)
    with pytest.raises(UserError, match=r"safetensors can't be written: No space left on device; ") as caught:
        save_sharded(copy, Checkpoint(folder, {}, {}, source), grid, wanted)
    assert same_everywhere(str(caught.value))
    assert not (copy / INDEX_NAME).exists()
    sizes = [file.stat().st_size for file in sorted(copy.glob("*.safetensors"))]
    assert len(sizes) == WORLD.size
    saved = load_file(copy / "pp0-tp0.safetensors")
    assert sum(part.numel() for part in saved.values()) == sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize("grid", grids()[:1], ids=grid_name, indirect=True)
def test_a_file_that_ends_early_is_named_by_every_rank(folder: Path, grid: Grid, small_rounds: None) -> None:
    source = SafetensorsSource(folder)
    wanted = [Request("cube", ((0, 5), (0, 9), (0, 16))), Request("bf16", ((0, 48), (0, 40)))]
    WORLD.Barrier()
    file = folder / "1.safetensors"
    if WORLD.rank == 0:
        os.truncate(file, file.stat().st_size - 64)
    WORLD.Barrier()
    weights = CooperativeWeights(source, grid, wanted)
    with pytest.raises(UserError) as caught:
        in_turn(weights, source, wanted)
    assert re.search(rf"{file} is truncated: tensor \w+ needs bytes up to", str(caught.value))
    assert same_everywhere(str(caught.value))


@pytest.mark.parametrize("grid", grids()[:1], ids=grid_name, indirect=True)
def test_one_rank_gives_up(folder: Path, grid: Grid, small_rounds: None) -> None:
    """As when its GPU has no memory left: the others learn it in the round they are in."""
    source = SafetensorsSource(folder)
    wanted = some_requests(source, seed=1)
    weights = CooperativeWeights(source, grid, wanted)
    with pytest.raises(UserError) as caught:
        in_turn(weights, source, wanted, give_up_at=1 if WORLD.rank == WORLD.size - 1 else None)
    first = "" if WORLD.size == 1 else f"rank {WORLD.size - 1}: "
    assert str(caught.value) in (f"{first}no room", "no room")


def in_turn(
    weights: CooperativeWeights, source: TensorSource, wanted: list[Request], give_up_at: int | None = None
) -> None:
    with weights:
        for number, one in enumerate(wanted):
            if number == give_up_at:
                raise UserError("no room")
            got(weights, source, one)
