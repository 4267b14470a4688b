"""From what the user typed after `--model` to an open checkpoint, checked, on every rank."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from mpi4py import MPI

from spmd.checkpoint.gguf_blocks import COMPUTED_KINDS
from spmd.checkpoint.open import Checkpoint, open_checkpoint
from spmd.checkpoint.resolve import resolve_for_all
from spmd.checkpoint.weights import ExpectedWeights, check_complete
from spmd.comm.agree import agreed
from spmd.comm.errors import UserError
from spmd.comm.grid import Grid
from spmd.comm.group import make_group
from spmd.comm.partition import Partition
from spmd.config import ModelConfig
from spmd.layers.weights import Placement
from spmd.models.decoder import EMBEDDING, HEAD, ModelPartitions, StageModel
from spmd.models.stages import split_layers
from spmd.options import EngineOptions


@dataclass
class OpenModel:
    """A checkpoint that holds the model its configuration describes. `stored_head`: it has a head of its
    own. `keep_blocks`: matrices stored in blocks are kept so. A GGUF file's metadata is on rank 0 only."""

    checkpoint: Checkpoint
    config: ModelConfig
    stored_head: bool
    keep_blocks: bool
    parts: ModelPartitions


def open_model(options: EngineOptions, grid: Grid) -> OpenModel:
    """Rank 0 finds the model, reads the headers and checks them; the others are told. Collective.

    Rank 0 prints warnings. Raises `UserError` on every rank for everything that is wrong with the model, and
    for a grid that does not fit it.
    """
    path = resolve_for_all(options.model, grid.world)
    opened: tuple[Checkpoint, ModelConfig] | None = None
    with agreed(grid.world):
        if grid.world.rank == 0:
            checkpoint = open_checkpoint(path)
            opened = checkpoint, ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config)
    checkpoint, config = grid.world.broadcast_object(opened)
    names = checkpoint.source.names()
    stored_head = HEAD in names
    with agreed(grid.world):
        keep_blocks = options.dtype == "auto" and any(
            checkpoint.source.dtype_name(name) in COMPUTED_KINDS for name in names
        )
        in_blocks = keep_blocks or options.quantize is not None
        parts = ModelPartitions.build(config, grid.tp_size, _stages(options, grid, config), in_blocks)
        if grid.world.rank == 0:
            for warning in _check_tensors(config, checkpoint, stored_head):
                print(f"spmd: warning: {warning}", file=sys.stderr)
    return OpenModel(checkpoint, config, stored_head, keep_blocks, parts)


def _stages(options: EngineOptions, grid: Grid, config: ModelConfig) -> Partition:
    if options.pp_interleave > 1 and grid.pp_size == 1:
        raise UserError(
            f"--pp-interleave {options.pp_interleave}: it needs at least 2 pipeline stages (--pp)"
        )
    counts = list(options.pp_split) if options.pp_split else None
    return split_layers(config, grid.pp_size, options.pp_interleave, counts)


def _check_tensors(config: ModelConfig, checkpoint: Checkpoint, stored_head: bool) -> list[str]:
    """Compare the checkpoint with every tensor the model needs, found by a dry run of its construction."""
    if not stored_head and not config.tie_word_embeddings:
        raise UserError(
            f"{checkpoint.path}: tensor {HEAD} is missing, and the config does not tie it to the embedding"
        )
    expected = ExpectedWeights()
    alone = ModelPartitions.build(config, 1, Partition.even(config.num_layers, 1))
    nowhere = Placement(torch.float32, torch.device("meta"), make_group(MPI.COMM_SELF))
    StageModel(config, alone, 0, nowhere, expected, stored_head)
    warnings = check_complete(expected.shapes, checkpoint.source)
    if stored_head and config.tie_word_embeddings and _heads_differ(checkpoint):
        warnings.append(
            f"{checkpoint.path}: the config ties {HEAD} to the embedding, but another is stored; it is used"
        )
    return warnings


def _heads_differ(checkpoint: Checkpoint) -> bool:
    rows = checkpoint.source.shape(HEAD)[0]
    step = 8192
    for start in range(0, rows, step):
        index = (slice(start, min(rows, start + step)), slice(0, checkpoint.source.shape(HEAD)[1]))
        if not torch.equal(checkpoint.source.read(HEAD, index), checkpoint.source.read(EMBEDDING, index)):
            return True
    return False
