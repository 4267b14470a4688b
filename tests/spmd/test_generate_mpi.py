"""What is generated equals `transformers` and the one-rank run, on grids of the world this runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from support.models import (
    FAMILIES,
    Greedy,
    Reference,
    assert_greedy,
    at_most,
    build,
    grid_name,
    grids,
    on_rank_zero,
    random_ids,
    reference_of,
    running,
    same_everywhere,
    smoke_at,
)

from spmd.llm import LLM
from spmd.outputs import CompletionOutput
from spmd.sampling_params import SamplingParams

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
WORLD = COMM.size
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
AXES = ["tp", "pp"] if WORLD > 1 else ["tp"]


def ids_of(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def assert_logprobs(output: CompletionOutput, expected: Greedy) -> None:
    """Logprobs are the reference's log-softmax as long as the ids are the reference's."""
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for entry, token_id, row in zip(output.logprobs, expected.ids, expected.logits):
        if entry.token_id != token_id:
            break
        scores = row - np.logaddexp.reduce(row)
        assert entry.logprob == pytest.approx(scores[token_id], abs=1e-3)
        best, values = zip(*entry.top)
        assert values == pytest.approx(np.sort(scores)[::-1][: len(best)].tolist(), abs=1e-3)
        assert values == pytest.approx(scores[list(best)].tolist(), abs=1e-3)


def idle_and_whole(llm: LLM) -> bool:
    llm.engine.scheduler.check()
    pool = llm.engine.scheduler.pool
    return not llm.engine.has_work and pool.num_free == pool.num_blocks


@contextmanager
def recorded(llm: LLM) -> Iterator[list[tuple[int, str, list[int]]]]:
    """What this very rank finishes, and in which step: `generate` itself shows rank 0's on all."""
    seen: list[tuple[int, str, list[int]]] = []
    step = llm.engine.step

    def record() -> Any:
        outputs = step()
        seen.extend((llm.engine.steps, o.request_id, o.outputs[0].token_ids) for o in outputs)
        return outputs

    llm.engine.step = record  # type: ignore[method-assign]
    yield seen
    llm.engine.step = step  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def alone(zoo: dict[str, Reference]) -> LLM:
    """The unparallel run: every rank on its own."""
    return LLM(str(zoo["llama"].path), comm=MPI.COMM_SELF, dtype="float32", threads=1)


@pytest.mark.parametrize("grid", [pytest.param(g, id=grid_name(g), marks=smoke_at(2)) for g in grids()])
def test_mixed_prompts_in_one_batch(zoo: dict[str, Reference], grid: dict[str, int]) -> None:
    reference = zoo["llama"]
    with running(reference.path, **grid) as llm:
        outputs = llm.generate(reference.ids, replace(GREEDY, logprobs=3))
        assert idle_and_whole(llm)
    assert [output.prompt_token_ids for output in outputs] == reference.ids
    for output, expected in zip(outputs, reference.greedy):
        assert output.outputs[0].finish_reason == "length"
        assert_greedy(output.outputs[0].token_ids, expected)
        assert_logprobs(output.outputs[0], expected)
    assert same_everywhere(outputs)


@at_most(4)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family(zoo: dict[str, Reference], family: str, axis: str) -> None:
    reference = zoo[family]
    with running(reference.path, **{axis: WORLD}) as llm:
        found = ids_of(llm, reference.ids, GREEDY)
    for ids, expected in zip(found, reference.greedy):
        assert_greedy(ids, expected)


@at_most(3)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("budget", [7, 16])
@pytest.mark.parametrize("family", ["llama", "mistral", "phi3"])
def test_prefill_in_chunks(zoo: dict[str, Reference], family: str, budget: int, axis: str) -> None:
    reference = zoo[family]
    with running(reference.path, **{axis: WORLD}, max_batch_tokens=budget) as llm:
        found = ids_of(llm, reference.ids, GREEDY)
    for ids, expected in zip(found, reference.greedy):
        assert_greedy(ids, expected)


@at_most(2)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_preemption_leaves_no_trace(zoo: dict[str, Reference], family: str, axis: str) -> None:
    prompts = [random_ids(40, seed=seed) for seed in range(6)]
    base = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    seeded = [replace(base, temperature=0.8, seed=seed) for seed in (1, 2)]
    penalised = [replace(base, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3)]
    params = [base, *seeded, *penalised, base, replace(base, n=2, temperature=1.0, seed=3)]
    with running(zoo[family].path, **{axis: WORLD}) as llm:
        expected = llm.generate(prompts, params)
        assert llm.engine.scheduler.num_preemptions == 0
        cache = llm.engine.pipeline.caches[0]
        block = sum(t[:16].numel() * t.element_size() for t in cache.keys + cache.values)
        block = max(llm.grid.world.all_gather_objects(block))
    with running(zoo[family].path, **{axis: WORLD}, kv_memory=12 * block) as llm:
        found = llm.generate(prompts, params)
        assert llm.engine.scheduler.num_preemptions >= 3
        assert idle_and_whole(llm)
    for a, b in zip(found, expected):
        for mine, theirs in zip(a.outputs, b.outputs):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs is not None
            assert theirs.logprobs is not None
            scores = [entry.logprob for entry in theirs.logprobs]
            assert [entry.logprob for entry in mine.logprobs] == pytest.approx(scores, abs=1e-3)


