"""One page about a job's ranks, nodes and links, and what is wrong with them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spmd.comm.ledger_view import list_ranks
from spmd.launch.pingpong import Link, typical
from spmd.launch.rank_facts import RankFacts
from spmd.launch.units import format_bytes

SHM_PER_RANK = 16 << 20  # windows of a rank's groups, and of MPI itself
_ROWS = 16  # more ranks are shown a node a line
_MATRIX = 12
_SLOW_COPY, _SLOW_LINK, _LATE_LINK = 0.5, 0.33, 5.0


@dataclass
class Examination:
    """All that was found. grid: what a run with the given sizes would use, or why it would be refused."""

    ranks: list[RankFacts]
    links: list[Link]
    grid: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(found: Examination) -> None:
    """Fill in `errors`, with which a run would fail or be wrong, and `warnings`, with which it is slow."""
    errors, warnings = found.errors, found.warnings
    ranks = found.ranks
    names = sorted({name for facts in ranks for name in facts.versions})
    for name in names:
        by_version = defaultdict(list)
        for facts in ranks:
            by_version[facts.versions.get(name, "none")].append(facts.rank)
        if len(by_version) > 1:
            parts = "; ".join(f"{version} on {list_ranks(r)}" for version, r in sorted(by_version.items()))
            errors.append(f"{name} differs: {parts}")
    for message in dict.fromkeys(facts.device_error for facts in ranks):
        if message is not None:
            errors.append(message)
    kinds = {facts.device.partition(":")[0] for facts in ranks}
    if len(kinds - {"none"}) > 1:
        errors.append(f"some ranks have a GPU and some have not: {', '.join(sorted(kinds))}")
    if len({facts.threading for facts in ranks}) > 1 or ranks[0].threading != "multiple":
        warnings.append(f"MPI's threading level is {ranks[0].threading}, not multiple")
    for node in _by_node(ranks).values():
        _judge_node(node, errors, warnings)
    counts = {len(node) for node in _by_node(ranks).values()}
    if len(counts) > 1:
        warnings.append(f"nodes have different numbers of ranks: {', '.join(map(str, sorted(counts)))}")
    if any(facts.shares_cpus for facts in ranks):
        return  # then speeds are a matter of chance
    speeds = [facts.copy_speed for facts in ranks]
    for facts in ranks:
        if facts.copy_speed < _SLOW_COPY * statistics.median(speeds):
            warnings.append(
                f"rank {facts.rank} ({facts.host}) copies memory at {_rate(facts.copy_speed)}, the others "
                f"at about {_rate(statistics.median(speeds))}"
            )
    _judge_links(found.links, warnings)


def format_page(found: Examination) -> str:
    """The page, for rank 0 to print."""
    ranks = found.ranks
    first = ranks[0]
    nodes = _by_node(ranks)
    lines = [
        f"spmd doctor: {len(ranks)} ranks on {len(nodes)} node{'s' * (len(nodes) > 1)}, "
        f"started by {first.launcher}",
        f"MPI: {first.versions['MPI']}, threading {first.threading}",
        "versions: " + ", ".join(f"{k} {v}" for k, v in first.versions.items() if k != "MPI"),
        f"CuPy: {first.cupy or 'not installed'}, NCCL: {first.nccl or 'none'}",
        f"grid: {found.grid}",
        "",
        *_table(ranks),
        "",
    ]
    for number, node in nodes.items():
        one = node[0]
        lines.append(
            f"node {number} ({one.host}): {list_ranks([f.rank for f in node])}; {one.cpu_count} CPUs, load "
            f"{one.load:.1f}; memory {_size(one.memory_free)} free of {_size(one.memory)}; shared memory "
            f"{_size(one.shm_free)} free of {_size(one.shm)}; memory copied at "
            f"{_rate(sum(f.copy_speed for f in node))} by all ranks"
            + (f"; model read at {_rate(one.read_speed)}" if one.read_speed is not None else "")
        )
    lines += ["", *_links(found.links, len(ranks)), ""]
    lines += [f"error: {text}" for text in found.errors]
    lines += [f"warning: {text}" for text in found.warnings]
    if not found.errors and not found.warnings:
        lines.append("nothing is wrong")
    return "\n".join(lines)


def _judge_node(node: Sequence[RankFacts], errors: list[str], warnings: list[str]) -> None:
    one = node[0]
    where = f"{one.host} ({list_ranks([facts.rank for facts in node])})"
    if one.shm_free < SHM_PER_RANK * len(node):
        errors.append(
            f"{where}: {_size(one.shm_free)} of shared memory are free, {len(node)} ranks need about "
            f"{_size(SHM_PER_RANK * len(node))}; enlarge /dev/shm (docker: --shm-size)"
        )
    if any(facts.shares_cpus for facts in node):
        warnings.append(
            f"{where}: ranks share CPUs ({one.cpus}), so they slow each other down; start at most one rank a "
            "CPU, or ask the launcher for more"
        )
    elif any(len(facts.domains) > 1 for facts in node) and len(node) > 1:
        warnings.append(
            f"{where}: a rank's CPUs are in several NUMA domains; start one rank a domain or more"
        )
    if one.load > 0.5 * one.cpu_count + 1:
        warnings.append(f"{where}: something else is running there (load {one.load:.1f})")


def _judge_links(links: Sequence[Link], warnings: list[str]) -> None:
    for same_node in (True, False):
        usual = typical(links, same_node)
        if usual is None:
            continue
        latency, bandwidth = usual
        for link in links:
            if link.same_node != same_node:
                continue
            if link.latency_s > max(_LATE_LINK * latency, 50e-6):
                warnings.append(
                    f"messages between ranks {link.first} and {link.second} take "
                    f"{link.latency_s * 1e6:.0f} us, between others {latency * 1e6:.0f} us"
                )
            if link.bandwidth < _SLOW_LINK * bandwidth:
                warnings.append(
                    f"between ranks {link.first} and {link.second} {_rate(link.bandwidth)} get through, "
                    f"between others {_rate(bandwidth)}"
                )


def _table(ranks: Sequence[RankFacts]) -> list[str]:
    if len(ranks) > _ROWS:
        return [f"(ranks one by one: in what --json FILE writes; these are {len(ranks)})"]
    rows = [("rank", "node", "device", "CPUs", "threads", "NUMA", "copies memory at")]
    for facts in ranks:
        domains = ",".join(map(str, facts.domains)) or "-"
        rows.append(
            (
                str(facts.rank),
                str(facts.node),
                facts.device,
                facts.cpus,
                str(facts.threads),
                domains,
                _rate(facts.copy_speed),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _links(links: Sequence[Link], size: int) -> list[str]:
    if not links:
        return ["links: none, there is one rank"]
    lines = []
    for same_node, kind in ((True, "inside nodes"), (False, "between nodes")):
        usual = typical(links, same_node)
        if usual is not None:
            lines.append(f"links {kind}: typically {usual[0] * 1e6:.1f} us, {_rate(usual[1])}")
    if size <= _MATRIX:
        lines.append("latency in us (upper right) and bandwidth in GB/s (lower left) between ranks:")
        cells = [["-"] * size for _ in range(size)]
        for link in links:
            cells[link.first][link.second] = f"{link.latency_s * 1e6:.1f}"
            cells[link.second][link.first] = f"{link.bandwidth / 1e9:.2f}"
        lines.append("      " + "".join(f"{rank:>9}" for rank in range(size)))
        lines += [f"{rank:>6}" + "".join(f"{cell:>9}" for cell in row) for rank, row in enumerate(cells)]
    else:
        lines.append(f"{len(links)} of {size * (size - 1) // 2} pairs of ranks were measured; the slowest:")
        for link in sorted(links, key=lambda link: link.bandwidth)[:3]:
            speed = f"{link.latency_s * 1e6:.1f} us, {_rate(link.bandwidth)}"
            lines.append(f"  ranks {link.first} and {link.second}: {speed}")
    return lines


def _by_node(ranks: Sequence[RankFacts]) -> dict[int, list[RankFacts]]:
    nodes: dict[int, list[RankFacts]] = defaultdict(list)
    for facts in ranks:
        nodes[facts.node].append(facts)
    return dict(sorted(nodes.items()))


def _size(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)


def _rate(speed: float) -> str:
    return f"{format_bytes(speed)}/s"
