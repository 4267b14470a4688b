"""How replicas share the requests of a run, driven without MPI: counters and a grid of plain objects."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmd.request import Request
from spmd.sampling_params import SamplingParams
from spmd.work_queue import WorkQueue


class Counters:
    def __init__(self) -> None:
        self.values = [0, 0]

    def add(self, number: int, amount: int) -> int:
        before = self.values[number]
        self.values[number] += amount
        return before


def make_queues(costs: list[int], replicas: int) -> list[WorkQueue]:
    """One queue a replica, over the same counters. A request's cost is its prompt tokens and one more."""
    requests = [
        Request(str(i), np.zeros(cost - 1, dtype=np.int64), SamplingParams(), 0, 1, frozenset())
        for i, cost in enumerate(costs)
    ]
    alone: Any = SimpleNamespace(
        dp_size=1, replica=SimpleNamespace(rank=0, broadcast_object=lambda value: value)
    )
    queues = [WorkQueue(requests, alone) for _ in range(replicas)]
    counters: Any = Counters()
    alone.dp_size = replicas
    for queue in queues:
        queue._counters = counters
    return queues


def test_the_first_to_ask_takes_no_more_than_its_part() -> None:
    early, late = make_queues([10] * 64, 2)
    taken = sum(len(early.take(1000)) for _ in range(100))
    assert taken == 32
    taken = sum(len(late.take(1000)) for _ in range(100))
    assert taken == 32


def test_parts_are_counted_in_tokens() -> None:
    early, late = make_queues([100] * 10 + [10] * 100, 2)
    first = sum(len(early.take(1000)) for _ in range(100))
    assert first == 10
    assert sum(len(late.take(1000)) for _ in range(100)) == 100


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_what_is_left_is_started_at_once(replicas: int) -> None:
    queues = make_queues([10] * (replicas + 1), replicas)
    taken = 0
    for _ in range(3):
        taken += sum(len(queue.take(1000)) for queue in queues)
    assert taken == replicas + 1


@pytest.mark.parametrize("seed", range(20))
def test_every_request_runs_once_and_a_faster_replica_does_more(seed: int) -> None:
    random_numbers = random.Random(seed)
    replicas = random_numbers.choice([2, 3, 5])
    costs = [random_numbers.randint(2, 60) for _ in range(random_numbers.randint(1, 200))]
    room = random_numbers.choice([1, 4, 1000])
    speeds = [random_numbers.choice([1, 2, 8]) for _ in range(replicas)]
    queues = make_queues(costs, replicas)
    running: list[list[tuple[str, int]]] = [[] for _ in range(replicas)]
    seen: list[str] = []
    done = [0] * replicas
    for _ in range(100_000):
        for number, queue in enumerate(queues):
            held = running[number]
            for request in queue.take(room - len(held)):
                seen.append(request.request_id)
                held.append((request.request_id, len(request.prompt_token_ids) + 1))
            for _ in range(speeds[number]):  # a token of each running request a turn
                ended = [name for name, left in held if left == 1]
                held[:] = [(name, left - 1) for name, left in held if left > 1]
                queue.finished(ended)
                done[number] += len(ended)
        if all(queue.exhausted for queue in queues) and not any(running):
            break
    assert sorted(map(int, seen)) == list(range(len(costs)))
    assert sum(done) == len(costs)
    if room == 1 and len(costs) > 20 * replicas and max(speeds) >= 8 * min(speeds):
        fastest, slowest = speeds.index(max(speeds)), speeds.index(min(speeds))
        assert done[fastest] > 2 * done[slowest]


def test_a_closed_queue_gives_nothing_on_any_replica() -> None:
    one, other = make_queues([5] * 100, 2)
    assert one.take(4)
    one.close()
    assert not one.take(4)
    assert not other.take(4)
    assert other.exhausted
