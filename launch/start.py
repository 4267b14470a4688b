"""From ranks that were started somehow to a grid that is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpi4py import MPI

from spmd.comm.grid import Grid
from spmd.comm.group import DEFAULT_TIMEOUT_S, Group
from spmd.launch.abort import end_job
from spmd.launch.leaving import assemble
from spmd.launch.shared_files import unlink_common_files
from spmd.launch.watchdog import HEAD_START_S, open_watched

if TYPE_CHECKING:
    import torch


def start_grid(
    comm: MPI.Comm,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    backend: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    take_device: Callable[[Group], torch.device] | None = None,
) -> Grid:
    """`Grid.create` once all ranks are there, with a ledger of what they do and a watchdog on each of them.

    Collective. A rank that others wait for longer than `timeout_s` seconds ends the job, with a report.
    take_device: as in `Grid.create`; see `device_taker`.
    """
    assemble(comm, timeout_s)
    ledger = open_watched(comm, timeout_s, end_job)
    waits_s = timeout_s + (0.0 if ledger is None else HEAD_START_S)
    grid = Grid.create(comm, tp, pp, dp, backend, waits_s, ledger, take_device)
    unlink_common_files(grid.node)
    return grid
