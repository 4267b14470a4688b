"""How fast messages are between ranks: latency and bandwidth of pairs, measured by ping-pong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from spmd.comm.waiting import meet, wait_until

SMALL_BYTES = 8
LARGE_BYTES = 1 << 20
ROUNDS = 20
PAIR_BUDGET_S = 0.05  # of one pair and message size; slow links make fewer rounds, but at least two
MAX_PAIRS = 66  # every pair of 12 ranks
_TAG = 32766


@dataclass(frozen=True)
class Link:
    """One pair of ranks. latency_s: seconds one way of 8 bytes. bandwidth: bytes a second one way."""

    first: int
    second: int
    same_node: bool
    latency_s: float
    bandwidth: float


def choose_pairs(nodes: Sequence[int], max_pairs: int = MAX_PAIRS) -> list[tuple[int, int]]:
    """The pairs of ranks to measure, given each rank's node.

    All of them when they are at most `max_pairs`; otherwise the first two ranks of each node, and one
    pair for each two nodes; of these again an even sample when they are too many.
    """
    size = len(nodes)
    every = [(a, b) for a in range(size) for b in range(a + 1, size)]
    if len(every) <= max_pairs:
        return every
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in members.values() if len(ranks) > 1]
    firsts = [ranks[0] for ranks in members.values()]
    across = [(a, b) for i, a in enumerate(firsts) for b in firsts[i + 1 :]]
    if not across:  # one crowded node: any ranks of it are alike
        return _sample(every, max_pairs)
    return sorted(_sample(inside, max_pairs // 4) + _sample(across, max_pairs - max_pairs // 4))


def measure_links(
    comm: MPI.Intracomm, pairs: Iterable[tuple[int, int]] | None = None, timeout_s: float = 120.0
) -> list[Link]:
    """Ping-pong between pairs of ranks of `comm` (default: `choose_pairs`), one pair at a time.

    Collective; every rank returns the same list, ordered by pair. Ranks that are not in a pair sleep, as do
    ranks of the engine, so the figures are those a message of the engine meets. Raises `HangError` after
    `timeout_s` seconds without an answer.
    """
    nodes = node_numbers(comm)
    measured = []
    for first, second in sorted(choose_pairs(nodes) if pairs is None else pairs):
        meet(comm, "a ping-pong", timeout_s)
        if comm.rank in (first, second):
            peer = second if comm.rank == first else first
            small = _one_way(comm, peer, comm.rank == first, SMALL_BYTES, timeout_s)
            large = _one_way(comm, peer, comm.rank == first, LARGE_BYTES, timeout_s)
            if comm.rank == first:
                rate = LARGE_BYTES / max(large - small, 1e-9) if large > small else LARGE_BYTES / large
                measured.append(Link(first, second, nodes[first] == nodes[second], small, rate))
    meet(comm, "the end of the ping-pongs", timeout_s)
    return sorted((link for part in comm.allgather(measured) for link in part), key=lambda link: link.first)


def typical(links: Iterable[Link], same_node: bool) -> tuple[float, float] | None:
    """Median (latency in seconds, bandwidth in bytes a second) of the links inside, or between, nodes."""
    chosen = [link for link in links if link.same_node == same_node]
    if not chosen:
        return None
    return statistics.median(link.latency_s for link in chosen), statistics.median(
        link.bandwidth for link in chosen
    )


def node_numbers(comm: MPI.Intracomm) -> list[int]:
    """For each rank of `comm`, the number of the node it is on. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    leader = node.bcast(comm.rank, 0)
    node.Free()
    leaders = comm.allgather(leader)
    numbers = {leader: number for number, leader in enumerate(sorted(set(leaders)))}
    return [numbers[leader] for leader in leaders]


def _sample(pairs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    if len(pairs) <= count:
        return pairs
    return [pairs[i * len(pairs) // count] for i in range(count)]


def _one_way(comm: MPI.Intracomm, peer: int, leads: bool, size: int, timeout_s: float) -> float:
    """Median seconds one way, on the leading rank, which says in each ping whether it is the last."""
    ping, pong = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    times: list[float] = []
    if not leads:
        while True:
            _wait(comm.Irecv((pong, MPI.BYTE), peer, _TAG), timeout_s)
            _wait(comm.Isend((ping, MPI.BYTE), peer, _TAG), timeout_s)
            if pong[0]:
                return 0.0
    began = time.perf_counter()
    for turn in range(ROUNDS):
        started = time.perf_counter()
        ping[0] = last = turn == ROUNDS - 1 or (turn > 1 and started - began > PAIR_BUDGET_S)
        _wait(comm.Isend((ping, MPI.BYTE), peer, _TAG), timeout_s)
        _wait(comm.Irecv((pong, MPI.BYTE), peer, _TAG), timeout_s)
        times.append((time.perf_counter() - started) / 2)
        if last:
            break
    return statistics.median(times[1:])  # the first one also opened the connection


def _wait(request: MPI.Request, timeout_s: float) -> None:
    wait_until(request.Test, "a ping-pong", timeout_s)