@at_most(2)
@pytest.mark.parametrize("axis", AXES)
def test_neighbours_do_not_matter(zoo: dict[str, Reference], alone: LLM, axis: str) -> None:
    prompt, other = random_ids(9), [random_ids(count, seed=5) for count in (3, 50, 7, 20, 1, 33, 12)]
    seeded = replace(GREEDY, temperature=0.8, seed=42, max_tokens=32)
    unseeded = replace(seeded, seed=None)
    expected = ids_of(alone, prompt, seeded)[0]
    assert ids_of(alone, prompt, replace(seeded, seed=43))[0] != expected
    with running(zoo["llama"].path, **{axis: WORLD}) as llm:
        assert ids_of(llm, prompt, seeded)[0] == expected
        for place in range(8):
            prompts = [*other[:place], prompt, *other[place:]]
            params = [unseeded] * place + [seeded] + [unseeded] * (7 - place)
            assert ids_of(llm, prompts, params)[place] == expected
        assert ids_of(llm, [prompt, prompt], seeded) == [expected, expected]
        assert ids_of(llm, [prompt] * 5, GREEDY) == ids_of(alone, [prompt], GREEDY) * 5


@at_most(3)
@pytest.mark.parametrize("axis", AXES)
def test_penalties_count_the_request_alone(zoo: dict[str, Reference], axis: str) -> None:
    reference = zoo["llama"]
    params = replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3)

    def make() -> Greedy:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(reference.path).eval()
        return _greedy_with_penalties(model, reference.ids[1], params)

    expected = on_rank_zero(make)
    assert expected.ids != reference.greedy[1].ids
    with running(reference.path, **{axis: WORLD}) as llm:
        assert_greedy(ids_of(llm, reference.ids[1], params)[0], expected)
        assert_greedy(ids_of(llm, [reference.ids[4], reference.ids[1]], params)[1], expected)


def _greedy_with_penalties(model: Any, prompt: list[int], params: SamplingParams) -> Greedy:
    from support.models import logits_of

    ids, rows = list(prompt), []
    for _ in range(params.max_tokens or 0):
        row = logits_of(model, ids)[-1].copy()
        for token_id in set(ids):
            factor = params.repetition_penalty
            row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
        for token_id in ids[len(prompt) :]:
            row[token_id] -= params.frequency_penalty
        for token_id in set(ids[len(prompt) :]):
            row[token_id] -= params.presence_penalty
        rows.append(row)
        ids.append(int(row.argmax()))
    return Greedy(ids[len(prompt) :], np.asarray(rows))


@at_most(2)
@pytest.mark.parametrize("axis", AXES)
def test_dynamic_scaling_leaves_short_neighbours_alone(
    tmp_path_factory: pytest.TempPathFactory, axis: str
) -> None:
    prompts = [random_ids(32), random_ids(100)]

    def make() -> Reference:
        folder = tmp_path_factory.mktemp("dynamic")
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        model = build(folder, max_position_embeddings=64, rope_parameters=rope)
        return reference_of(model, folder, prompts, 1)

    reference = on_rank_zero(make)
    params = replace(GREEDY, logprobs=2)
    with running(reference.path, **{axis: WORLD}) as llm:
        both = llm.generate(prompts, params)
        single = [llm.generate(prompt, params)[0] for prompt in prompts]
    for found, expected, first in zip(both, single, reference.greedy):
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert_greedy(found.outputs[0].token_ids[:1], first)
        assert found.outputs[0].logprobs is not None
        assert expected.outputs[0].logprobs is not None
        scores = [entry.logprob for entry in expected.outputs[0].logprobs]
        assert [entry.logprob for entry in found.outputs[0].logprobs] == pytest.approx(scores, abs=1e-3)


def _disturbed(llm: LLM) -> None:
    noise = torch.Generator().manual_seed(COMM.rank)
    forward = llm.engine.pipeline.stages[-1].forward

    def forward_with_noise(*arguments: Any) -> torch.Tensor:
        out = forward(*arguments)
        return (
            out + 1e-3 * torch.randn(out.shape, generator=noise)
            if llm.engine.pipeline.stages[-1].last
            else out
        )

    llm.engine.pipeline.stages[-1].forward = forward_with_noise  # type: ignore[method-assign]


@at_most(4)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("disturb", [None, _disturbed], ids=["as computed", "disturbed"])
def test_all_ranks_commit_the_same_tokens(
    zoo: dict[str, Reference], axis: str, disturb: Callable[[LLM], None] | None
) -> None:
    prompts = [random_ids(1 + seed % 5, seed=seed) for seed in range(32)]
    with running(zoo["llama"].path, **{axis: WORLD}) as llm:
        if disturb is not None and COMM.rank > 0:
            disturb(llm)
        with recorded(llm) as seen:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    assert len(seen) == 32
    assert same_everywhere(seen)
    assert {request_id: ids for _, request_id, ids in seen} == {
        output.request_id: output.outputs[0].token_ids for output in outputs
    }


@pytest.mark.parametrize("axis", AXES)
def test_ties_are_broken_the_same_way(tmp_path_factory: pytest.TempPathFactory, axis: str) -> None:
    from support.models import edit_weights

    def make() -> Any:
        folder = tmp_path_factory.mktemp("ties")
        build(folder, vocab_size=130)
        edit_weights(folder, lambda tensors: tensors["lm_head.weight"].zero_())
        return folder

    with running(on_rank_zero(make), **{axis: WORLD}) as llm:
        biases: list[dict[int, float]] = [{}, {77: 1.0, 120: 1.0}, {0: -100.0}]
        params = [replace(GREEDY, logit_bias=bias) for bias in biases]
        with recorded(llm) as seen:
            llm.generate([[5]] * 3, params)
    assert same_everywhere(seen)
    assert [ids for _, _, ids in sorted(seen, key=lambda entry: entry[1])] == [[0] * 16, [77] * 16, [1] * 16]
