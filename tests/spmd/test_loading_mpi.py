"""What ranks read of a model, and the copy that `--save-sharded` writes of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from support.command import call
from support.models import Reference, at_most, grid_name, grids, on_rank_zero, random_ids, running

from spmd.building import build_stages, record_requests
from spmd.checkpoint import load_plan, resolve
from spmd.checkpoint.cooperative import CooperativeWeights
from spmd.checkpoint.open import open_checkpoint
from spmd.checkpoint.sharded_source import ShardedSource
from spmd.comm.errors import UserError
from spmd.comm.grid import Grid
from spmd.layers.weights import Placement
from spmd.opening import open_model
from spmd.options import EngineOptions

pytestmark = pytest.mark.mpi(min_size=2)

WORLD = MPI.COMM_WORLD
CPU = torch.device("cpu")
AXES = {2: (2, 1), 3: (3, 1), 4: (2, 2), 8: (2, 2)}  # tp, pp; at 8 ranks two replicas


def loaded(path: Path, **sizes: Any) -> tuple[CooperativeWeights, int]:
    """The weights of a model that all ranks have loaded, with what each got checked against a read of its
    own; and the bytes that all of them have read. Collective."""
    grid = Grid.create(WORLD, **sizes)
    model = open_model(EngineOptions(model=str(path)), grid)
    placement = Placement(torch.bfloat16, CPU, grid.tp)
    requests = record_requests(model, grid, placement)
    weights = CooperativeWeights(model.checkpoint.source, grid, requests)
    with weights, open_checkpoint(path).source as source:
        for request in requests:
            index = tuple(slice(*bound) for bound in request.bounds)
            found = weights.get(request.name, source.shape(request.name), index, request.dtype)
            assert torch.equal(found, source.read(request.name, index, request.dtype)), request
    read = sum(WORLD.allgather(weights.exchange.files.bytes_read))
    grid.free()
    return weights, read


@at_most(2)
def test_a_download_may_take_longer_than_any_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str | None) -> Path:
        assert WORLD.rank == 0
        time.sleep(5)
        raise UserError(f"model {model} has moved")

    monkeypatch.setattr(resolve, "resolve_model", download)
    grid = Grid.create(WORLD, tp=WORLD.size, timeout_s=3.0)
    with pytest.raises(UserError, match=r"^model org/name has moved$"):
        open_model(EngineOptions(model="org/name"), grid)
    grid.free()


@pytest.mark.parametrize("sizes", grids(), ids=grid_name)
@pytest.mark.parametrize("family", ["llama", "mistral", "phi3"])  # mistral's embedding is its head, too
def test_a_checkpoint_is_read_once(
    family: str, sizes: dict[str, int], zoo: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plan, "PIECE_BYTES", 4 << 10)
    monkeypatch.setattr(load_plan, "READ_BYTES", 16 << 10)
    path = zoo[family].path
    with open_checkpoint(path).source as source:
        stored = sum(source.stored(name).matrix.nbytes for name in source.names())
    weights, read = loaded(path, **sizes)
    assert read == stored == weights.plan.total_bytes
    assert read <= 1.05 * (path / "model.safetensors").stat().st_size
    # All take part: a rank reads of what it needs no more than its share and one piece.
    most = max(WORLD.allgather(weights.exchange.files.bytes_read))
    assert most < stored / WORLD.size * 2.5


def test_a_model_built_from_it_is_the_one_built_alone(zoo: dict[str, Reference]) -> None:
    """Packed, quantized and tied weights of the largest tensor-parallel grid, bit for bit."""
    for family in ("llama_biases", "mistral"):
        for quantize in (None, "Q8_0"):
            grid = Grid.create(WORLD, tp=min(WORLD.size, 4), pp=None)
            model = open_model(EngineOptions(model=str(zoo[family].path)), grid)
            placement = Placement(torch.float32, CPU, grid.tp, quantize=quantize)
            (together,) = build_stages(model, grid, placement)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Grid, "size", property(lambda grid: 1))  # the path of one rank
                (alone,) = build_stages(model, grid, placement)
            for mine, theirs in zip(together.layers, alone.layers):
                for one, two in zip(vars(mine.shards()).values(), vars(theirs.shards()).values()):
                    one, two = (getattr(value, "blocks", value) for value in (one, two))
                    if isinstance(one, torch.Tensor):
                        assert torch.equal(one, two)
            grid.free()


def test_a_sharded_copy_gives_the_same_logits(zoo: dict[str, Reference], tmp_path: Path) -> None:
    copy = on_rank_zero(lambda: tmp_path / "copy")
    tp, pp = AXES.get(WORLD.size, (WORLD.size, 1))
    grid = {"tp": tp, "pp": pp}
    torch_only = {"kernels": "torch"}
    path = zoo["llama"].path
    assert call(["--model", path, "--tp", tp, "--pp", pp, "--save-sharded", copy]) == 0
    ids = random_ids(20)
    with running(path, **grid, **torch_only) as llm:
        expected = llm.logits(ids)
    with running(copy, **grid, **torch_only) as llm:
        assert torch.equal(llm.logits(ids), expected)
    with running(path, tp=WORLD.size, **torch_only) as llm:
        expected = llm.logits(ids)
    with running(copy, tp=WORLD.size, **torch_only) as llm:  # not the grid it was saved for
        assert torch.equal(llm.logits(ids), expected)
    assert isinstance(open_checkpoint(copy).source, ShardedSource)
    # What is left are norms, and key-value heads that two ranks share.
    assert sent(loaded(copy, **grid)[0]) < 0.25 * sent(loaded(path, **grid)[0])


def sent(weights: CooperativeWeights) -> int:
    """Bytes that ranks get from others in the first replica."""
    pieces = [piece for pieces in weights.plan.rounds for piece in pieces]
    places = weights.plan.places
    return sum(
        want.region.nbytes for piece in pieces for want in piece.wants if want.place != piece.reader % places
    )
