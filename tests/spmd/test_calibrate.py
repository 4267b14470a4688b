"""Speeds from timed steps: the arithmetic recovers what it is made of, and models of every family run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from support.models import FAMILIES

from spmd import calibrate
from spmd.calibrate import Effort, SmallModels, measure_compute, small_models
from spmd.comm.grid import Grid
from spmd.options import EngineOptions

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "vocab_size": 130,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
OPTIONS = EngineOptions(threads=1)


@pytest.fixture(scope="module")
def grid() -> Iterator[Grid]:
    made = Grid.create(MPI.COMM_SELF)
    yield made
    made.free()


def test_times_are_taken_apart(grid: Grid, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A processor on which all is linear: seconds per byte, a layer, a step, a sampled row, a cached byte.
    rows_cost = {1: 1e-9, 16: 2e-9, 16 * 128: 300e-9}
    per_layer, per_step, per_row, per_cached = 5e-6, 40e-6, 3e-6, 7e-10
    models = SmallModels(tmp_path, LLAMA, "bfloat16", 1 << 20)

    def weights(raw: dict[str, Any]) -> tuple[int, int]:
        attention = 64 * 16 * (2 * 4 + 2 * 2)
        return raw["num_hidden_layers"] * (attention + 3 * 64 * raw["intermediate_size"]), raw[
            "vocab_size"
        ] * 64

    def fake(models: SmallModels, name: str, *rest: Any) -> calibrate._Timing:
        raw = models.configs[name]
        inside, head = weights(raw)

        def step(rows: int, sampled: int) -> float:
            read = 2 * inside * rows_cost[rows] + 2 * head * rows_cost[sampled]
            return read + raw["num_hidden_layers"] * per_layer + per_step + sampled * per_row

        cached = 16 * (128 - 4) * raw["num_hidden_layers"] * 2 * 2 * 16 * 2
        return calibrate._Timing(
            {rows: step(rows, rows) for rows in (1, 16)},
            {1: per_step, 16: per_step},
            step(16 * 128, 16),
            step(16, 16) + cached * per_cached,
        )

    monkeypatch.setattr(calibrate, "_time_model", fake)
    found = measure_compute(models, grid, OPTIONS, Effort(1 << 20, (1, 16), 4, 0.01, 128))
    assert [rows for rows, _ in found.matrix_curve] == [1, 16, 2048]
    assert [value for _, value in found.matrix_curve] == pytest.approx(list(rows_cost.values()))
    assert [value for _, value in found.layer_curve] == pytest.approx([per_layer] * 3, rel=1e-6)
    assert found.host_curve == ((1, per_step), (16, per_step))
    # The small models' vocabulary is the larger one here, so that nothing is scaled up.
    assert [value for _, value in found.tail_curve] == pytest.approx([per_row, 16 * per_row], rel=1e-6)
    assert found.kv_s_per_byte == pytest.approx(per_cached)
    assert found.bandwidth == pytest.approx(1e9)
    assert found.flops == pytest.approx(2 * 2048 / (300e-9 * 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_timed(family: str, grid: Grid) -> None:
    config = {**LLAMA, **FAMILIES[family][1], "model_type": family.split("_")[0]}
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    effort = Effort(1 << 16, (1, 2), 2, 0.0, context=8, context_rows=2)
    with small_models(grid, config, "float32", effort.memory) as models:
        folder = models.folder
        raw = json.loads((folder / "many" / "config.json").read_text())
        assert raw["num_hidden_layers"] > 2
        found = measure_compute(models, grid, EngineOptions(threads=2), effort)
    assert not folder.exists()
    for value in (found.bandwidth, found.flops, found.kv_s_per_byte):
        assert value is not None
        assert value >= 0
        assert math.isfinite(value)
    assert found.host_curve[0][1] > 0


def test_a_wide_model_is_made_narrow_enough_to_time(tmp_path: Path) -> None:
    # 405 billion parameters: the attention of one of its layers takes 1.1 GB.
    wide = {
        **LLAMA,
        "hidden_size": 16384,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    models = SmallModels(tmp_path, wide, "bfloat16", 32 << 20)
    for name in models.configs:
        shape = models.shape(name)
        assert shape.hidden_size == 16384
        assert shape.num_heads // shape.num_kv_heads == 16
        assert 2 * shape.weight_count() < 600e6
