"""Scheduler, block pool and prefix cache, driven without a model through thousands of steps.

The stand-in for a model writes into each cache slot the exact prefix whose key and value would be there, and
checks before every chunk that the slots it would read hold the right prefixes. Its next token is a hash of
the prefix, so any leak, alias, stale or lost block changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from spmd.block_pool import BLOCK_SIZE, BlockPool, block_key, blocks_for, slots_of
from spmd.request import Request, Sequence
from spmd.sampling_params import SamplingParams
from spmd.scheduler import Chunk, Scheduler

VOCAB = 50


def make_sequence(
    name: str, prompt: list[int], max_tokens: int, prompt_logprobs: int | None = None
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    ids = np.asarray(prompt, dtype=np.int64)
    return Sequence(Request(name, ids, params, 0, max_tokens, frozenset()), 0, 0)


def next_token(prefix: tuple[int, ...]) -> int:
    return sha256(repr(prefix).encode()).digest()[0] % VOCAB


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


class FakeModel:
    """Keys and values are the prefixes themselves."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, ...]] = {}

    def run(self, chunks: list[Chunk]) -> list[tuple[Sequence, int]]:
        sampled = []
        for chunk in chunks:
            sequence = chunk.sequence
            tokens = tuple(sequence.token_ids(0, sequence.num_tokens).tolist())
            slots = slots_of(sequence.blocks, 0, chunk.stop).tolist()
            for position in range(chunk.start):
                assert self.slots.get(slots[position]) == tokens[: position + 1], "a stale block is read"
            for position in range(chunk.start, chunk.stop):
                self.slots[slots[position]] = tokens[: position + 1]
            if chunk.samples:
                sampled.append((sequence, next_token(tokens)))
        return sampled


def drive(
    scheduler: Scheduler, arrivals: list[tuple[int, Sequence]], limit: int, model: FakeModel | None = None
) -> int:
    """Run until all sequences are done, as the engine does, checking everything after each step."""
    model = model or FakeModel()
    lanes = len(scheduler.running)
    flights: list[tuple[list[Chunk], list[tuple[Sequence, int]]] | None] = [None] * lanes
    pending = sorted(arrivals, key=lambda item: item[0])
    for step in range(limit):
        while pending and pending[0][0] <= step:
            scheduler.add(pending.pop(0)[1])
        lane = step % lanes
        flight, flights[lane] = flights[lane], None
        if flight is not None:
            chunks, sampled = flight
            scheduler.computed(chunks)
            for sequence, token in sampled:
                sequence.append(token, None)
            scheduler.release_finished(lane)
        chunks = scheduler.schedule(lane)
        assert sum(chunk.stop - chunk.start for chunk in chunks) <= scheduler.max_batch_tokens
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        assert all(chunk.stop > chunk.start for chunk in chunks)
        widths = [chunk.stop - chunk.start > 1 for chunk in chunks]
        assert widths == sorted(widths)
        if chunks:
            flights[lane] = (chunks, model.run(chunks))
        scheduler.check()
        if not pending and not scheduler.num_unfinished:
            return step
    raise AssertionError(f"not done after {limit} steps: somebody starves")


@dataclass
class Load:
    prompts: list[list[int]]
    max_tokens: list[int]
    arrivals: list[int]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    # Few distinct tokens and shared beginnings, so that prefixes really meet.
    stem = draw(st.lists(st.integers(0, 2), min_size=0, max_size=70))
    count = draw(st.integers(1, 10))
    prompts = []
    for _ in range(count):
        cut = draw(st.integers(0, len(stem)))
        tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
        prompts.append(stem[:cut] + tail)
    return Load(
        prompts,
        draw(st.lists(st.integers(1, 40), min_size=count, max_size=count)),
        draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)),
    )


@settings(max_examples=150, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    load=loads(),
    lanes=st.integers(1, 4),
    budget=st.sampled_from([1, 7, 16, 64, 512]),
    running=st.integers(1, 8),
    spare=st.integers(0, 30),
    caching=st.booleans(),
)
def test_any_load_gives_every_sequence_its_own_tokens(
    load: Load, lanes: int, budget: int, running: int, spare: int, caching: bool
) -> None:
    largest = max(blocks_for(len(p) + m) for p, m in zip(load.prompts, load.max_tokens))
    pool = BlockPool(largest + spare, caching)
    scheduler = Scheduler(pool, lanes, budget, running)
    sequences = [
        make_sequence(str(i), prompt, count)
        for i, (prompt, count) in enumerate(zip(load.prompts, load.max_tokens))
    ]
    steps = drive(scheduler, list(zip(load.arrivals, sequences)), limit=60_000)
    note(f"{steps} steps, {scheduler.num_preemptions} preemptions, {pool.cached_tokens} cached tokens")
    for sequence, prompt, count in zip(sequences, load.prompts, load.max_tokens):
        assert sequence.output_ids == expected_output(prompt, count)
        assert sequence.finish_reason == "length"
    assert pool.num_free == pool.num_blocks


