"""Batch files: every line is answered once, whatever stands in the others and however often the job dies."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from support.command import CHAT, COMPLETIONS, call, line, records, write_lines
from support.models import add_tokenizer, build, greedy, logits_of, on_rank_zero
from support.mpirun import clean_environment, command_line

from spmd.llm import LLM
from spmd.sampling_params import SamplingParams

VOCAB = 131
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 1.5, "max_tokens": 12, "seed": 42}
USER = [{"role": "user", "content": "w6 w7"}]


@dataclass(frozen=True)
class Batch:
    """A model with and one without tokenizer, and what must be said to each custom_id of `input`."""

    model: Path
    bare_model: Path
    input: Path
    texts: dict[str, list[str]]  # texts of the choices, as transformers and one rank of ours have them
    faults: dict[str, tuple[int, str]]  # status and a part of the message
    bare_ids: list[int]
    bare_logprobs: np.ndarray  # [ids, vocab]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    return on_rank_zero(lambda: make_batch(tmp_path_factory.mktemp("batch")))


def make_batch(root: Path) -> Batch:
    model = build(root / "model", num_hidden_layers=2)
    model.save_pretrained(root / "bare")
    tokenizer = add_tokenizer(root / "model", VOCAB)

    def answer(prompt: str) -> str:
        ids = tokenizer(prompt).input_ids
        whole = tokenizer.decode([*ids, *greedy(model, ids, 8).ids], skip_special_tokens=True)
        return str(whole.removeprefix(tokenizer.decode(ids, skip_special_tokens=True)))

    templated = tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    llm = LLM(str(root / "model"), threads=1, comm=MPI.COMM_SELF)
    seeded = SamplingParams(**SEEDED)
    sampled = str(llm.generate("w6 w7", seeded)[0].outputs[0].text)
    sampled_chat = str(llm.chat(USER, seeded)[0].outputs[0].text)
    llm.close()
    good = {
        "chat": (line("chat", CHAT, messages=USER, **GREEDY), [answer(templated)]),
        "completion": (line("completion", COMPLETIONS, prompt="w6 w7 w8", **GREEDY), [answer("w6 w7 w8")]),
        "sampled": (line("sampled", COMPLETIONS, prompt="w6 w7", **SEEDED), [sampled]),
        "sampled chat": (line("sampled chat", CHAT, messages=USER, **SEEDED), [sampled_chat]),
        "texts": (
            line("texts", COMPLETIONS, prompt=["w50", "w60 w61"], **GREEDY),
            [answer("w50"), answer("w60 w61")],
        ),
        "ids": (line("ids", COMPLETIONS, prompt=[50], **GREEDY), [answer("w50")]),
        "lists of ids": (
            line("lists of ids", COMPLETIONS, prompt=[[50], [60, 61]], n=2, **GREEDY),
            [answer("w50"), answer("w50"), answer("w60 w61"), answer("w60 w61")],
        ),
        "forced": (
            line("forced", COMPLETIONS, prompt="w6", logit_bias={"77": 100}, **GREEDY),
            [" w77" * 8],
        ),
    }

    def wrong(custom_id: str, fragment: str, status: int = 400, /, **body: Any) -> tuple[str, str, int, str]:
        return custom_id, line(custom_id, COMPLETIONS, **{"prompt": "w6", **body}), status, fragment

    outside = [-1, VOCAB, 2**31, "abc"]
    bad = [
        ("no body", '{"custom_id": "no body", "method": "POST", "url": "/v1/completions"}', 400, "body"),
        ("url", line("url", "/v1/embeddings", input="w6"), 404, "/v1/embeddings"),
        ("method", line("method", COMPLETIONS, prompt="w6").replace("POST", "GET"), 405, "GET"),
        wrong("too long", "200 tokens", prompt="w6 " * 200),
        wrong("stream", "stream", stream=True),
        wrong("negative", "max_tokens", max_tokens=-1),
        wrong("typo", "max_token", max_token=3),
        ("role", line("role", CHAT, messages=[{"role": "king", "content": "w6"}]), 400, "king"),
        *(wrong(f"id {value}", str(value), prompt=[6, value]) for value in outside[:3]),
        *(wrong(f"nested {value}", str(value), prompt=[[6], [value]]) for value in outside[:3]),
        *(wrong(f"bias {value}", str(value), logit_bias={str(value): 1}) for value in outside),
        *(wrong(f"stop id {value}", str(value), stop_token_ids=[value]) for value in outside),
    ]
    lines = [*(text for text, _ in good.values()), *(text for _, text, _, _ in bad)]
    faults = {custom_id: (status, fragment) for custom_id, _, status, fragment in bad}
    by_number = {
        '{"custom_id": "broken", "method"': (400, "not valid JSON"),
        '["an", "array"]': (400, "array"),
        good["chat"][0]: (400, "'chat' is used by an earlier line"),
        '{"method": "POST"}': (400, "custom_id is missing"),
    }
    for text, fault in by_number.items():
        lines.append(text)
        faults[f"line {len(lines)}"] = fault
    # Bad lines stand between good ones, a byte-order mark before the first, a blank line at the end.
    input = root / "in.jsonl"
    input.write_bytes(b"\xef\xbb\xbf" + "".join(f"{text}\r\n" for text in lines).encode() + b"\r\n")
    bare = greedy(model, [6, 7, 8], 8)
    logits = logits_of(model, [6, 7, 8, *bare.ids])[2:-1].astype(np.float64)
    return Batch(
        model=root / "model",
        bare_model=root / "bare",
        input=input,
        texts={custom_id: texts for custom_id, (_, texts) in good.items()},
        faults=faults,
        bare_ids=bare.ids,
        bare_logprobs=logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)),
    )


def check_records(batch: Batch, output: Path) -> None:
    found = records(output)
    assert set(found) == set(batch.texts) | set(batch.faults)
    for custom_id, texts in batch.texts.items():
        record = found[custom_id]
        assert (record["response"]["status_code"], record["error"]) == (200, None), record
        choices = record["response"]["body"]["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(texts)))
        assert [c["message"]["content"] if "message" in c else c["text"] for c in choices] == texts, custom_id
    for custom_id, (status, fragment) in batch.faults.items():
        record = found[custom_id]
        assert record["response"]["status_code"] == status, record
        assert fragment in record["error"]["message"], record
        assert record["response"]["body"]["error"]["message"] == record["error"]["message"]


def check_bare_record(batch: Batch, output: Path) -> None:
    (record,) = records(output).values()
    (choice,) = record["response"]["body"]["choices"]
    assert choice["token_ids"] == batch.bare_ids
    assert choice["text"] == ""
    names = [f"token_id:{token_id}" for token_id in batch.bare_ids]
    assert choice["logprobs"]["tokens"] == names
    expected = [row[token_id] for row, token_id in zip(batch.bare_logprobs, batch.bare_ids)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    for top, row in zip(choice["logprobs"]["top_logprobs"], batch.bare_logprobs):
        best = np.argsort(-row)[:3]
        assert top == pytest.approx({f"token_id:{i}": row[i] for i in best}, abs=1e-3)
    assert record["response"]["body"]["usage"]["completion_tokens"] == 8


def run_all(batch: Batch, root: Path, grid: str) -> tuple[Path, Path]:
    """Answer the big file, and one line with the model that has no tokenizer, on this grid of ranks."""
    output, bare_output, bare_input = root / "out.jsonl", root / "bare_out.jsonl", root / "bare_in.jsonl"
    if MPI.COMM_WORLD.rank == 0:
        write_lines(bare_input, [line("a", COMPLETIONS, prompt=[6, 7, 8], logprobs=3, **GREEDY)])
    arguments = grid.split()
    assert call(["--model", batch.model, "--input", batch.input, "--output", output, *arguments]) == 1
    bare = ["--model", batch.bare_model, "--input", bare_input, "--output", bare_output]
    assert call([*bare, *arguments]) == 0
    return output, bare_output


def test_one_rank(batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, bare_output = run_all(batch, tmp_path, "")
    check_records(batch, output)
    check_bare_record(batch, bare_output)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{len(batch.faults)} of {len(batch.texts) + len(batch.faults)} lines have an error" in printed.err


@pytest.mark.mpi(min_size=2)
def test_several_ranks(batch: Batch, shared_path: Path) -> None:
    size = MPI.COMM_WORLD.size
    for number, grid in enumerate([f"--tp {size}", f"--dp {size}", "--pp 2"]):
        if grid == "--pp 2" and size != 2:
            continue
        folder = shared_path / str(number)
        folder.mkdir(exist_ok=True)
        output, bare_output = run_all(batch, folder, grid)
        if MPI.COMM_WORLD.rank == 0:
            check_records(batch, output)
            check_bare_record(batch, bare_output)


def test_a_model_without_tokenizer_refuses_text_line_by_line(batch: Batch, tmp_path: Path) -> None:
    lines = [line("text", COMPLETIONS, prompt="w6"), line("chat", CHAT, messages=USER)]
    lines.append(line("ids", COMPLETIONS, prompt=[6], **GREEDY))
    input, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert call(["--model", batch.bare_model, "--input", input, "--output", output]) == 1
    found = records(output)
    for custom_id in ("text", "chat"):
        assert found[custom_id]["response"]["status_code"] == 400
        assert "no tokenizer" in found[custom_id]["error"]["message"]
    assert found["ids"]["response"]["status_code"] == 200


def test_an_empty_file_is_answered_by_an_empty_file(batch: Batch, tmp_path: Path) -> None:
    input, output = write_lines(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl"
    assert call(["--model", batch.model, "--input", input, "--output", output]) == 0
    assert output.read_bytes() == b""


def test_a_killed_job_goes_on_where_it_was(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count, output = 200, tmp_path / "out.jsonl"
    lines = [
        line(f"{i}", COMPLETIONS, prompt=[6 + i % 100, 7], **{**GREEDY, "max_tokens": 100})
        for i in range(count)
    ]
    input = write_lines(tmp_path / "in.jsonl", lines)
    arguments = ["--model", str(batch.model), "--input", str(input), "--output", str(output)]
    killed = subprocess.Popen(
        command_line(2, ["-m", "spmd.run", *arguments, "--dp", "2", "--max-running", "1", "--threads", "1"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=clean_environment(),
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not output.exists() or output.read_bytes().count(b"\n") < 5:
        assert killed.poll() is None, killed.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.communicate(timeout=10)
    size = -1
    while size != output.stat().st_size:  # the last rank to hear of it may still write a record
        size = output.stat().st_size
        time.sleep(0.5)
    with output.open("ab") as file:
        file.write(b'{"id": "batch_req_')  # as if killed in the middle of a record
    before = output.read_bytes()
    whole = before[: before.rindex(b"\n") + 1]
    finished = whole.count(b"\n")
    assert 5 <= finished < count

    assert call(arguments) == 0
    assert f"{finished} of {count} lines are finished" in capsys.readouterr().err
    after = output.read_bytes()
    assert after.startswith(whole)
    found = records(output)
    assert set(found) == {f"{i}" for i in range(count)}
    assert {record["response"]["status_code"] for record in found.values()} == {200}
    # What was computed before the kill and what was computed after it are equal where the prompts are.
    for i in range(100):
        one, two = (found[f"{j}"]["response"]["body"]["choices"][0]["token_ids"] for j in (i, i + 100))
        assert one == two

    assert call(arguments) == 0
    assert output.read_bytes() == after
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
