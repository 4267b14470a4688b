"""A rank's pipeline stages with their weights: read by one rank alone, or by all ranks together."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from spmd.checkpoint.cooperative import CooperativeWeights, Request, RequestRecorder
from spmd.checkpoint.weights import WeightReader
from spmd.comm.agree import agreed
from spmd.comm.grid import Grid
from spmd.layers.weights import Placement, Weights
from spmd.memory import memory_advice
from spmd.models.decoder import StageModel
from spmd.opening import OpenModel
from spmd.progress import LoadProgress, ReportedWeights

_FEWER_WEIGHTS = "use more ranks (--tp, --pp) or fewer bits (--quantize int8)"
_LOG = logging.getLogger(__name__)


def build_stages(model: OpenModel, grid: Grid, placement: Placement) -> list[StageModel]:
    """This rank's stages. Collective; a `UserError` of one rank is raised on all.

    Of several ranks each reads a part of the checkpoint and sends on what others need.
    """
    shown = grid.world.rank == 0
    source = model.checkpoint.source
    began = time.perf_counter()
    if grid.size == 1:
        with (
            LoadProgress(shown) as progress,
            agreed(grid.world),
            memory_advice("weights were loaded", _FEWER_WEIGHTS),
        ):
            stages = _build(model, grid, placement, ReportedWeights(WeightReader(source), progress.update))
        read = source.bytes_read
    else:
        requests = record_requests(model, grid, placement)
        with LoadProgress(shown) as progress, agreed(grid.world):
            weights = CooperativeWeights(source, grid, requests, progress.update)
            progress.total(weights.plan.total_bytes)
            with weights, memory_advice("weights were loaded", _FEWER_WEIGHTS):
                stages = _build(model, grid, placement, weights)
        read = weights.plan.total_bytes
        _LOG.debug("read %.1f MB of the checkpoint", weights.exchange.files.bytes_read / 1e6)
    seconds = max(1e-9, time.perf_counter() - began)
    _LOG.info("weights: %.2f GB in %.1f s, %.2f GB/s", read / 1e9, seconds, read / 1e9 / seconds)
    return stages


def record_requests(model: OpenModel, grid: Grid, placement: Placement) -> Sequence[Request]:
    """What this rank's stages ask for, in order, found by a dry run of their construction. Collective."""
    recorder = RequestRecorder(model.checkpoint.source)
    nowhere = replace(placement, device=torch.device("meta"), team=None, gpu=None, overlap=None)
    with agreed(grid.world):
        _build(model, grid, nowhere, recorder)
    return recorder.requests


def _build(model: OpenModel, grid: Grid, placement: Placement, weights: Weights) -> list[StageModel]:
    mine = range(grid.pp_rank, model.parts.layers.parts, grid.pp_size)
    return [
        StageModel(model.config, model.parts, stage, placement, weights, model.stored_head) for stage in mine
    ]
