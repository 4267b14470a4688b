"""Which CPU cores and how many threads each rank of a node gets."""

from __future__ import annotations

import os
from collections.abc import Sequence

from spmd.comm.group import Group


def divide_cores(affinities: Sequence[frozenset[int]], rank: int) -> frozenset[int]:
    """Cores of node-local `rank`, given the cores each rank of the node may use.

    Ranks that the launcher gave cores of their own keep them. Ranks that share a set divide it into
    neighbouring, disjoint cores; when they outnumber the cores, they go on sharing it.
    """
    mine = affinities[rank]
    sharers = [r for r, cores in enumerate(affinities) if cores & mine]
    if len(sharers) == 1 or any(affinities[r] != mine for r in sharers):
        return mine
    cores = sorted(mine)
    if len(sharers) > len(cores):
        return mine
    position, base, extra = sharers.index(rank), len(cores) // len(sharers), len(cores) % len(sharers)
    start = position * base + min(position, extra)
    return frozenset(cores[start : start + base + (position < extra)])


def bind_cores(node: Group, threads: int | None = None) -> int:
    """Bind this process to its cores and return the number of compute threads to use.

    `threads` overrides the number. Collective over the node's ranks.
    """
    if not hasattr(os, "sched_getaffinity"):
        return threads or max(1, (os.cpu_count() or 1) // node.size)
    affinities = [frozenset(cores) for cores in node.all_gather_objects(sorted(os.sched_getaffinity(0)))]
    cores = divide_cores(affinities, node.rank)
    sharers = sum(other == cores for other in affinities)
    if node.size > 1 and cores != affinities[node.rank]:
        os.sched_setaffinity(0, cores)
        sharers = 1
    return threads or max(1, len(cores) // sharers)
