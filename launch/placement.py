"""Where the ranks of a job are: one line that says which devices, cores and threads they have."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmd.launch.cores import Topology, format_cpus, read_text

if TYPE_CHECKING:
    from spmd.comm.group import Group

_MOST_SHOWN = 8  # ranks of a node


@dataclass(frozen=True)
class Place:
    """One rank. node: a number. cpus: the logical CPUs it may use, none where the system does not tell.
    domains: numbers of the NUMA domains they are in."""

    node: int
    device: str
    cpus: frozenset[int]
    threads: int
    domains: tuple[int, ...]


def find_places(world: Group, node: Group, device: str, threads: int) -> list[Place]:
    """Every rank's place, in rank order, after cores are bound. Collective."""
    cpus = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    domains = Topology.read(read_text).domains
    inside = tuple(number for number, domain in enumerate(domains) if domain & cpus)
    return world.all_gather_objects(Place(node.ranks[0], device, cpus, threads, inside))


def describe_places(places: Sequence[Place]) -> str:
    """Such as `2 ranks on 1 node: cpu; cores 0-31 | 32-63; NUMA domain 0 | 1; 32 threads each`.

    Nodes that look alike are described once.
    """
    nodes: dict[int, list[Place]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    layouts = list(dict.fromkeys("; ".join(_describe_node(node)) for node in nodes.values()))
    each = "each with " if len(nodes) > 1 and len(layouts) == 1 and len(places) > len(nodes) else ""
    counts = f"{_count(len(places), 'rank')} on {_count(len(nodes), 'node')}"
    return f"{counts}: {each}{' / '.join(layouts)}"


def _describe_node(places: Sequence[Place]) -> list[str]:
    def shown(value: Callable[[Place], str]) -> str:
        values = [value(place) for place in places]
        if len(set(values)) == 1:
            return values[0]
        return " | ".join([*values[:_MOST_SHOWN], *(["..."] if len(values) > _MOST_SHOWN else [])])

    parts = [shown(lambda place: place.device)]
    if all(place.cpus for place in places):
        parts.append(f"cores {shown(lambda place: format_cpus(place.cpus))}")
    if any(max(place.domains, default=0) > 0 for place in places):
        parts.append(f"NUMA domain {shown(lambda place: format_cpus(place.domains))}")
    threads = {place.threads for place in places}
    parts.append(
        f"{_count(threads.pop(), 'thread')}{' each' if len(places) > 1 else ''}"
        if len(threads) == 1
        else f"{shown(lambda place: str(place.threads))} threads"
    )
    return parts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
