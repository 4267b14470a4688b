"""Which CPU cores and how many threads each rank of a node gets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spmd.comm.partition import Partition

if TYPE_CHECKING:
    from spmd.comm.group import Group

_NODES, _SIBLINGS = "/sys/devices/system/node", "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True)
class Topology:
    """How a node's logical CPUs belong together; sets may name CPUs that a rank may not use.

    domains: CPUs of each NUMA domain that has any. cores: CPUs of each physical core that has several (SMT).
    Both may be empty: one domain, one CPU a core.
    """

    domains: tuple[frozenset[int], ...] = ()
    cores: tuple[frozenset[int], ...] = ()

    @classmethod
    def read(cls, read: Callable[[str], str | None]) -> Topology:
        """From the files of Linux's /sys; `read` gives a file's text, or None where there is none."""
        domains = []
        for number in sorted(parse_cpus(read(f"{_NODES}/online") or "")):
            cpus = parse_cpus(read(f"{_NODES}/node{number}/cpulist") or "")
            if cpus:  # a domain may be memory without cores
                domains.append(cpus)
        cores = {parse_cpus(read(_SIBLINGS.format(cpu)) or "") for cpus in domains for cpu in cpus}
        return cls(tuple(domains), tuple(sorted((core for core in cores if len(core) > 1), key=min)))

    def split_domains(self, cpus: frozenset[int]) -> list[list[tuple[int, ...]]]:
        """`cpus` by NUMA domain, and in each domain by physical core, in order."""
        core_of = {cpu: core for core in self.cores for cpu in core}
        rest = cpus.difference(*self.domains)
        parts = []
        for domain in (*self.domains, rest):
            units = {tuple(sorted(core_of.get(cpu, {cpu}) & cpus & domain)) for cpu in cpus & domain}
            if units:
                parts.append(sorted(units))
        return parts


def parse_cpus(text: str) -> frozenset[int]:
    """The numbers of a list as Linux writes it, such as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Sequence[int] | frozenset[int]) -> str:
    """The inverse of `parse_cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def divide_cores(
    affinities: Sequence[frozenset[int]], rank: int, topology: Topology | None = None
) -> frozenset[int]:
    """Cores of node-local `rank`, given the cores each rank of the node may use.

    Ranks that the launcher gave cores of their own keep them. Ranks that share a set divide it into
    neighbouring, disjoint cores, inside one NUMA domain where they are at least as many as the domains and in
    whole domains otherwise, and without cutting a physical core in two; when they outnumber the cores, they
    go on sharing the set.
    """
    mine = affinities[rank]
    sharers = [r for r, cores in enumerate(affinities) if cores & mine]
    if len(sharers) == 1 or any(affinities[r] != mine for r in sharers) or len(sharers) > len(mine):
        return mine
    domains = (topology or Topology()).split_domains(mine)
    place, count = sharers.index(rank), len(sharers)
    if count < len(domains):
        # Domains differ in size when the affinity is restricted.
        whole = Partition.weighted([len(domain) for domain in domains], count)
        return frozenset(cpu for domain in domains[whole.slice(place)] for core in domain for cpu in core)
    counts = _ranks_per_domain([sum(map(len, domain)) for domain in domains], count)
    ranks = Partition.from_counts(counts)
    number = ranks.owner(place)
    units = domains[number]
    if counts[number] > len(units):  # more ranks than physical cores: siblings part
        units = [(cpu,) for core in units for cpu in core]
    share = Partition.even(len(units), counts[number]).slice(place - ranks.start(number))
    return frozenset(cpu for core in units[share] for cpu in core)


def count_threads(cpus: frozenset[int], topology: Topology) -> int:
    """Compute threads that `cpus` serve best: one a physical core, as its siblings share the vector units."""
    return sum(map(len, topology.split_domains(cpus)))


def bind_cores(node: Group, threads: int | None = None) -> int:
    """Bind this process to its cores and return the number of compute threads to use.

    `threads` overrides the number. Collective over the node's ranks.
    """
    if not hasattr(os, "sched_getaffinity"):
        return threads or max(1, (os.cpu_count() or 1) // node.size)
    affinities = [frozenset(cores) for cores in node.all_gather_objects(sorted(os.sched_getaffinity(0)))]
    topology = Topology.read(read_text)
    cores = divide_cores(affinities, node.rank, topology)
    sharers = sum(other == cores for other in affinities)
    if node.size > 1 and cores != affinities[node.rank]:
        os.sched_setaffinity(0, cores)
        sharers = 1
    return threads or max(1, count_threads(cores, topology) // sharers)


def read_text(path: str) -> str | None:
    """The text of a file, None where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _ranks_per_domain(sizes: Sequence[int], ranks: int) -> list[int]:
    """`ranks` (at least one a domain, at most one a CPU) over domains of these many CPUs.

    Each next rank goes where the CPUs per rank stay most (Jefferson's method).
    """
    counts = [1] * len(sizes)
    for _ in range(ranks - len(sizes)):
        best = max(range(len(sizes)), key=lambda i: sizes[i] / (counts[i] + 1))
        counts[best] += 1
    return counts
