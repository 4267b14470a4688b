"""From where the ranks are to who is to blame."""

from __future__ import annotations

from spmd.comm.ledger import Operation
from spmd.comm.ledger_view import Entry, RankState
from spmd.launch.hang_report import find_cause, find_missing, format_report

SECOND = 10**9
NOW = 100 * SECOND


def entry(
    number: int,
    sequence: int,
    *,
    operation: int = Operation.all_reduce,
    size: int = 64,
    site: str = "layers/linear.py:10 forward",
    group: str = "tp",
    members: tuple[int, ...] = (0, 1, 2),
    peer: int = -1,
    waiting: bool = False,
    gave_up: bool = False,
) -> Entry:
    entered = (50 + number) * SECOND
    left = 0 if waiting else -(entered + SECOND) if gave_up else entered + SECOND
    return Entry(number, operation, group, members, sequence, size, peer, False, site, entered, left)


def rank(number: int, *entries: Entry, alive: bool = True, left: bool = False) -> RankState:
    return RankState(number, number, 1000 + number, alive, left, entries)


DONE = entry(1, 1)
WAITING = entry(2, 2, waiting=True)


def test_a_rank_that_computes_while_others_wait() -> None:
    cause = find_cause([rank(0, DONE, WAITING), rank(1, DONE), rank(2, DONE, WAITING)])
    assert cause.ranks == (1,)
    assert cause.reason.startswith("rank 1 did not come to all_reduce of 64 bytes, number 2 of the tp group")


def test_the_one_at_the_end_of_a_chain_of_waits() -> None:
    """0 waits for 1, which waits for 2, which waits for 3: that one computes."""
    states = [
        rank(0, entry(1, 1, waiting=True, members=(0, 1))),
        rank(1, entry(1, 1, waiting=True, group="pp", members=(1, 2))),
        rank(2, entry(1, 0, operation=Operation.recv, peer=3, waiting=True)),
        rank(3),
    ]
    assert find_cause(states).ranks == (3,)


def test_the_minority_has_parted() -> None:
    other = entry(2, 2, operation=Operation.broadcast, peer=0, waiting=True, site="x/a.py:7 f")
    cause = find_cause([rank(0, DONE, WAITING), rank(1, DONE, other), rank(2, DONE, WAITING)])
    assert cause.ranks == (1,)
    assert "ranks 0, 2 called all_reduce" in cause.reason
    assert "rank 1 called broadcast of 64 bytes from rank 0, number 2 " in cause.reason
    assert "x/a.py:7 f" in cause.reason


def test_of_two_ranks_that_part_both_are_named() -> None:
    pair = (0, 1)
    states = [
        rank(0, entry(1, 1, members=pair, waiting=True)),
        rank(1, entry(1, 1, members=pair, size=65, waiting=True)),
    ]
    cause = find_cause(states)
    assert cause.ranks == pair
    assert "64 bytes" in cause.reason
    assert "65 bytes" in cause.reason


def test_a_skipped_call_is_seen_by_its_line() -> None:
    """Rank 2 left out the call of line 20, whose size is that of the next one, so the rest is one off."""
    lines = [entry(i, i, site=f"x/a.py:{10 * i} f") for i in (1, 2, 3)]
    stuck = entry(4, 4, site="x/a.py:40 f", waiting=True)
    skipped = [
        entry(1, 1, site="x/a.py:10 f"),
        entry(2, 2, site="x/a.py:30 f"),
        entry(3, 3, site="x/a.py:40 f"),
    ]
    cause = find_cause([rank(0, *lines, stuck), rank(1, *lines, stuck), rank(2, *skipped)])
    assert cause.ranks == (2,)
    assert "The first calls from different lines: rank 2 parted from the others" in cause.reason
    assert (
        "ranks 0, 1 called all_reduce of 64 bytes, number 2 of the tp group (ranks 0-2) at x/a.py:20 f"
        in (cause.reason)
    )


def test_roots_may_call_from_another_line() -> None:
    def call(line: int) -> Entry:
        return entry(1, 1, operation=Operation.broadcast, peer=0, site=f"x/a.py:{line} f")

    states = [rank(0, call(5), WAITING), rank(1, call(9)), rank(2, call(9), WAITING)]
    assert "different lines" not in find_cause(states).reason
    assert find_cause(states).ranks == (1,)


def test_who_left_or_died_is_to_blame_only_if_awaited() -> None:
    for gone in (rank(1, DONE, left=True), rank(1, DONE, alive=False)):
        cause = find_missing([rank(0, DONE, WAITING), gone, rank(2, DONE)])
        assert cause is not None
        assert cause.ranks == (1,)
        assert find_missing([rank(0, DONE), gone, rank(2, DONE)]) is None
        # It has done its part: the wait is for rank 2.
        done = rank(1, DONE, entry(2, 2), left=True)
        assert find_missing([rank(0, DONE, WAITING), done, rank(2, DONE)]) is None


def test_waiting_for_other_nodes_blames_nobody_here() -> None:
    far = entry(2, 2, members=(0, 1, 8, 9), waiting=True)
    cause = find_cause([rank(0, far), rank(1, far)])
    assert cause.ranks == ()
    assert cause.reason == "the ranks of this node wait for ranks 8, 9 on other nodes"


def test_a_circle_of_messages_is_told() -> None:
    states = [
        rank(i, entry(1, 0, operation=Operation.recv, peer=(i + 1) % 3, waiting=True, site=f"x/a.py:{i} f"))
        for i in range(3)
    ]
    cause = find_cause(states)
    assert cause.ranks == (0, 1, 2)
    assert cause.reason.startswith("ranks wait for each other: rank 0 in recv of 64 bytes from rank 1")


def test_waits_of_kernels_have_no_number_in_common() -> None:
    kernel = entry(9, 40, operation=Operation.kernel_reduce, waiting=True)
    late = entry(9, 44, operation=Operation.kernel_reduce, waiting=True)
    cause = find_cause([rank(0, kernel), rank(1, DONE), rank(2, late)])
    assert cause.ranks == (1,)
    assert "did not come to kernel_reduce of 64 bytes, the tp group (ranks 0-2)" in cause.reason


def test_the_report_has_a_line_for_each_rank() -> None:
    states = [
        rank(0, DONE, WAITING),
        rank(1, DONE),
        rank(2, entry(3, 1, gave_up=True)),
        rank(3, DONE, alive=False),
        rank(4, left=True),
        rank(5),
    ]
    title, *lines = format_report(states, NOW, "the job").splitlines()
    assert title == "spmd: where the ranks of the job are:"
    what = "all_reduce of 64 bytes, number {} of the tp group (ranks 0-2)"
    assert [line.removeprefix("spmd:   ") for line in lines] == [
        f"rank 0: in {what.format(2)}, for 48.0 s, at layers/linear.py:10 forward",
        "rank 1: computing, in no collective for 48.0 s; the last was "
        f"{what.format(1)}, at layers/linear.py:10 forward",
        f"rank 2: gave up {what.format(1)} at layers/linear.py:10 forward, 46.0 s ago",
        f"rank 3: dead (process 1003); its last was {what.format(1)} at layers/linear.py:10 forward",
        "rank 4: has left the job",
        "rank 5: in no collective yet",
    ]
