"""Batch files: tolerant reading, writing that survives a kill, resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd.batch_file import BatchFailure, BatchItem, BatchWriter, finished_ids, read_batch
from spmd.comm.errors import UserError
from spmd.openai_api import ApiError, parse_chat, parse_completion

BOM = b"\xef\xbb\xbf"
CHAT_BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    """A good line, or a bad one: a change to None takes the key out."""
    record = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Hi"},
        **changes,
    }
    return json.dumps({key: value for key, value in record.items() if value is not None}).encode()


def entries(path: Path, *lines: bytes, newline: bytes = b"\n") -> list[BatchItem | BatchFailure]:
    path.write_bytes(newline.join(lines))
    return list(read_batch(path))


def answer_all(source: Path, target: Path) -> int:
    """A batch run without an engine: each request is parsed and answered; returns how many were answered."""
    answered = 0
    with BatchWriter(target, source) as writer:
        for entry in read_batch(source):
            if writer.is_finished(entry):
                continue
            answered += 1
            if isinstance(entry, BatchFailure):
                writer.write_error(entry, entry.error)
                continue
            try:
                (parse_chat if entry.kind == "chat" else parse_completion)(entry.body, 128)
                writer.write_response(entry, {"id": entry.response_id, "object": entry.kind})
            except ApiError as error:
                writer.write_error(entry, error)
    return answered


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in path.read_bytes().splitlines()]


# C59
def test_bad_lines_do_not_spoil_the_batch(tmp_path: Path) -> None:
    lines = [
        BOM + line("chat", url="/v1/chat/completions", body=CHAT_BODY),
        line("text"),
        b'{"custom_id": "broken", ',
        b"[1, 2]",
        line("no body", body=None),
        line("unknown url", url="/v1/embeddings"),
        line("get", method="GET"),
        line("stream", body={"prompt": "Hi", "stream": True}),
        line("text"),
        line(None),
        line(7),
        b'{"custom_id": "latin", "method": "\xe9"}',
        line("list body", body=[1]),
        b"",
        line("last"),
        b"   ",
        b"",
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\r\n".join(lines))
    answer_all(source, target)

    expected = [
        ("chat", 200, None),
        ("text", 200, None),
        ("line 3", 400, "not valid JSON"),
        ("line 4", 400, "array"),
        ("no body", 400, "body is missing"),
        ("unknown url", 404, "/v1/embeddings"),
        ("get", 405, "GET"),
        ("stream", 400, "stream"),
        ("line 9", 400, "'text' is used by an earlier line"),
        ("line 10", 400, "custom_id is missing"),
        ("line 11", 400, "custom_id is a number"),
        ("line 12", 400, "not UTF-8"),
        ("list body", 400, "array"),
        ("last", 200, None),
    ]
    found = records(target)
    assert [record["custom_id"] for record in found] == [custom_id for custom_id, _, _ in expected]
    for record, (_, status, words) in zip(found, expected):
        assert record["response"]["status_code"] == status
        if words is None:
            assert record["error"] is None
        else:
            assert words in record["error"]["message"]
            assert record["response"]["body"]["error"]["message"] == record["error"]["message"]
            assert record["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert len({record["id"] for record in found}) == len(found)


def test_the_form_of_a_record(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    item = BatchItem(1, "a", "/v1/chat/completions", {})
    failure = BatchFailure(2, "line 2", ApiError("the line is bad", "url", "invalid_url", 404), by_line=True)
    with BatchWriter(target) as writer:
        writer.write_response(item, {"object": "chat.completion"})
        writer.write_error(failure, failure.error)
    # echo -n a | sha256sum
    digest = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"[:24]
    assert records(target) == [
        {
            "id": f"batch_req_{digest}",
            "custom_id": "a",
            "response": {
                "status_code": 200,
                "request_id": f"req_{digest}",
                "body": {"object": "chat.completion"},
            },
            "error": None,
        },
        {
            "id": "batch_req_line_2",
            "custom_id": "line 2",
            "response": {
                "status_code": 404,
                "request_id": "req_line_2",
                "body": {
                    "error": {
                        "message": "the line is bad",
                        "type": "invalid_request_error",
                        "param": "url",
                        "code": "invalid_url",
                    }
                },
            },
            "error": {"code": "invalid_url", "message": "the line is bad"},
        },
    ]
    assert item.response_id == f"chatcmpl-{digest}"


def test_items(tmp_path: Path) -> None:
    found = entries(tmp_path / "in", b"", line("a"), line("b", url="/v1/chat/completions", body=CHAT_BODY))
    assert found == [
        BatchItem(2, "a", "/v1/completions", {"prompt": "Hi"}),
        BatchItem(3, "b", "/v1/chat/completions", CHAT_BODY),
    ]
    assert [entry.kind for entry in found if isinstance(entry, BatchItem)] == ["completion", "chat"]


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 100_000,
        b'{"custom_id": "a", "body": ' + b"9" * 5000 + b"}",
        b'{"custom_id": "a", "body": {"temperature": NaN}}',
        b"null",
        b'"text"',
        b"\x00",
        b'{"custom_id": ""}',
        b"{}{}",
        line("a", method=None),
        line("a", url=["/v1/completions"]),
    ],
)
def test_more_bad_lines(tmp_path: Path, raw: bytes) -> None:
    bad, good = entries(tmp_path / "in", raw, line("good"))
    assert isinstance(bad, BatchFailure)
    assert 400 <= bad.error.status < 500
    assert isinstance(good, BatchItem)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary()
    | st.lists(
        st.sampled_from(
            [line("a"), line("b"), b"{", b"", b"\r", b" ", BOM, b"[]", b"\xff", b'{"a":', b"\x85"]
        )
        | st.binary(max_size=6)
    ).map(b"\n".join)
)
def test_any_bytes_give_one_entry_for_each_line_that_is_not_blank(tmp_path: Path, data: bytes) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(data)
    found = list(read_batch(source))
    filled = [i for i, raw in enumerate(data.split(b"\n"), 1) if raw.removeprefix(BOM).strip()]
    assert [entry.line for entry in found] == filled
    assert len({entry.record_id for entry in found}) == len(found)
    target.unlink(missing_ok=True)
    answer_all(source, target)
    assert len(records(target)) == len(filled)
    assert answer_all(source, target) == 0


def test_input_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path, "a\0b"):
        with pytest.raises(UserError, match="input"):
            read_batch(path)


def test_a_custom_id_that_reads_like_a_line_number(tmp_path: Path) -> None:
    first, second, third = entries(tmp_path / "in", line("line 2"), b"{", line("line 3"))
    assert (first.custom_id, second.custom_id) == ("line 2", "line 2")
    assert isinstance(third, BatchItem)
    assert len({first.record_id, second.record_id, third.record_id}) == 3


def test_text_survives(tmp_path: Path) -> None:
    text = "é\u2028\u0085😀\ud800\n"
    with BatchWriter(tmp_path / "out") as writer:
        writer.write_response(BatchItem(1, text, "/v1/completions", {}), {"text": text})
    (record,) = (json.loads(raw) for raw in (tmp_path / "out").read_text().splitlines())
    assert record["custom_id"] == record["response"]["body"]["text"] == text


KILLED = """
    import os, signal, sys
    from spmd.batch_file import BatchItem, BatchWriter
    writer = BatchWriter(sys.argv[1])
    for i in range(5):
        writer.write_response(BatchItem(i + 1, f"id{i}", "/v1/completions", {}), {"text": "x" * 100})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_loses_no_record(tmp_path: Path) -> None:
    target = tmp_path / "out"
    subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(target)], timeout=60, check=False)
    assert [record["custom_id"] for record in records(target)] == [f"id{i}" for i in range(5)]


