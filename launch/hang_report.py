"""Who is to blame for a hang, told from where the ranks of a node are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spmd.comm.ledger_view import Entry, RankState, list_ranks


@dataclass(frozen=True)
class Verdict:
    """Ranks to blame (none when they are on other nodes, or it cannot be told) and why, in words. elsewhere:
    ranks of other nodes that are waited for."""

    ranks: tuple[int, ...]
    reason: str
    elsewhere: tuple[int, ...] = ()


def find_missing(states: Sequence[RankState]) -> Verdict | None:
    """A rank that others of the node wait for and that will never come: it has left the job or died."""
    by_rank = {state.rank: state for state in states}
    for state in states:
        entry = state.waiting
        if entry is None:
            continue
        for rank in _awaited(entry, by_rank):
            other = by_rank.get(rank)
            if other is not None and (other.left or not other.alive):
                how = "has left the job" if other.left else "died"
                return Verdict(
                    (rank,),
                    f"rank {rank} {how}, but rank {state.rank} waits for it in {_at(entry)}{_last(other)}",
                )
    return None


def find_cause(states: Sequence[RankState]) -> Verdict:
    """Why the ranks of this node do not get on. `states` are all its ranks, some of which wait."""
    by_line = _find_parted(states, by_line=True)
    hint = f". The first calls from different lines: {by_line.reason}" if by_line is not None else ""
    missing = find_missing(states)
    if missing is not None:
        return Verdict(missing.ranks, missing.reason + hint)
    parted = _find_parted(states, by_line=False)
    if parted is not None:
        return Verdict(parted.ranks, parted.reason + hint)
    by_rank = {state.rank: state for state in states}
    waits = {state.rank: state.waiting for state in states if state.waiting is not None}
    awaited = {rank: _awaited(entry, by_rank) for rank, entry in waits.items()}
    busy = sorted({rank for ranks in awaited.values() for rank in ranks if rank in by_rank} - set(waits))
    if busy:
        first = next(rank for rank, ranks in awaited.items() if busy[0] in ranks)
        what = _at(waits[first])
        last = _last(by_rank[busy[0]])
        return Verdict(
            tuple(busy), f"{list_ranks(busy)} did not come to {what}, and is in no collective{last}{hint}"
        )
    if by_line is not None:
        return by_line
    away = sorted({rank for ranks in awaited.values() for rank in ranks} - set(by_rank))
    if away:
        reason = f"the ranks of this node wait for {list_ranks(away)} on other nodes"
        return Verdict((), reason, tuple(away))
    # Every awaited rank waits itself: a circle. Who is waited for most has gone its own way.
    counts = Counter(rank for ranks in awaited.values() for rank in ranks)
    if not counts:
        return Verdict((), "each rank that waits seems to have what it waits for")
    most = max(counts.values())
    odd = tuple(sorted(rank for rank, count in counts.items() if count == most))
    return Verdict(odd, "ranks wait for each other: " + _positions([by_rank[rank] for rank in odd]))


def format_report(states: Sequence[RankState], now_ns: int, where: str) -> str:
    """One line for each rank of the node, by rank; `where` names the node."""
    lines = [f"spmd: where the ranks of {where} are:"]
    lines += [f"spmd:   rank {state.rank}: {describe(state, now_ns)}" for state in states]
    return "\n".join(lines)


def describe(state: RankState, now_ns: int) -> str:
    """Where a rank is and for how long."""
    if not state.alive:
        return f"dead (process {state.pid}){_last(state)}"
    if state.left:
        return f"has left the job{_last(state)}"
    entry = state.last
    if entry is None:
        return "in no collective yet"
    if entry.waiting:
        idle = "idle in" if entry.idle else "in"
        return f"{idle} {entry.describe()}, for {(now_ns - entry.entered_ns) / 1e9:.1f} s, at {entry.site}"
    if entry.left_ns < 0:
        return f"gave up {_at(entry)}, {(now_ns + entry.left_ns) / 1e9:.1f} s ago"
    return (
        f"computing, in no collective for {(now_ns - entry.left_ns) / 1e9:.1f} s; the last was "
        f"{entry.describe()}, at {entry.site}"
    )


def _awaited(entry: Entry, by_rank: dict[int, RankState]) -> list[int]:
    """Ranks whose part in `entry` is missing, as far as this node can tell. Ranks of other nodes count only
    when nobody of this node is missing."""
    if entry.is_message:
        return [entry.peer]
    here = [rank for rank in entry.members if rank in by_rank]
    if not entry.is_numbered:
        with_it = [rank for rank in here if _is_with(by_rank[rank], entry)]
        return [rank for rank in entry.members if rank not in with_it]
    late = [rank for rank in here if not _has_come(by_rank[rank], entry)]
    return late or [rank for rank in entry.members if rank not in by_rank]


def _has_come(state: RankState, entry: Entry) -> bool:
    numbers = [other.sequence for other in _of_group(state, entry.group, entry.members)]
    return bool(numbers) and numbers[-1] >= entry.sequence


def _is_with(state: RankState, entry: Entry) -> bool:
    other = state.waiting
    return other is not None and (other.operation, other.group, other.members) == (
        entry.operation,
        entry.group,
        entry.members,
    )


def _of_group(state: RankState, group: str, members: tuple[int, ...]) -> list[Entry]:
    return [
        entry
        for entry in state.entries
        if entry.group == group and entry.members == members and entry.is_numbered
    ]


def _find_parted(states: Sequence[RankState], by_line: bool) -> Verdict | None:
    """The first collective, in a group that is stuck, that its ranks did not call alike: a different one, or
    one with other sizes; or, `by_line`, from different lines of code."""
    calls: dict[tuple[str, tuple[int, ...], int], dict[int, Entry]] = defaultdict(dict)
    for state in states:
        for entry in state.entries:
            if entry.is_numbered:
                calls[entry.group, entry.members, entry.sequence][state.rank] = entry
    stuck = {(e.group, e.members) for s in states if (e := s.last) is not None and e.left_ns <= 0}

    def kind(entry: Entry) -> object:
        return entry.site if by_line else entry.signature

    found = []
    for (group, members, _), entries in calls.items():
        # Root and others may well call from different lines.
        rooted = by_line and any(entry.signature[2] >= 0 for entry in entries.values())
        if (group, members) in stuck and not rooted and len(set(map(kind, entries.values()))) > 1:
            found.append(entries)
    if not found:
        return None
    entries = min(found, key=_first_time)
    kinds: dict[object, list[int]] = defaultdict(list)
    for rank, entry in sorted(entries.items()):
        kinds[kind(entry)].append(rank)
    ordered = sorted(kinds.values(), key=len)
    alone = len(ordered[0]) < len(ordered[1])
    odd = ordered[0] if alone else sorted(entries)
    parts = "; ".join(f"{list_ranks(ranks)} called {_at(entries[ranks[0]])}" for ranks in reversed(ordered))
    return Verdict(tuple(odd), f"{list_ranks(odd)} parted from the others: {parts}" if alone else parts)


def _first_time(entries: dict[int, Entry]) -> int:
    return min(entry.entered_ns for entry in entries.values())


def _at(entry: Entry) -> str:
    return f"{entry.describe()} at {entry.site}"


def _last(state: RankState) -> str:
    return "" if state.last is None else f"; its last was {_at(state.last)}"


def _positions(states: Iterable[RankState]) -> str:
    return "; ".join(f"rank {state.rank} in {_at(state.last)}" for state in states if state.last is not None)
