"""The serving core through the real engine: prefix cache, chunks, interleaving, replicas, scores, aborts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI
from support.models import (
    Reference,
    assert_greedy,
    assert_logits,
    build,
    on_rank_zero,
    random_ids,
    reference_of,
    running,
    same_everywhere,
)

from spmd.comm.errors import UserError
from spmd.llm import LLM
from spmd.outputs import RequestOutput
from spmd.sampling_params import SamplingParams

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD.size
AXES = ["tp", "pp"] if WORLD > 1 else ["tp"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# C34: lengths around one, two and three blocks of 16, then one more token.
LENGTHS = (1, 15, 16, 17, 32, 48, 33, 100, 128 - 9)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny Llama with logits and greedy ids for prompts that all begin alike."""

    def make() -> Reference:
        folder = tmp_path_factory.mktemp("serving")
        model = build(folder, num_hidden_layers=max(8, WORLD))
        return reference_of(model, folder, [random_ids(120)[:length] for length in LENGTHS], 8)

    return on_rank_zero(make)


@pytest.fixture(scope="module", params=AXES)
def llm(request: pytest.FixtureRequest, reference: Reference) -> Iterator[LLM]:
    with running(reference.path, **{request.param: WORLD}) as llm:
        yield llm


def check_idle(llm: LLM) -> None:
    llm.engine.scheduler.check()
    pool = llm.engine.scheduler.pool
    assert not llm.engine.has_work
    assert pool.num_held == 0


def check_greedy(outputs: list[RequestOutput], reference: Reference) -> None:
    for output, expected in zip(outputs, reference.greedy):
        assert_greedy(output.outputs[0].token_ids, expected)


def test_prefix_cache_changes_nothing_but_the_work(llm: LLM, reference: Reference) -> None:
    pool = llm.engine.scheduler.pool
    for round_ in range(3):
        before = pool.cached_tokens
        outputs = llm.generate(reference.ids, GREEDY)
        check_greedy(outputs, reference)
        check_idle(llm)
        for output in outputs:
            assert output.cached_tokens <= len(output.prompt_token_ids) - 1
            if round_:
                assert output.cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16
        assert pool.cached_tokens - before == sum(output.cached_tokens for output in outputs)
        assert same_everywhere(outputs)


def test_penalties_and_logprobs_with_the_prefix_cached(llm: LLM, reference: Reference) -> None:
    prompts = [reference.ids[-1], reference.ids[5]]
    params = replace(
        GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, logprobs=2, seed=5
    )
    sampled = replace(params, temperature=0.8)
    for options in (params, sampled):
        cold = llm.generate([random_ids(50, seed=77), *prompts], options)[1:]
        warm = llm.generate(prompts, options)
        for a, b in zip(cold, warm):
            assert b.cached_tokens > 0
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
            found = [entry.logprob for entry in b.outputs[0].logprobs or []]
            assert found == pytest.approx([entry.logprob for entry in a.outputs[0].logprobs or []], abs=1e-3)


def assert_prompt_scores(output: RequestOutput, logits: np.ndarray, top: int) -> None:
    """C31: teacher-forced log-softmax; the first entry is null."""
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    scores = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.token_id == output.prompt_token_ids[position]
        assert entry.logprob == pytest.approx(scores[position - 1, entry.token_id], abs=1e-3)
        best = np.sort(scores[position - 1])[::-1][:top]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-3)


def test_prompt_logprobs_whatever_is_cached(llm: LLM, reference: Reference) -> None:
    params = replace(GREEDY, prompt_logprobs=2)
    for _ in range(3):
        outputs = llm.generate(reference.ids, params)
        check_greedy(outputs, reference)
        for output, logits in zip(outputs, reference.logits):
            assert_prompt_scores(output, logits, 2)
    check_idle(llm)


def test_scoring_alone_generates_nothing(llm: LLM, reference: Reference) -> None:
    """C37: max_tokens 0 with the prompt's scores."""
    outputs = llm.generate(reference.ids, replace(GREEDY, max_tokens=0, prompt_logprobs=1))
    for output, logits in zip(outputs, reference.logits):
        assert output.completion_tokens == 0
        assert output.outputs[0].finish_reason == "length"
        assert_prompt_scores(output, logits, 1)
    check_idle(llm)


def test_several_answers_share_the_prompt(llm: LLM, reference: Reference) -> None:
    pool = llm.engine.scheduler.pool
    prompt = random_ids(60, seed=9)
    before = pool.cached_tokens
    params = replace(GREEDY, n=4, temperature=1.0, seed=3, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params)
    assert pool.cached_tokens - before == 3 * 48
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    (again,) = llm.generate([prompt], params)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
    check_idle(llm)


def test_abort_frees_the_blocks_within_a_step(llm: LLM) -> None:
    """Driven step by step, as a server would, on all ranks alike."""
    engine, pool = llm.engine, llm.engine.scheduler.pool
    long = replace(GREEDY, max_tokens=60)

    def requests() -> list[object]:
        assert llm.frontend is not None
        return [
            llm.frontend.from_ids(name, random_ids(40, seed=seed), long) for seed, name in enumerate("ab")
        ]

    made = llm._from_root(requests)
    for request in made:
        engine.add(request)
    for _ in range(5):
        assert engine.step() == []
    engine.abort("a")
    engine.abort("unknown")
    outputs = engine.step() + engine.step()
    assert [(o.request_id, o.outputs[0].finish_reason) for o in outputs] == [("a", "abort")]
    assert 0 < outputs[0].completion_tokens < 60
    engine.scheduler.check()
    while engine.has_work:
        outputs += engine.step()
    engine.drain()
    assert [(o.request_id, o.outputs[0].finish_reason) for o in outputs[1:]] == [("b", "length")]
    assert pool.num_held == 0
    engine.add(made[0])
    engine.abort("a")  # while it still waits
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["abort"]
    check_idle(llm)


