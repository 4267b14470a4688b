"""Requests as users write them, end to end: text, chat, stops, end ids, limits and mistakes, on TP and PP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from support.models import (
    Greedy,
    Reference,
    add_tokenizer,
    assert_greedy,
    at_most,
    build,
    edit_config,
    greedy,
    on_rank_zero,
    random_ids,
    reference_of,
    running,
    same_everywhere,
)

from spmd.comm.errors import UserError
from spmd.llm import LLM
from spmd.outputs import CompletionOutput
from spmd.sampling_params import SamplingParams

pytestmark = [pytest.mark.mpi, at_most(2)]

WORLD = MPI.COMM_WORLD.size
VOCAB = 130
END = 2  # </s>
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MESSAGES = [{"role": "system", "content": "w20 w30"}, {"role": "user", "content": "w40 w41 w42"}]


@dataclass(frozen=True)
class Spoken:
    """The model with its tokenizer, and what transformers says to MESSAGES."""

    reference: Reference
    chat_ids: list[int]
    chat: Greedy


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    def make() -> Spoken:
        import torch

        folder = tmp_path_factory.mktemp("spoken")
        model = build(folder, vocab_size=VOCAB, bos_token_id=1, eos_token_id=END)
        tokenizer = add_tokenizer(folder)
        encoded = tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(
            **encoded,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        chat_ids = encoded["input_ids"][0].tolist()
        answer = Greedy(out.sequences[0, len(chat_ids) :].tolist(), torch.cat(out.logits).numpy())
        # The first prompt's continuation has twelve different words and no special token.
        seed = next(seed for seed in range(99) if _plain(greedy(model, random_ids(9, seed=seed), 12).ids))
        prompts = [random_ids(9, seed=seed), [7], [7, 9, END, 11, 12], random_ids(100)]
        return Spoken(reference_of(model, folder, prompts, 12), chat_ids, answer)

    return on_rank_zero(make)


def _plain(ids: list[int]) -> bool:
    return len(set(ids)) == len(ids) and min(ids) > 5


@pytest.fixture(scope="module", params=["tp", "pp"] if WORLD > 1 else ["tp"])
def llm(spoken: Spoken, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with running(spoken.reference.path, **{request.param: WORLD}) as made:
        yield made


def one(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    outputs = llm.generate(prompt, params)
    assert same_everywhere(outputs)
    return outputs[0].outputs[0]


def text_of(ids: list[int]) -> str:
    words = ["<unk>", "<s>", "</s>", "system", "user", "assistant"]
    return " ".join(words[i] if i < 6 else f"w{i}" for i in ids if i > 2)


def answer_of(ids: list[int]) -> str:
    """The same as the continuation of a prompt, whose last word comes before it."""
    return " " + text_of(ids)


def test_text_in_and_out(llm: LLM, spoken: Spoken) -> None:
    ids, expected = spoken.reference.ids[0], spoken.reference.greedy[0]
    output = llm.generate(text_of(ids), GREEDY)[0]
    assert output.prompt == text_of(ids)
    assert output.prompt_token_ids == ids
    assert_greedy(output.outputs[0].token_ids, expected)
    assert output.outputs[0].text == answer_of(output.outputs[0].token_ids)


def test_chat(llm: LLM, spoken: Spoken) -> None:
    output = llm.chat(MESSAGES, GREEDY)[0]
    assert output.prompt_token_ids == spoken.chat_ids
    assert_greedy(output.outputs[0].token_ids, spoken.chat)
    several = llm.chat([MESSAGES, MESSAGES[1:]], GREEDY)
    assert several[0].outputs == output.outputs
    assert several[1].prompt_token_ids == spoken.chat_ids[-5:]


def test_stop_strings(llm: LLM, spoken: Spoken) -> None:
    prompt = spoken.reference.ids[0]
    ids = one(llm, prompt, GREEDY).token_ids
    words = text_of(ids).split(" ")
    across = f"{words[4][1:]} {words[5][:2]}"  # from inside one token into the next
    found = one(llm, prompt, replace(GREEDY, stop=("never", across)))
    assert found.text == answer_of(ids[:4]) + " " + words[4][0]
    assert (found.finish_reason, found.stop_reason) == ("stop", across)
    assert found.token_ids == ids[:6]
    shown = one(llm, prompt, replace(GREEDY, stop=(across,), include_stop_str_in_output=True))
    assert shown.text == answer_of(ids[:5]) + " " + words[5][:2]
    # Neighbours with other stops, one of which completes only its first half.
    stops: list[tuple[str, ...]] = [(), (words[2],), (words[11] + " w",)]
    outputs = llm.generate([prompt] * 3, [replace(GREEDY, stop=stop) for stop in stops])
    expected = [answer_of(ids), answer_of(ids[:2]) + " ", answer_of(ids)]
    assert [output.outputs[0].text for output in outputs] == expected
    late = one(llm, prompt, replace(GREEDY, stop=(words[2], words[8]), min_tokens=6))
    assert late.stop_reason == words[8]


def test_end_ids(llm: LLM, spoken: Spoken, shared_path: Path) -> None:
    prompt = spoken.reference.ids[0]
    ids = one(llm, prompt, GREEDY).token_ids
    other = next(i for i in range(6, VOCAB) if i not in ids)

    def copy() -> None:
        shutil.copytree(spoken.reference.path, shared_path, dirs_exist_ok=True)
        edit_config(shared_path, eos_token_id=other)
        lists = {"eos_token_id": [other + 1, ids[3]], "transformers_version": "5.0.0"}
        (shared_path / "generation_config.json").write_text(json.dumps(lists))

    on_rank_zero(copy)
    stopping = replace(GREEDY, ignore_eos=False)
    with running(shared_path, tp=WORLD) as ending:
        output = one(ending, prompt, stopping)
        assert output.token_ids == ids[:4]
        assert (output.finish_reason, output.stop_reason) == ("stop", ids[3])
        assert output.text == answer_of(ids[:3])
        output = one(ending, prompt, GREEDY)
        assert (output.token_ids, output.finish_reason) == (ids, "length")
        for minimum in (4, 6):
            output = one(ending, prompt, replace(stopping, min_tokens=minimum))
            assert output.token_ids[:3] == ids[:3]
            assert len(output.token_ids) > minimum
            ends = {other, other + 1, ids[3], END}
            assert not ends & set(output.token_ids[:minimum])
        for end in (other, other + 1, ids[3], END):  # config, generation config (two), tokenizer
            output = one(ending, prompt, replace(stopping, logit_bias={end: 100.0}))
            assert (output.token_ids, output.text, output.stop_reason) == ([end], "", end)
    output = one(llm, prompt, replace(GREEDY, stop_token_ids=(ids[5],)))
    assert (output.token_ids, output.stop_reason) == (ids[:6], ids[5])


def test_limits(llm: LLM, spoken: Spoken) -> None:
    short, long = spoken.reference.ids[0], spoken.reference.ids[3]
    nothing = one(llm, short, replace(GREEDY, max_tokens=0))
    assert (nothing.token_ids, nothing.text, nothing.finish_reason) == ([], "", "length")
    single = one(llm, short, replace(GREEDY, max_tokens=1))
    assert (single.token_ids, single.finish_reason) == (spoken.reference.greedy[0].ids[:1], "length")
    for limit in (10**9, None):
        huge = one(llm, long, replace(GREEDY, max_tokens=limit))
        assert (len(huge.token_ids), huge.finish_reason) == (28, "length")
    mixed = [replace(GREEDY, max_tokens=limit) for limit in (0, 1, 5, 0)]
    outputs = llm.generate([short] * 4, mixed)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [0, 1, 5, 0]
    full = random_ids(128)
    assert one(llm, full, replace(GREEDY, max_tokens=0)).token_ids == []
    with pytest.raises(UserError, match="128 tokens"):
        llm.generate(full, GREEDY)


def test_several_answers(llm: LLM, spoken: Spoken) -> None:
    params = SamplingParams(n=2, max_tokens=12, seed=5, ignore_eos=True)
    first, second = llm.generate([spoken.reference.ids[0], spoken.reference.ids[0]], params)
    assert [output.index for output in first.outputs] == [0, 1]
    assert first.outputs == second.outputs
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    assert first.outputs[0] == one(llm, spoken.reference.ids[0], replace(params, n=1))
    assert first.completion_tokens == 24
    same = llm.generate(spoken.reference.ids[0], replace(GREEDY, n=3))[0]
    assert [output.token_ids for output in same.outputs] == [spoken.reference.greedy[0].ids] * 3


def test_batch_equals_single(llm: LLM, spoken: Spoken) -> None:
    params = replace(GREEDY, logprobs=1)
    single = [one(llm, ids, params) for ids in spoken.reference.ids]
    for output, expected in zip(single, spoken.reference.greedy):
        assert_greedy(output.token_ids, expected)
    together = [output.outputs[0] for output in llm.generate(spoken.reference.ids, params)]
    for a, b in zip(together, single):
        assert a.token_ids == b.token_ids
        assert a.logprobs is not None
        assert b.logprobs is not None
        scores = [entry.logprob for entry in b.logprobs]
        assert [entry.logprob for entry in a.logprobs] == pytest.approx(scores, abs=1e-3)
    again = [one(llm, [7], params) for _ in range(5)]
    assert again == [single[1]] * 5


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, "abc"])
def test_bad_ids_are_refused_everywhere(llm: LLM, spoken: Spoken, bad: Any) -> None:
    prompt = spoken.reference.ids[0]
    wrong: list[tuple[Any, SamplingParams]] = [
        ([5, bad], GREEDY),
        ([[5, 6], [7, bad]], GREEDY),
        (prompt, replace(GREEDY, logit_bias={bad: 1.0})),
        (prompt, replace(GREEDY, stop_token_ids=(bad,))),
    ]
    for prompts, params in wrong:
        with pytest.raises(UserError, match=str(bad)) as caught:
            llm.generate(prompts, params)
        assert same_everywhere(str(caught.value))
    assert_greedy(one(llm, prompt, GREEDY).token_ids, spoken.reference.greedy[0])


def test_biases_reach_every_rank(llm: LLM, spoken: Spoken) -> None:
    prompt = spoken.reference.ids[0]
    for token_id in (0, 6, VOCAB // 2, VOCAB - 1):
        forced = one(llm, prompt, replace(GREEDY, logit_bias={token_id: 100.0}))
        assert forced.token_ids == [token_id] * 12
    ids = spoken.reference.greedy[0].ids
    forbidden = one(llm, prompt, replace(GREEDY, logit_bias=dict.fromkeys(ids, -100.0)))
    assert not set(forbidden.token_ids) & set(ids)