def test_a_small_pool_preempts_and_the_output_shows_nothing() -> None:
    """C33 without a model: 12 blocks of 16 for 6 sequences of 40 + 60 tokens."""
    scheduler = Scheduler(BlockPool(12), 1, 512, 64)
    prompts = [[i] * 40 for i in range(6)]
    sequences = [make_sequence(str(i), prompt, 60) for i, prompt in enumerate(prompts)]
    drive(scheduler, [(0, s) for s in sequences], limit=5000)
    assert scheduler.num_preemptions > 0
    for sequence, prompt in zip(sequences, prompts):
        assert sequence.output_ids == expected_output(prompt, 60)


def test_whole_prompt_cached_still_runs_its_last_token() -> None:
    """C34: prompts of 1, 15, 16, 17, 32, 48 tokens, three times each, then with one more."""
    for length in (1, 15, 16, 17, 32, 48):
        scheduler, model = Scheduler(BlockPool(64), 1, 512, 64), FakeModel()
        prompt = [7 + i % 11 for i in range(length)]
        for round_, ids in enumerate([prompt, prompt, prompt, [*prompt, 3]]):
            sequence = make_sequence("a", ids, 5)
            drive(scheduler, [(0, sequence)], 100, model)
            assert sequence.output_ids == expected_output(ids, 5)
            expected = 0 if round_ == 0 else (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert sequence.cached_tokens == expected
            assert sequence.cached_tokens <= len(ids) - 1


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    prompt = [i % VOCAB for i in range(100)]
    pool = BlockPool(256)
    scheduler = Scheduler(pool, 1, 2048, 64)
    sequences = [make_sequence(str(i), prompt, 4) for i in range(8)]
    drive(scheduler, [(0, s) for s in sequences], limit=100)
    assert [s.cached_tokens for s in sequences] == [0] + [96] * 7
    assert pool.cached_tokens == 7 * 96


def test_requests_for_prompt_logprobs_never_skip_tokens() -> None:
    prompt = [i % VOCAB for i in range(100)]
    scheduler = Scheduler(BlockPool(256), 1, 2048, 64)
    first, second = make_sequence("a", prompt, 2), make_sequence("b", prompt, 2, prompt_logprobs=0)
    drive(scheduler, [(0, first), (50, second)], limit=100)
    assert second.cached_tokens == 0


def test_what_can_never_fit_is_refused_at_entry() -> None:
    scheduler = Scheduler(BlockPool(4), 1, 512, 8)
    with pytest.raises(ValueError, match="65 tokens can never fit in 4 cache blocks"):
        scheduler.add(make_sequence("a", [1] * 5, 60))
    scheduler.add(make_sequence("b", [1] * 4, 60))


def test_keys_depend_on_every_token_before() -> None:
    blocks = [np.arange(16), np.arange(16, 32)]
    first = block_key(b"", blocks[0])
    assert block_key(first, blocks[1]) != block_key(b"", blocks[1])
    assert block_key(first, blocks[1]) != block_key(block_key(b"", blocks[0] + 1), blocks[1])
    assert block_key(b"", blocks[0]) == first


def test_least_recently_used_blocks_are_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    keys = [bytes([i]) for i in range(6)]
    old = pool.allocate(2)
    for block, key in zip(old, keys):
        pool.publish(block, key)
    new = pool.allocate(2)
    for block, key in zip(new, keys[2:]):
        pool.publish(block, key)
    pool.release(old)
    pool.release(new)
    assert pool.num_free == 4
    pool.allocate(1)
    assert pool.find(keys[:2]) == old[:1]  # the tail of the older sequence went
    pool.allocate(1)
    assert pool.find(keys[:2]) == []
    assert pool.find(keys[2:4]) == new


def test_check_finds_a_lost_and_a_twice_held_block() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(AssertionError, match="1 references, held by 0"):
        pool.check([blocks[:1]])
    with pytest.raises(AssertionError, match="1 references, held by 2"):
        pool.check([blocks, blocks[:1]])
