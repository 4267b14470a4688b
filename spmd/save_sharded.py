"""`spmd.run --save-sharded DIR`: write a copy of a model that is cut for the grid of this job."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from spmd.building import record_requests
from spmd.checkpoint.sharded_save import save_sharded
from spmd.launch.launcher import require_whole_world
from spmd.launch.start import start_grid
from spmd.layers.weights import Placement
from spmd.opening import open_model
from spmd.options import EngineOptions
from spmd.progress import LoadProgress


def save_model(options: EngineOptions, folder: str) -> int:
    """Collective; returns the exit code. The copy keeps the stored types, whatever dtype or bits the options
    ask for. Raises `UserError` on every rank."""
    from mpi4py import MPI

    require_whole_world(os.environ)
    if options.plan == "auto":
        from spmd.planning import plan_options

        options = plan_options(options, MPI.COMM_WORLD)
    grid = start_grid(
        MPI.COMM_WORLD, options.tp, options.pp, options.dp, options.comm_backend, options.timeout_s
    )
    began = time.perf_counter()
    model = open_model(replace(options, dtype="auto", quantize=None), grid)
    placement = Placement(torch.float32, torch.device("meta"), grid.tp, keep_blocks=model.keep_blocks)
    requests = record_requests(model, grid, placement)
    with LoadProgress(grid.world.rank == 0) as progress:
        size = save_sharded(Path(folder), model.checkpoint, grid, requests, progress.update)
    if grid.world.rank == 0:
        seconds = max(1e-9, time.perf_counter() - began)
        print(
            f"spmd: {folder}: {size / 1e9:.2f} GB of weights for --pp {grid.pp_size} --tp {grid.tp_size}, "
            f"written in {seconds:.1f} s ({size / 1e9 / seconds:.2f} GB/s)",
            file=sys.stderr,
        )
    grid.free()
    return 0