@pytest.mark.parametrize("every", [1, 3])
def test_arrivals_over_time_change_nothing(llm: LLM, reference: Reference, every: int) -> None:
    """A request more after every so many steps, while the ones before it are at work."""
    engine = llm.engine

    def requests() -> list[object]:
        assert llm.frontend is not None
        made = enumerate(reference.ids)
        return [llm.frontend.from_ids(str(number), ids, GREEDY) for number, ids in made]

    made = llm._from_root(requests)
    outputs, steps = [], 0
    while made or engine.has_work:
        if made and steps % every == 0:
            engine.add(made.pop())
        outputs += engine.step()
        steps += 1
    engine.drain()
    outputs.sort(key=lambda output: int(output.request_id))
    for output, greedy in zip(outputs, reference.greedy, strict=True):
        assert_greedy(output.outputs[0].token_ids, greedy)
    check_idle(llm)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("budget", [1, 7, 16, 64, 512])
def test_chunk_sizes_and_scores(reference: Reference, axis: str, budget: int) -> None:
    # One token a step is slow, and as true for the short prompts.
    prompts = [ids for ids in reference.ids if budget > 1 or len(ids) < 20]
    with running(reference.path, **{axis: WORLD}, max_batch_tokens=budget) as llm:
        outputs = llm.generate(prompts, replace(GREEDY, prompt_logprobs=1))
        check_idle(llm)
    check_greedy(outputs, reference)
    for output, logits in zip(outputs, reference.logits):
        assert_prompt_scores(output, logits, 1)


def test_cache_off_and_requests_in_another_order(reference: Reference) -> None:
    order = np.random.default_rng(3).permutation(len(reference.ids)).tolist()
    with running(reference.path, tp=WORLD, prefix_caching=False) as llm:
        outputs = llm.generate([reference.ids[i] for i in order], GREEDY)
        assert llm.engine.scheduler.pool.cached_tokens == 0
        check_idle(llm)
    check_greedy([outputs[order.index(i)] for i in range(len(order))], reference)


@pytest.mark.skipif(WORLD < 2, reason="a pipeline needs two ranks")
@pytest.mark.parametrize("interleave", [2, 4])
def test_interleaved_stages(reference: Reference, interleave: int) -> None:
    layers = max(8, WORLD)
    pp = 2 if WORLD % 2 == 0 else WORLD
    if pp * interleave > layers:
        with pytest.raises(UserError, match=f"--pp-interleave {interleave}: the model has {layers} layers"):
            LLM(str(reference.path), pp=pp, pp_interleave=interleave)
        return
    with running(reference.path, pp=pp, tp=WORLD // pp, pp_interleave=interleave) as llm:
        assert len(llm.engine.pipeline.stages) == interleave
        outputs = llm.generate(reference.ids, replace(GREEDY, prompt_logprobs=1))
        check_greedy(outputs, reference)
        for output, ids, logits in zip(outputs, reference.ids, reference.logits):
            assert_prompt_scores(output, logits, 1)
            assert_logits(llm.logits(ids), logits)
        check_idle(llm)


@pytest.mark.skipif(WORLD < 2, reason="replicas need two ranks")
def test_replicas_take_requests_as_they_get_free(reference: Reference) -> None:
    """C45: one request, more requests than replicas, very different lengths; nobody hangs or repeats."""
    tp = 2 if WORLD % 2 == 0 and WORLD > 2 else 1
    with running(reference.path, tp=tp, dp=WORLD // tp) as llm:
        (only,) = llm.generate(reference.ids[:1], GREEDY)
        assert_greedy(only.outputs[0].token_ids, reference.greedy[0])
        many = [reference.ids[i % len(reference.ids)] for i in range(40)]
        outputs = llm.generate(many, GREEDY)
        for i, output in enumerate(outputs):
            assert_greedy(output.outputs[0].token_ids, reference.greedy[i % len(reference.ids)])
        assert same_everywhere(outputs)
        lengths = [replace(GREEDY, max_tokens=count) for count in (100, 1, 2, 1, 3, 1, 2)]
        uneven = llm.generate([random_ids(5, seed=i) for i in range(7)], lengths)
        assert [o.completion_tokens for o in uneven] == [100, 1, 2, 1, 3, 1, 2]
        check_idle(llm)


def test_the_report_accounts_for_the_time(reference: Reference) -> None:
    with running(reference.path, tp=WORLD, report=True) as llm:
        llm.generate(reference.ids, GREEDY)
        usage = llm.usage()
    assert [u.rank for u in usage] == list(range(WORLD))
    for u in usage:
        counted = u.compute + u.wait + u.host + u.communication_seconds
        assert 0.5 * u.elapsed < counted <= u.elapsed
        assert u.weight_bytes > 0
        if WORLD > 1:
            # One sum for the embedding, two a layer, each of the same bytes on every rank.
            assert u.calls["all_reduce"] > 0
            assert u.bytes["all_reduce"] == usage[0].bytes["all_reduce"]
