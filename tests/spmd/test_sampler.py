"""The sampler against arithmetic, `transformers`, and itself under other shardings."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from spmd import noise
from spmd.comm.errors import UserError
from spmd.comm.group import make_group
from spmd.comm.partition import Partition
from spmd.draw import draw_all
from spmd.filters import find_cutoffs
from spmd.logits import adjust_, ordered_top
from spmd.sampler import Sampled, Sampler, SampleRow
from spmd.sampling_params import SamplingParams

P_MIN = 1e-3  # smallest chi-square p-value that passes


class ThreadGroup:
    """Threads of this process as the ranks of a group: any number of shards in a plain test."""

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.slots, self.barrier = rank, size, slots, barrier
        self.calls = 0

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> torch.Tensor:
        assert x.shape[dim] == sizes[self.rank]
        self.calls += 1
        self.slots[self.rank] = x.clone()
        self.barrier.wait()
        result = torch.cat(list(self.slots), dim=dim)
        self.barrier.wait()
        return result


def on_shards(vocab: Partition, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """`work(group)` on one thread per part of `vocab`; raises what rank 0 raised."""
    size = vocab.parts
    slots: list[Any] = [None] * size
    results: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, slots, barrier))
        except Exception as error:
            results[rank] = error
            if not isinstance(error, (RuntimeError, UserError)) or isinstance(
                error, threading.BrokenBarrierError
            ):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def sample(
    logits: torch.Tensor, rows: list[SampleRow], bounds: Sequence[int] | None = None, **options: Any
) -> list[Sampled]:
    """Sample on shards cut at `bounds` (default one rank), check that all ranks agree, return the answer."""
    vocab = Partition(tuple(bounds or (0, logits.shape[1])))
    before = logits.clone()

    def work(group: ThreadGroup) -> list[Sampled]:
        local = logits[:, vocab.start(group.rank) : vocab.stop(group.rank)]
        return Sampler(vocab, group, **options)(local, rows)  # type: ignore[arg-type]

    results = on_shards(vocab, work)
    assert torch.equal(before, logits) or before.isnan().any()
    for result in results:
        assert type(result) is type(results[0])
        if isinstance(result, Exception):
            assert str(result) == str(results[0])
        else:
            assert result == results[0]
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def row(seed: int = 0, position: int = 0, prompt: Any = (), output: Any = (), **options: Any) -> SampleRow:
    banned = options.pop("banned", ())
    return SampleRow(SamplingParams(**options), seed, position, prompt, output, banned)


def ids(result: list[Sampled]) -> list[int]:
    return [item.token_id for item in result]


def kept(logits: torch.Tensor, bounds: Sequence[int] | None = None, **options: Any) -> list[int]:
    """The ids that the filters keep of one row."""
    vocab = Partition(tuple(bounds or (0, logits.shape[0])))

    def work(group: ThreadGroup) -> Any:
        local = logits[None, vocab.start(group.rank) : vocab.stop(group.rank)]
        return find_cutoffs(local, [SamplingParams(**options)], vocab, group)[0]  # type: ignore[arg-type]

    results = on_shards(vocab, work)
    assert all(result == results[0] for result in results), results
    cut = results[0]
    values = logits.float()
    inside = (values > cut.logit) | ((values == cut.logit) & (torch.arange(len(values)) <= cut.token_id))
    return inside.nonzero().flatten().tolist()


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of the chi-square distribution, by its regularised incomplete gamma function."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))


FOUR = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


@pytest.mark.parametrize("bounds", [(0, 4), (0, 1, 4), (0, 0, 2, 3, 4)])
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"top_p": 0.8}, 2),
        ({"top_p": 0.8, "temperature": 2.0}, 3),
        ({"top_p": 0.8, "temperature": 0.5}, 2),
        ({"min_p": 0.2}, 3),
        ({"min_p": 0.2, "temperature": 2.0}, 4),
        ({"min_p": 0.2, "temperature": 0.5}, 2),
        ({"top_p": 0.5}, 1),
        ({"top_p": 1e-9}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 3, "top_p": 0.8}, 2),
        ({"top_k": 2, "top_p": 0.6}, 1),
        ({"top_k": 9, "min_p": 1.0}, 1),
    ],
)
def test_kept_counts(options: dict[str, float], count: int, bounds: tuple[int, ...]) -> None:
    assert kept(FOUR, bounds, **options) == list(range(count))


def test_top_k_keeps_ties_with_the_kth() -> None:
    assert kept(torch.tensor([1.0, 1.0, 0.5]), top_k=1) == [0, 1]
    assert kept(torch.tensor([1.0, 0.5, 1.0]), (0, 1, 3), top_k=1) == [0, 2]
    assert kept(torch.tensor([1.0, 0.5, 1.0, 1.0, 0.5]), (0, 2, 5), top_k=4) == [0, 1, 2, 3, 4]


def test_top_p_takes_the_lowest_ids_of_equals() -> None:
    assert kept(torch.zeros(10), (0, 3, 10), top_p=0.45) == [0, 1, 2, 3, 4]
    assert kept(torch.zeros(10), (0, 3, 10), top_p=0.5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bounds", [(0, 1000), (0, 10, 10, 700, 1000)])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
def test_wide_top_p_sets_are_exact(scale: float, bounds: tuple[int, ...]) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * scale
    order = sorted(range(1000), key=lambda i: (-logits[i].item(), i))
    mass = logits.double().softmax(-1)[order].cumsum(-1)
    for top_p in (0.3, 0.61, 0.95, 0.9999):
        count = int((mass < top_p * (1 - 1e-9)).sum()) + 1
        assert kept(logits, bounds, top_p=top_p) == sorted(order[:count])


def test_top_k_then_top_p_with_more_ties_than_candidates() -> None:
    logits = torch.cat([torch.tensor([5.0]), torch.zeros(600)])
    total = math.exp(5.0) + 600
    count = math.ceil((0.9 * total - math.exp(5.0)) / 1.0)
    assert kept(logits, (0, 400, 601), top_k=2, top_p=0.9) == list(range(count + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trial", range(12))
def test_filters_keep_what_transformers_keeps(trial: int, dtype: torch.dtype) -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = torch.Generator().manual_seed(trial)
    rng = np.random.default_rng(trial)
    size = int(rng.integers(5, 600))
    # bfloat16 values without repeats: among equals at the edge of a top-p set the choice is free
    values = torch.linspace(-6, 6, size)[torch.randperm(size, generator=generator)]
    if dtype == torch.float32:
        values = torch.randn(size, generator=generator) * 3
    else:
        values = values.to(dtype).unique()
        values = values[torch.randperm(len(values), generator=generator)]
    size = len(values)
    temperature = float(rng.choice([0.5, 1.0, 1.7]))
    for top_k in (0, 1, 7, 10_000):
        for top_p in (1.0, 0.97, 0.6, 0.05):
            for min_p in (0.0, 0.05, 0.4):
                warped = TemperatureLogitsWarper(temperature)(None, values.float()[None])
                if top_k:
                    warped = TopKLogitsWarper(top_k)(None, warped)
                if top_p < 1:
                    warped = TopPLogitsWarper(top_p)(None, warped)
                if min_p:
                    warped = MinPLogitsWarper(min_p)(None, warped)
                expected = (warped[0] > -torch.inf).nonzero().flatten().tolist()
                found = kept(
                    values,
                    (0, size // 3, size // 3, size),
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                )
                assert found == expected, (top_k, top_p, min_p)


@pytest.mark.parametrize("bounds", [(0, 4), (0, 2, 4)])
def test_penalties_by_hand(bounds: tuple[int, ...]) -> None:
    logits = torch.tensor([2.0, -1.0, 1.0, 0.5])

    def adjusted(item: SampleRow) -> list[float]:
        whole = logits.clone()
        for start, stop in itertools.pairwise(bounds):
            adjust_(whole[start:stop], item, start)
        return whole.tolist()

    assert adjusted(row(prompt=[0, 0], output=[1], repetition_penalty=2.0)) == [1.0, -2.0, 1.0, 0.5]
    both = adjusted(row(prompt=[0], output=[2, 2], presence_penalty=0.5, frequency_penalty=0.3))
    assert both == pytest.approx([2.0, -1.0, -0.1, 0.5], abs=1e-6)
    # bias first, then repetition, then the OpenAI penalties, then bans
    mixed = row(
        prompt=np.array([0]),
        output=np.array([3]),
        logit_bias={3: 1.5, 1: -100},
        repetition_penalty=2.0,
        presence_penalty=1.0,
        banned=[2],
    )
    assert adjusted(mixed) == [1.0, -math.inf, -math.inf, 0.0]


def test_repetition_penalty_equals_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator)
    seen = torch.randint(0, 50, (40,), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(seen[None], logits[None])[0]
    adjust_(logits, row(prompt=seen[:30].tolist(), output=seen[30:].numpy(), repetition_penalty=1.3), 0)
    assert torch.equal(logits, expected)


def test_greedy_is_argmax_with_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [1.0] * 5, [-9.0, -8.0, -7.0, -6.0, -5.0]])
    for bounds in ((0, 5), (0, 1, 1, 3, 5), (0, 3, 5), (0, 0, 5), (0, 5, 5)):
        assert ids(sample(logits, [row(temperature=0.0)] * 3, bounds)) == [1, 0, 4]


def test_greedy_follows_penalties_bias_and_bans() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).repeat(4, 1)
    rows = [
        row(temperature=0.0, prompt=[0], repetition_penalty=2.0),
        row(temperature=0.0, output=[0, 0, 1], presence_penalty=1.0, frequency_penalty=1.0),
        row(temperature=0.0, logit_bias={3: 100.0}),
        row(temperature=0.0, logit_bias={0: -100.0}, banned=[1]),
    ]
    assert ids(sample(logits, rows, (0, 1, 4))) == [1, 2, 3, 2]


def test_bias_forces_and_forbids_in_any_shard() -> None:
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1)) * 3
    for token_id in (0, 19, 20, 39):
        forced = [row(seed=i, logit_bias={token_id: 100.0}) for i in range(64)]
        assert ids(sample(logits, forced, (0, 20, 40))) == [token_id] * 64
        forbidden = [row(seed=i, logit_bias={token_id: -100.0}) for i in range(64)]
        raised = logits.clone()
        raised[:, token_id] = 50.0
        assert token_id not in ids(sample(raised, forbidden, (0, 20, 40)))


def test_tiny_temperature_in_half_precision_leaves_neighbours_alone() -> None:
    logits = torch.tensor([[11.0625, 2.9], [1.0, 2.0], [0.5, 0.4]], dtype=torch.float16)
    rows = [row(seed=5), row(temperature=1e-5), row(seed=6, temperature=0.7)]
    order = [1, 0, 2]
    result = ids(sample(logits[order], rows))
    assert result[1] == 0
    assert result[0] == ids(sample(logits[1:2], rows[:1]))[0]
    assert result[2] == ids(sample(logits[2:3], rows[2:]))[0]
    for temperature in (1e-5, 1e-45, 1e-300, 5e-324):
        assert ids(sample(logits, [row(seed=i, temperature=temperature) for i in range(3)], (0, 1, 2))) == [
            0,
            1,
            0,
        ]
        filtered = [row(seed=i, temperature=temperature, top_p=0.9, min_p=0.1) for i in range(3)]
        assert ids(sample(logits, filtered, (0, 1, 2))) == [0, 1, 0]


def test_huge_temperature_is_uniform() -> None:
    logits = torch.tensor([[80.0, 0.0, -80.0, 3.0]]).repeat(4000, 1)
    drawn = ids(sample(logits, [row(seed=i, temperature=1e308) for i in range(4000)], (0, 2, 4)))
    assert chi_square_p(np.bincount(drawn, minlength=4), np.full(4, 1000.0)) > P_MIN


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_softmax(vary: str) -> None:
    draws = 20_000
    logits = torch.randn(30, generator=torch.Generator().manual_seed(2)) * 1.5
    rows = [row(**{vary: i}) for i in range(draws)]
    drawn = ids(sample(logits.expand(draws, -1), rows, (0, 11, 30)))
    expected = logits.double().softmax(-1).numpy() * draws
    assert chi_square_p(np.bincount(drawn, minlength=30), expected) > P_MIN


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_filtered_softmax(vary: str) -> None:
    draws = 20_000
    rows = [row(**{vary: i}, temperature=2.0, top_p=0.8) for i in range(draws)]
    counts = np.bincount(ids(sample(FOUR.expand(draws, -1), rows, (0, 1, 4))), minlength=4)
    assert counts[3] == 0
    kept_three = (FOUR.double() / 2)[:3].softmax(-1).numpy()
    assert chi_square_p(counts[:3], kept_three * draws) > P_MIN


def mixed_rows(count: int) -> list[SampleRow]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.8},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 0.9, "top_k": 9, "temperature": 1.4},
        {"min_p": 0.1, "logprobs": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 0},
        {"logit_bias": {3: 2.5, 90: -100.0}, "temperature": 2.0, "banned": [1, 2]},
        {"temperature": 0.0, "logprobs": 6},
    ]
    return [
        row(
            seed=1000 + i,
            position=i % 7,
            prompt=[i % 5, 50, 99],
            output=[7] * (i % 3),
            **kinds[i % len(kinds)],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_sharding_gives_the_same_answer(dtype: torch.dtype) -> None:
    logits = (torch.randn(60, 101, generator=torch.Generator().manual_seed(4)) * 2).to(dtype)
    rows = mixed_rows(60)
    whole = sample(logits, rows, sampleable=97)
    for bounds in (
        (0, 50, 101),
        (0, 7, 7, 101),
        (0, 1, 98, 101),
        (0, 21, 41, 61, 81, 101),
        (0, 99, 100, 101),
    ):
        sharded = sample(logits, rows, bounds, sampleable=97)
        assert ids(sharded) == ids(whole)
        for one, other in zip(sharded, whole):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
            assert [i for i, _ in one.top] == [i for i, _ in other.top]


def test_neighbours_and_order_change_nothing() -> None:
    logits = torch.randn(60, 101, generator=torch.Generator().manual_seed(5)) * 2
    rows = mixed_rows(60)
    together = ids(sample(logits, rows))
    order = np.random.default_rng(0).permutation(60)
    assert ids(sample(logits[order], [rows[i] for i in order])) == [together[i] for i in order]
    assert [ids(sample(logits[i : i + 1], rows[i : i + 1]))[0] for i in range(60)] == together
    assert ids(sample(logits, rows)) == together


def test_seed_and_position_choose_the_draw() -> None:
    logits = torch.zeros(64, 500)
    by_seed = [ids(sample(logits, [row(seed=s, position=p) for p in range(64)])) for s in (42, 42, 43)]
    assert by_seed[0] == by_seed[1]
    assert sum(a == b for a, b in zip(by_seed[0], by_seed[2])) < 5
    assert len(set(by_seed[0])) > 48
    for seed in (-1, -(2**63), 2**63, 2**64 - 1):
        assert len(set(ids(sample(logits[:8], [row(seed=seed, position=p) for p in range(8)])))) > 5


def test_ids_without_text_are_never_sampled_or_reported() -> None:
    logits = torch.full((40, 144), -60.0)
    logits[:, 130:] = 60.0
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 140},
        {"top_p": 0.99},
        {"min_p": 0.5},
    ]
    rows = [row(seed=i, logprobs=144, **options[i % 5]) for i in range(40)]
    for bounds in ((0, 144), (0, 36, 72, 108, 144), (0, 130, 144), (0, 140, 144)):
        for item in sample(logits, rows, bounds, sampleable=130):
            assert item.token_id < 130
            assert sorted(i for i, _ in item.top) == list(range(130))


@pytest.mark.parametrize("vocab", [130, 131])
def test_logprobs_equal_log_softmax_of_the_raw_logits(vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(6)) * 3 - 70
    reference = logits.double().log_softmax(-1)
    rows = [
        row(
            seed=i,
            logprobs=k,
            temperature=0.5,
            top_k=3,
            logit_bias={2: -100.0},
            prompt=[1],
            repetition_penalty=2.0,
        )
        for i, k in enumerate([0, 1, 5, vocab, 20, 3])
    ]
    for bounds in ((0, vocab), (0, 33, 66, 98, vocab), (0, 2, 2, vocab)):
        for i, item in enumerate(sample(logits, rows, bounds)):
            k = rows[i].params.logprobs
            assert item.logprob == pytest.approx(reference[i, item.token_id].item(), abs=1e-9)
            best = reference[i].topk(k or 0)
            assert [j for j, _ in item.top] == best.indices.tolist()
            assert [v for _, v in item.top] == pytest.approx(best.values.tolist(), abs=1e-9)
    assert sum(math.exp(v) for _, v in sample(logits, rows, (0, 100, vocab))[3].top) == pytest.approx(1.0)


def test_rows_without_logprobs_report_none() -> None:
    result = sample(torch.randn(2, 9), [row(), row(logprobs=2)], (0, 4, 9))
    assert result[0].logprob is None
    assert result[0].top == ()
    assert len(result[1].top) == 2


def test_score_of_given_tokens() -> None:
    logits = torch.randn(5, 23, generator=torch.Generator().manual_seed(7)) * 3
    targets = [0, 22, 11, 12, 5]
    reference = logits.double().log_softmax(-1)
    vocab = Partition((0, 12, 12, 23))

    def work(group: ThreadGroup) -> list[Sampled]:
        local = logits[:, vocab.start(group.rank) : vocab.stop(group.rank)]
        return Sampler(vocab, group, 20).score(local, targets, top=4)  # type: ignore[arg-type]

    for result in on_shards(vocab, work):
        assert ids(result) == targets
        for i, item in enumerate(result):
            assert item.logprob == pytest.approx(reference[i, targets[i]].item(), abs=1e-9)
            assert [j for j, _ in item.top] == reference[i, :20].topk(4).indices.tolist()


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinity")])
def test_broken_logits_are_refused_by_row(kind: dict[str, float], value: float, word: str) -> None:
    logits = torch.randn(3, 10)
    logits[1, 8] = value
    with pytest.raises(RuntimeError, match=rf"row 1 .*{word}"):
        sample(logits, [row(**kind)] * 3, (0, 5, 10))
    logits[1] = -math.inf
    with pytest.raises(RuntimeError, match=r"row 1 .*no finite number"):
        sample(logits, [row(**kind)] * 3, (0, 5, 10))


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"logprobs": 2}])
def test_a_row_that_forbids_every_token_is_a_user_error(kind: dict[str, Any]) -> None:
    rows = [row(**kind), row(**kind, logit_bias=dict.fromkeys(range(5), -100.0), banned=[5, 6, 7])]
    with pytest.raises(UserError, match="row 1"):
        sample(torch.randn(2, 8), rows, (0, 3, 8))
    rows[1] = row(**kind, logit_bias=dict.fromkeys(range(5), -100.0), banned=[5, 7])
    assert ids(sample(torch.randn(2, 8), rows, (0, 3, 8)))[1] == 6


def test_wrong_shapes_are_refused_and_no_rows_need_no_messages() -> None:
    sampler = Sampler(Partition((0, 6)), make_group(MPI.COMM_SELF))
    with pytest.raises(ValueError, match=r"expected \(2, 6\)"):
        sampler(torch.zeros(2, 5), [row(), row()])
    assert sampler(torch.zeros(0, 6), []) == []
    assert sampler(torch.eye(6), [row(temperature=0.0)] * 6) == [Sampled(i) for i in range(6)]


def test_collectives_per_call_do_not_grow_with_the_batch() -> None:
    vocab = Partition((0, 40, 101))
    logits = torch.randn(60, 101) * 4

    def calls(rows: list[SampleRow]) -> int:
        def work(group: ThreadGroup) -> int:
            local = logits[: len(rows), vocab.start(group.rank) : vocab.stop(group.rank)]
            Sampler(vocab, group)(local, rows)  # type: ignore[arg-type]
            return group.calls

        return max(on_shards(vocab, work))

    assert calls([row(temperature=0.0)] * 60) == 1
    assert calls([row(logprobs=3)] * 60) == 1
    assert calls(mixed_rows(60)) == 2


def test_ordered_top_breaks_ties_by_id() -> None:
    values, token_ids = ordered_top(torch.tensor([[0.0, 2.0, -0.0, 2.0, -1.5, -torch.inf]]), 8, start=10)
    assert values[0].tolist() == [2.0, 2.0, 0.0, 0.0, -1.5, -math.inf, -math.inf, -math.inf]
    assert token_ids[0].tolist() == [11, 13, 10, 12, 14, 15, -1, -1]


def squares64_of_the_paper(counter: int, key: int) -> int:
    mask = (1 << 64) - 1

    def swap(x: int) -> int:
        return (x >> 32) | ((x << 32) & mask)

    x = y = counter * key & mask
    z = (y + key) & mask
    x = swap((x * x + y) & mask)
    x = swap((x * x + z) & mask)
    x = swap((x * x + y) & mask)
    t = (x * x + z) & mask
    x = swap(t)
    return t ^ (((x * x + y) & mask) >> 32)


def test_squares_is_the_papers_function() -> None:
    rng = np.random.default_rng(0)
    counters = [0, 1, 2, 2**32, 2**63 - 1] + rng.integers(0, 2**62, 50).tolist()
    keys = noise.stream_keys(range(len(counters)), [3] * len(counters))
    expected = [squares64_of_the_paper(c, k % 2**64) for c, k in zip(counters, keys.tolist())]
    ours = noise.squares64(torch.tensor(counters), keys)
    assert [value % 2**64 for value in ours.tolist()] == expected


def test_noise_is_uniform_and_independent() -> None:
    size = 1 << 16
    counters = torch.arange(1, size + 1)
    streams = {
        (seed, position): noise.uniform(counters, noise.stream_keys([seed], [position]))
        for seed in (0, 1, 2**40)
        for position in (0, 1, 2)
    }
    across = noise.uniform(torch.tensor([1]), noise.stream_keys([9] * size, range(size)))
    for values in [*streams.values(), across]:
        assert values.min() > 0
        assert values.max() < 1
        counts = torch.histc(values, 64, 0, 1).numpy()
        assert chi_square_p(counts, np.full(64, size / 64)) > P_MIN / 10
        low_bits = (values * 2**44).long() % 64
        assert chi_square_p(np.bincount(low_bits, minlength=64), np.full(64, size / 64)) > P_MIN / 10
        assert abs(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]) < 5 / math.sqrt(size)
    table = torch.corrcoef(torch.stack(list(streams.values())))
    assert (table - torch.eye(len(streams))).abs().max() < 5 / math.sqrt(size)


def test_gumbel_noise_has_its_mean_and_variance() -> None:
    values = noise.gumbel(torch.arange(1, 200_001), noise.stream_keys([3], [0]))
    assert values.mean().item() == pytest.approx(0.5772157, abs=0.02)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)


def test_draws_in_tiles_equal_the_formula() -> None:
    """Columns and rows that need several tiles, against the formula over all columns at once."""
    generator = torch.Generator().manual_seed(8)
    for columns, spread in ((3, 1.0), (700, 8.0), (40_000, 3.0)):
        logits = torch.randn(12, columns, generator=generator) * spread
        logits[3, : columns // 2] = -torch.inf
        logits[4, 1:] -= 500.0
        temperatures = torch.tensor([1.0, 0.1, 5.0, 1.0, 1.0, 1e-4] * 2, dtype=torch.float64)
        keys = noise.stream_keys(range(12), [0] * 12)
        best = logits.amax(-1).double()
        found = draw_all(logits, best, temperatures, keys, 1000)
        gumbels = noise.gumbel(torch.arange(1001, 1001 + columns), keys[:, None])
        scores = (logits.double() - best[:, None]) / temperatures[:, None] + gumbels
        assert found[:, 2].long().tolist() == (scores.argmax(-1) + 1000).tolist()


def test_a_rare_token_is_drawn_as_rarely_as_it_should_be() -> None:
    """Noise of 32 bits or float32 would cut the tail."""
    draws, p = 40_000, 1e-3
    logits = torch.tensor([[math.log(p), math.log(1 - p)]]).expand(draws, -1)
    drawn = Counter(ids(sample(logits, [row(seed=1, position=i) for i in range(draws)])))
    assert abs(drawn[0] - draws * p) < 4 * math.sqrt(draws * p)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"logprobs": 51},
        *({"logit_bias": {token_id: 1.0}} for token_id in (-1, 50, 2**31, "abc", True)),
        *({"stop_token_ids": (token_id,)} for token_id in (-1, 50, 2**31, "abc")),
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {3: 100.5}},
        {"logit_bias": {3: 10**400}},
        {"logit_bias": [3]},
        {"temperature": 10**400},
        {"temperature": math.inf},
        {"stop_token_ids": 3},
        {"stop": "END"},
        {"stop": ("",)},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingParams(**wrong).validate(50)


def test_options_in_range_are_accepted() -> None:
    SamplingParams(logit_bias={0: 100, 49: -100}, stop_token_ids=(0, 49), logprobs=50, top_p=1e-9).validate(
        50
    )
