"""From options to a model that is ready to run on this rank: the start-up every rank goes through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from spmd.block_pool import BLOCK_SIZE, BlockPool
from spmd.building import build_stages
from spmd.clock import Clock, MeasuredGroup, StepClock
from spmd.comm.agree import agreed
from spmd.comm.errors import UserError
from spmd.comm.grid import Grid
from spmd.comm.group import Group
from spmd.config import ModelConfig
from spmd.engine import Engine
from spmd.frontend import Frontend
from spmd.gpu import find_tools, prepare
from spmd.kernels import make_team
from spmd.kv_cache import KVCache
from spmd.launch.cores import bind_cores
from spmd.launch.timers import set_fine_sleeps
from spmd.layers.quantized import QUANTIZE
from spmd.layers.weights import Placement
from spmd.memory import available_bytes, choose_num_blocks, memory_advice, working_bytes
from spmd.models.decoder import ModelPartitions
from spmd.opening import open_model
from spmd.options import EngineOptions
from spmd.pipeline import Pipeline
from spmd.sampler import Sampler
from spmd.scheduler import Scheduler
from spmd.text.tokenizer import Tokenizer, load_tokenizer

_LESS_CACHE = "lower --kv-memory, --max-running or --max-model-len"
_FEWER_SEQUENCES = "lower --max-running or --kv-memory, or use --cuda-graphs off"


@dataclass
class LoadedModel:
    """What start-up yields on every rank; `frontend` on rank 0 only."""

    path: Path
    config: ModelConfig
    engine: Engine
    frontend: Frontend | None
    max_model_len: int


def load(options: EngineOptions, grid: Grid) -> LoadedModel:
    """Open, check and load the model. Collective over the grid; every mistake of the user's is a
    `UserError` on every rank."""
    threads = bind_cores(grid.node, options.threads)
    set_fine_sleeps()
    device = grid.device
    model = open_model(options, grid)
    checkpoint, config, parts = model.checkpoint, model.config, model.parts
    path = checkpoint.path
    with agreed(grid.world):
        blocks_on_gpu = model.keep_blocks and device.type == "cuda"
        dtype = computed_dtype(options.dtype, config.dtype, blocks_on_gpu)
        # Before the weights, which take long, are read.
        tokenizer = load_tokenizer(path, checkpoint.gguf_metadata) if grid.world.rank == 0 else None
    clock, tp = Clock(), grid.tp
    if options.report:
        clock = step_clock = StepClock()
        if grid.tp_size > 1:
            tp = cast(Group, MeasuredGroup(grid.tp, step_clock))
    with agreed(grid.world):
        tools = find_tools(options, device, tp)
    compiled = device.type == "cpu" and options.kernels == "auto" and tools is None
    team = make_team(grid.node, threads) if compiled else None
    # What a team leaves to torch is small, and torch's idle threads would spin on the team's cores.
    torch.set_num_threads(threads if team is None else 1)
    kind = QUANTIZE[options.quantize] if options.quantize is not None else None
    placement = Placement(
        dtype,
        device,
        tp,
        team,
        model.keep_blocks and (team is not None or tools is not None),
        kind,
        tools.kernels if tools is not None else None,
        tools.overlap if tools is not None else None,
    )
    stages = build_stages(model, grid, placement)
    sent = (tokenizer.to_state(), tokenizer.size) if tokenizer is not None else (None, config.vocab_size)
    checkpoint.close()
    state, known_ids = grid.world.broadcast_object(sent)
    recorded = tools is not None and tools.capture is not None
    max_model_len, pool, caches = _make_cache(options, grid, config, parts, placement, recorded)
    sampler = Sampler(parts.vocab, tp, min(known_ids, config.vocab_size)) if stages[-1].last else None
    paging, graphs = None, None
    if tools is not None:
        sampled = sampler.sampled if sampler is not None else parts.vocab
        first = grid.world.rank == 0
        with agreed(grid.world), memory_advice("decode steps were recorded", _FEWER_SEQUENCES):
            paging, graphs = prepare(tools, stages, caches, sampled, options, max_model_len, first)
    switch_length = stages[0].rotary.switch_length
    scheduler = Scheduler(pool, grid.pp_size, options.max_batch_tokens, options.max_running, switch_length)
    engine = Engine(
        grid,
        Pipeline(grid, stages, caches, sampler, switch_length is not None, clock, paging, graphs),
        scheduler,
        parts.vocab,
        _TokenizerOnDemand(tokenizer, state) if state is not None else None,
        clock,
    )
    frontend = None
    if grid.world.rank == 0:
        frontend = Frontend(
            config, max_model_len, tokenizer, path, checkpoint.gguf_metadata, options.chat_template
        )
    return LoadedModel(path, config, engine, frontend, max_model_len)


class _TokenizerOnDemand:
    """Builds the tokenizer that rank 0 sent when this rank first needs text, and keeps it."""

    def __init__(self, tokenizer: Tokenizer | None, state: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._state = state

    def __call__(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_state(self._state)
        return self._tokenizer


def computed_dtype(wanted: str, stored: str | None, blocks_on_gpu: bool) -> torch.dtype:
    """What `--dtype` asks for, or with "auto" what fits a checkpoint of type `stored`.

    blocks_on_gpu: its matrices stay in blocks of few bits, whose kernels there are made for 16-bit numbers.
    Raises `UserError` for a type that is not computed in.
    """
    name = wanted if wanted != "auto" else (stored or "float32")
    if wanted == "auto" and blocks_on_gpu and name == "float32":
        name = "bfloat16"
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UserError(f"the checkpoint's dtype {name!r} cannot be computed in; give --dtype")
    return known[name]


def _make_cache(
    options: EngineOptions,
    grid: Grid,
    config: ModelConfig,
    parts: ModelPartitions,
    placement: Placement,
    recorded: bool,
) -> tuple[int, BlockPool, list[KVCache]]:
    start, stop = parts.heads.kv_range(grid.tp_rank)
    num_kv_heads, dim, dtype = stop - start, config.head_dim, placement.dtype
    layers = [parts.layers.count(stage) for stage in range(grid.pp_rank, parts.layers.parts, grid.pp_size)]
    wanted_len = min(options.max_model_len or config.context_limit, config.context_limit)
    with agreed(grid.world):
        if options.max_model_len is not None and options.max_model_len > config.context_limit:
            raise UserError(
                f"--max-model-len {options.max_model_len}: the model's limit is {config.context_limit} "
                "positions"
            )
        free = available_bytes(placement.device, grid.node_size, options.share_devices)
        if placement.device.type == "cuda":
            heads = parts.heads.q.count(grid.tp_rank)
            free -= working_bytes(
                config.hidden_size,
                2 * (heads + num_kv_heads) * dim + 3 * parts.intermediate.count(grid.tp_rank),
                parts.vocab.count(grid.tp_rank) if grid.is_last_stage else 0,
                options.max_batch_tokens,
                options.max_running,
                dtype.itemsize,
                recorded,
            )
        blocks = choose_num_blocks(
            KVCache.bytes_per_block(sum(layers), num_kv_heads, dim, dtype),
            max(0, free),
            options.kv_memory,
            options.max_running * grid.pp_size,
            wanted_len,
        )
    blocks = min(grid.world.all_gather_objects(blocks))
    with agreed(grid.world), memory_advice("the KV cache was made", _LESS_CACHE):
        caches = [KVCache(count, blocks, num_kv_heads, dim, dtype, placement.device) for count in layers]
    # Where keys depend on the sequence's length, equal prefixes do not have equal keys.
    pool = BlockPool(blocks, options.prefix_caching and not config.rope.length_dependent)
    return min(wanted_len, blocks * BLOCK_SIZE), pool, caches
