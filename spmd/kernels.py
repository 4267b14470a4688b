"""Getting the CPU kernels ready: compiled once for this processor, then loaded from a cache."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from spmd.comm.group import Group

if TYPE_CHECKING:
    from spmd.layers.kernels.cpu_team import ThreadTeam

_NOTICED_S = 3.0


def make_team(node: Group, threads: int) -> ThreadTeam | None:
    """This rank's team of `threads` threads, or None, with a warning, where kernels cannot be compiled.

    Collective over the ranks of a node, the first of which compiles what the others load.
    """
    team, reason = None, None
    for turn in (True, False):
        if turn == (node.rank == 0):
            try:
                team = _build(threads, shown=node.rank == 0)
            except (ImportError, RuntimeError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
        node.barrier()
    reasons = [found for found in node.all_gather_objects(reason) if found is not None]
    if reasons:
        if node.rank == 0:
            print(f"spmd: warning: no CPU kernels, plain torch is slower ({reasons[0]})", file=sys.stderr)
        return None
    return team


def _build(threads: int, shown: bool) -> ThreadTeam:
    began = time.perf_counter()
    from spmd.layers.kernels.cpu_team import ThreadTeam, compile_kernels

    compile_kernels()
    seconds = time.perf_counter() - began
    if shown and seconds > _NOTICED_S:
        print(f"spmd: compiled CPU kernels in {seconds:.0f} s; kept for the next start", file=sys.stderr)
    return ThreadTeam(threads)
