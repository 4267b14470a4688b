"""How fast the ranks of this job run the engine: timed steps of small models of the wanted model's kind.

Three checkpoints with the model's width are written to the nodes' shared memory and run by the engine itself:
two layers; more layers; two layers with a wide MLP. Differences of their steps give the time of a byte of
weights, of a layer besides its weights, and of a step besides its layers, on a processor that is as busy
and as short of cache as in a real run.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from spmd.checkpoint.weights import ExpectedWeights
from spmd.clock import HOST
from spmd.comm.grid import Grid
from spmd.comm.group import make_group
from spmd.comm.partition import Partition
from spmd.config import ModelConfig
from spmd.engine import Engine
from spmd.launch.plan_cost import Compute
from spmd.launch.plan_model import ModelShape, RankShare
from spmd.layers.weights import Placement
from spmd.loading import load
from spmd.models.decoder import ModelPartitions, StageModel
from spmd.options import EngineOptions
from spmd.request import Request
from spmd.sampling_params import SamplingParams

_FEW, _MOST_LAYERS = 2, 10
_PROMPT = 4  # tokens
_WARM_UP = 1


@dataclass(frozen=True)
class Effort:
    """memory: bytes of the head, of which a half is added in a wide MLP, and at most a third in layers. More
    than a rank's cache, so that a step finds the weights evicted by the one before.
    rows: sequences in the decode steps that are timed. steps: how many of each, at most, and seconds: how
    long, about. context: tokens that context_rows sequences hold in a prefill and in the decode steps which
    tell the price of cached keys; None leaves these out."""

    memory: int
    rows: tuple[int, ...]
    steps: int
    seconds: float
    context: int | None = None
    context_rows: int = 16


QUICK = Effort(32 << 20, (1, 16), 4, 0.02)
THOROUGH = Effort(64 << 20, (1, 4, 16, 32), 20, 0.3, 128)


@contextmanager
def small_models(world: Grid, config: Mapping[str, Any], dtype: str, memory: int) -> Iterator[SmallModels]:
    """The three checkpoints, on every node while the block runs. config: that of the model, as in its
    `config.json`. dtype: what they are stored and computed in. memory: see `Effort`. Collective."""
    made = None
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    if world.rank == 0:
        made = tempfile.mkdtemp(prefix="spmd_plan_", dir=root)
    folder = Path(world.world.broadcast_object(made))
    models = SmallModels(folder, config, dtype, memory)
    try:
        if world.node_rank == 0:
            models.write()
        world.world.barrier()
        yield models
        world.world.barrier()
    finally:
        if world.node_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


class SmallModels:
    """Checkpoints `few`, `many` (layers) and `wide` (MLP) under one folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any], dtype: str, memory: int) -> None:
        self.folder = folder
        self.dtype = dtype
        width = getattr(torch, dtype).itemsize
        shape = ModelShape.from_config(config, "model")
        hidden, inner = shape.hidden_size, max(64, shape.num_heads)
        # Attention matrices of a large model would take too long to read: fewer heads of the same kind then.
        group = shape.num_heads // shape.num_kv_heads
        kv = shape.num_kv_heads
        while kv > 1 and 2 * hidden * shape.head_dim * (group + 1) * kv * width > memory // 3:
            kv //= 2
        layer = hidden * (2 * shape.head_dim * (group + 1) * kv + 3 * inner) * width
        many = min(_MOST_LAYERS, _FEW + max(1, memory // 3 // layer))
        common: dict[str, Any] = {
            "num_attention_heads": kv * group,
            "num_key_value_heads": kv,
            "head_dim": shape.head_dim,
            "intermediate_size": inner,
            "vocab_size": max(1024, memory // (hidden * width)),
            "tie_word_embeddings": True,
            "torch_dtype": dtype,
        }
        # What sampling costs follows the vocabulary.
        self.vocab_scale = max(1.0, shape.vocab_size / common["vocab_size"])
        wide = inner + max(1, memory // 2 // (_FEW * 3 * hidden * width))
        self.configs = {
            "few": _with_layers(config, _FEW, common),
            "many": _with_layers(config, many, common),
            "wide": _with_layers(config, _FEW, {**common, "intermediate_size": wide}),
        }

    def shape(self, name: str) -> ModelShape:
        return ModelShape.from_config(self.configs[name], name)

    def write(self) -> None:
        """Zero weights, in files of nothing but a header and a length: values do not change the times."""
        for name, raw in self.configs.items():
            config = ModelConfig.from_dict(raw)
            expected = ExpectedWeights()
            parts = ModelPartitions.build(config, 1, Partition.even(config.num_layers, 1))
            alone = make_group(MPI.COMM_SELF)
            StageModel(
                config, parts, 0, Placement(torch.float32, torch.device("meta"), alone), expected, False
            )
            alone.free()
            (self.folder / name).mkdir(parents=True)
            _write_zeros(self.folder / name / "model.safetensors", expected.shapes, self.dtype)
            (self.folder / name / "config.json").write_text(json.dumps(raw))


def _write_zeros(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    stored = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * getattr(torch, dtype).itemsize
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@dataclass(frozen=True)
class _Timing:
    """Seconds of a decode step at each number of rows: all of it, and the scheduling part."""

    step: dict[int, float]
    host: dict[int, float]
    prefill: float | None = None
    long_step: float | None = None


def measure_compute(models: SmallModels, grid: Grid, options: EngineOptions, effort: Effort) -> Compute:
    """A rank's speed in TP groups of `grid` (one pipeline stage), while all others work, too. Collective.

    The mean over the ranks of the job, the same on all of them.
    """
    timings = {}
    for name in models.configs:
        timings[name] = _time_model(models, name, grid, options, effort, name == "many")
    few, many, wide = (timings[name] for name in ("few", "many", "wide"))
    tp, width = grid.tp_size, getattr(torch, models.dtype).itemsize
    shares = {n: RankShare.of(models.shape(n), _whole(models.shape(n)), tp, 0, 0) for n in models.configs}
    read = {n: (share.matrix_count + share.head) * width for n, share in shares.items()}
    layers = {n: share.num_layers for n, share in shares.items()}
    layer_bytes = shares["few"].layer_matrices + shares["few"].expert
    head_bytes = shares["few"].head * width
    matrix, layer, host, tail = [], [], [], []
    for rows in effort.rows:
        per_byte = max(0.0, (wide.step[rows] - few.step[rows]) / (read["wide"] - read["few"]))
        per_layer = (many.step[rows] - few.step[rows]) / (layers["many"] - layers["few"])
        matrix.append((rows, per_byte))
        layer.append((rows, max(0.0, per_layer - layer_bytes * width * per_byte)))
        host.append((rows, few.host[rows]))
        rest = few.step[rows] - layers["few"] * per_layer - head_bytes * per_byte - few.host[rows]
        tail.append((rows, max(0.0, rest) * models.vocab_scale))
    bandwidth = 1 / max(matrix[0][1], 1e-15)
    kv_s_per_byte = matrix[0][1]
    flops = 2 * effort.rows[-1] / (max(matrix[-1][1], 1e-15) * width)
    if effort.context is not None:
        assert many.long_step is not None
        assert few.prefill is not None
        assert many.prefill is not None
        assert wide.prefill is not None
        rows, tokens = effort.context_rows, effort.context - _PROMPT
        held = rows * tokens * shares["many"].kv_bytes_per_token(models.dtype)
        kv_s_per_byte = max(0.0, (many.long_step - many.step[rows]) / held)
        # A prefill of as many tokens as fit one step is the last point of the curves.
        rows *= effort.context
        per_byte = max(0.0, (wide.prefill - few.prefill) / (read["wide"] - read["few"]))
        per_layer = (many.prefill - few.prefill) / (layers["many"] - layers["few"])
        matrix.append((rows, per_byte))
        layer.append((rows, max(0.0, per_layer - layer_bytes * width * per_byte)))
        flops = 2 * rows / (max(per_byte, 1e-15) * width)
    return Compute(bandwidth, flops, tuple(matrix), tuple(layer), tuple(host), tuple(tail), kv_s_per_byte)


def _time_model(
    models: SmallModels, name: str, grid: Grid, options: EngineOptions, effort: Effort, long: bool
) -> _Timing:
    vocab = models.shape(name).vocab_size
    mine = replace(
        options,
        model=str(models.folder / name),
        dtype=models.dtype,
        pp_split=None,
        pp_interleave=1,
        max_model_len=min(512, models.shape(name).context_limit),
        max_batch_tokens=1 << 16,
        max_running=max(effort.rows),
        prefix_caching=False,
        kv_memory=None,
        report=True,
        chat_template=None,
    )
    engine = load(mine, grid).engine
    step, host = {}, {}
    for rows in effort.rows:
        step[rows], host[rows], _ = _time_steps(engine, grid, rows, _PROMPT, vocab, effort)
    prefill = long_step = None
    if effort.context is not None:
        timing = effort if long else replace(effort, steps=2)
        long_step, _, prefill = _time_steps(engine, grid, effort.context_rows, effort.context, vocab, timing)
    return _Timing(step, host, prefill, long_step)


def _time_steps(
    engine: Engine, grid: Grid, rows: int, prompt: int, vocab: int, effort: Effort
) -> tuple[float, float, float]:
    """Median seconds of a decode step of `rows` sequences and of its host part; seconds of their prefill."""
    random = np.random.default_rng(rows)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    grid.world.barrier()
    names = [f"{prompt}.{index}" for index in range(rows)]
    for name in names:
        ids = random.integers(0, vocab, prompt)
        engine.add(Request(name, ids, params, 0, _WARM_UP + effort.steps + 2, frozenset()))
    times: list[float] = []
    hosts: list[float] = []
    count = _WARM_UP + 1
    while len(times) < count:
        before = _host_seconds(engine)
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
        hosts.append(_host_seconds(engine) - before)
        if len(times) == _WARM_UP + 1:  # all ranks go on for as many steps as the slowest has time for
            slowest = max(grid.world.all_gather_objects(times[-1]))
            count += max(2, min(effort.steps, int(effort.seconds / slowest)))
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    engine.drain()
    found = (statistics.median(times[_WARM_UP + 1 :]), statistics.median(hosts[_WARM_UP + 1 :]), times[0])
    everywhere = grid.world.all_gather_objects(found)
    first, second, third = (statistics.fmean(values) for values in zip(*everywhere))
    return first, second, third


def _host_seconds(engine: Engine) -> float:
    seconds: Mapping[str, float] = getattr(engine.clock, "seconds", {})
    return seconds.get(HOST, 0.0)


def _with_layers(config: Mapping[str, Any], layers: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    raw = {**config, **changes, "num_hidden_layers": layers}
    if isinstance(raw.get("layer_types"), list):
        raw["layer_types"] = raw["layer_types"][:layers]
    return raw


def _whole(shape: ModelShape) -> Partition:
    return Partition.even(shape.num_layers, 1)