def test_resuming_after_a_cut_at_any_byte(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\n".join([line("a"), b"{", line("b"), line("a"), line("c", body={"n": -1})]))
    assert answer_all(source, target) == 5
    whole = target.read_bytes()
    for cut in range(len(whole) + 1):
        target.write_bytes(whole[:cut])
        assert answer_all(source, target) == 5 - whole[:cut].count(b"\n")
        assert target.read_bytes() == whole


@pytest.mark.parametrize("tail", [b"{\n", b'{"id": "batch_req_a", "cus', b"\0" * 100, b"\0\n\n", b"\n\n"])
def test_a_broken_tail_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(line("a") + b"\n" + line("b"))
    answer_all(source, target)
    whole = target.read_bytes()
    target.write_bytes(whole + tail)
    assert answer_all(source, target) == 0
    assert target.read_bytes() == whole


def test_only_server_faults_are_tried_again(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    good, wrong, faulty = entries(source, line("good"), line("wrong"), line("faulty"))
    assert finished_ids(target) == set()
    with BatchWriter(target, source) as writer:
        assert isinstance(good, BatchItem)
        writer.write_error(faulty, ApiError("out of memory", status=503))
        writer.write_response(good, {})
        writer.write_error(wrong, ApiError("too long"))
        assert [writer.status_of(entry) for entry in (good, wrong, faulty)] == [200, 400, None]
    assert [record["error"] and record["error"]["code"] for record in records(target)] == [
        "server_error",
        None,
        "invalid_request",
    ]
    assert finished_ids(target) == {good.record_id, wrong.record_id}
    target.chmod(0o640)
    assert answer_all(source, target) == 1
    # One record a request: the fault is gone once its request is answered.
    assert [record["custom_id"] for record in records(target)] == ["good", "wrong", "faulty"]
    assert finished_ids(target) == {good.record_id, wrong.record_id, faulty.record_id}
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize(
    "content",
    [
        b"precious notes\n",
        b"precious notes",
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n',
        b'{"id": "batch_req_a"}\n',
        b"\n\n[1]\n",
        b"\x7fELF\x00\xff",
    ],
)
def test_a_wrong_output_is_left_alone(tmp_path: Path, content: bytes) -> None:
    target = tmp_path / "out"
    target.write_bytes(content)
    with pytest.raises(UserError, match="not a record of a batch output"):
        BatchWriter(target)
    with pytest.raises(UserError, match="not a record of a batch output"):
        finished_ids(target)
    assert target.read_bytes() == content


def test_damage_in_the_middle_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(line("a") + b"\n" + line("b"))
    answer_all(source, target)
    first, second = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(first + b"damage\n" + second)
    with pytest.raises(UserError, match="line 2"):
        BatchWriter(target)
    assert target.read_bytes() == first + b"damage\n" + second


def test_output_paths_that_cannot_be(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(line("a"))
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    for path in (source, tmp_path / "link", tmp_path / "hard", tmp_path / "." / "in"):
        with pytest.raises(UserError, match="also the input"):
            BatchWriter(path, source)
    for path in (tmp_path, tmp_path / "missing" / "out", "a\0b"):
        with pytest.raises(UserError, match="output"):
            BatchWriter(path, source)
    assert source.read_bytes() == line("a")


def test_a_full_disk_is_a_user_error() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with BatchWriter("/dev/full") as writer, pytest.raises(UserError, match="space"):
        writer.write_response(BatchItem(1, "a", "/v1/completions", {}), {})
