"""Batch files: JSON lines of requests in, JSON lines of answers out, in the form of the OpenAI Batch API.

An input line is `{"custom_id": str, "method": "POST", "url": one of URLS, "body": {...}}`. Every line that is
not blank gets one output line; a line that is wrong gets a record with a 4xx status and spoils no other:
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null | {"code", "message"}}`.

Exit codes of a batch run: `EXIT_OK` when every line was answered with status 200 (this run or, after a
resume, an earlier one), `EXIT_SOME_FAILED` when at least one record holds an error, 2 for a `UserError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

from spmd.comm.errors import UserError
from spmd.openai_api import ApiError

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"
URLS: Final = (CHAT_URL, COMPLETION_URL)
EXIT_OK: Final = 0
EXIT_SOME_FAILED: Final = 1

_BOM: Final = b"\xef\xbb\xbf"
_ID_PREFIX: Final = "batch_req_"
# How every record we write begins: tells the start of a killed run's first record from a foreign file.
_RECORD_START: Final = f'{{"id": "{_ID_PREFIX}'.encode()


@dataclass(frozen=True)
class BatchItem:
    """A well-formed line: its 1-based number, and a body that nobody has looked into yet."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """As in `ApiRequest`: "chat" or "completion"."""
        return "chat" if self.url == CHAT_URL else "completion"

    @property
    def digest(self) -> str:
        """Depends on `custom_id` only, so that a rerun gives the same ids."""
        return _digest(self.custom_id)

    @property
    def record_id(self) -> str:
        return _ID_PREFIX + self.digest

    @property
    def request_id(self) -> str:
        return "req_" + self.digest

    @property
    def response_id(self) -> str:
        """The `id` for the response body."""
        return ("chatcmpl-" if self.kind == "chat" else "cmpl-") + self.digest


@dataclass(frozen=True)
class BatchFailure:
    """A line that is no request. `custom_id` is its own, or `line N` when it has none or a used one."""

    line: int
    custom_id: str
    error: ApiError
    by_line: bool  # custom_id is "line N"

    @property
    def digest(self) -> str:
        """As for `BatchItem`; lines reported by number have digests that no custom_id can have."""
        return f"line_{self.line}" if self.by_line else _digest(self.custom_id)

    @property
    def record_id(self) -> str:
        return _ID_PREFIX + self.digest

    @property
    def request_id(self) -> str:
        return "req_" + self.digest


def _digest(custom_id: str) -> str:
    return hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def read_batch(path: str | os.PathLike[str]) -> Iterator[BatchItem | BatchFailure]:
    """The requests of a batch file in order, one entry for each line that is not blank.

    Streams: one line is in memory at a time, besides the custom_ids seen. Accepts LF and CRLF, a byte-order
    mark, and a last line without newline. No line's content raises; the file is opened by the call itself,
    which raises `UserError` when it is missing, a directory or unreadable.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by _read_lines
    except (OSError, ValueError) as error:
        raise _file_error("input", path, error) from None
    return _read_lines(file, path)


def _read_lines(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[BatchItem | BatchFailure]:
    seen: set[str] = set()
    with file:
        try:
            for number, raw in enumerate(file, start=1):
                raw = raw.removeprefix(_BOM).strip()
                if raw:
                    yield _parse_line(number, raw, seen)
        except OSError as error:
            raise _file_error("input", path, error) from None


def _parse_line(number: int, raw: bytes, seen: set[str]) -> BatchItem | BatchFailure:
    custom_id: str | None = None
    try:
        line = _parse_json(raw)
        if not isinstance(line, dict):
            message = f"the line is a JSON {_json_type(line)}, expected an object"
            raise ApiError(message, code="invalid_line")
        value = line.get("custom_id")
        if not isinstance(value, str) or not value:
            found = (
                "is missing" if value is None else "is empty" if value == "" else f"is a {_json_type(value)}"
            )
            raise ApiError(f"custom_id {found}, expected a string", "custom_id", "missing_custom_id")
        if value in seen:
            message = f"custom_id {value[:80]!r} is used by an earlier line, expected a different one"
            raise ApiError(message, "custom_id", "duplicate_custom_id")
        seen.add(value)
        custom_id = value
        return BatchItem(number, custom_id, *_parse_target(line))
    except ApiError as error:
        if custom_id is None:
            return BatchFailure(number, f"line {number}", error, by_line=True)
        return BatchFailure(number, custom_id, error, by_line=False)


def _parse_json(raw: bytes) -> object:
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        message = f"the line is not UTF-8 text (byte {error.start + 1} of the line)"
        raise ApiError(message, code="invalid_encoding") from None
    except RecursionError:
        raise ApiError("the line is not valid JSON: nested too deep", code="invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"the line is not valid JSON: {error.msg} at column {error.colno}"
        raise ApiError(message, code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"the line is not valid JSON: {error}", code="invalid_json") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _parse_target(line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    method, url, body = line.get("method"), line.get("url"), line.get("body")
    if method != "POST":
        raise ApiError(f"method {_short(method)} found, expected 'POST'", "method", "invalid_method", 405)
    if url not in URLS:
        raise ApiError(
            f"url {_short(url)} found, expected one of {', '.join(URLS)}", "url", "invalid_url", 404
        )
    if not isinstance(body, dict):
        found = "is missing" if body is None else f"is a JSON {_json_type(body)}"
        raise ApiError(f"body {found}, expected an object", "body", "invalid_body")
    return url, body


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _short(value: object) -> str:
    return "missing" if value is None else repr(value[:80]) if isinstance(value, str) else _json_type(value)


class BatchWriter:
    """Appends records to an output file, each flushed as it is written; use it as a context manager.

    Opening an existing file resumes it. A last line that a killed run left unfinished is cut off, records
    with a 5xx status are removed so that their requests run again, and `is_finished` tells which entries of
    the input need nothing more. Requests are recognised by custom_id (by line number where there is none):
    a line that was mended keeps its old answer unless it gets a new custom_id or a new output file.

    Raises `UserError` when the file is not a batch output, is the input, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], input_path: str | os.PathLike[str] | None = None):
        self._path = path
        self._statuses: dict[str, int] = {}  # record id -> status, without those to be tried again
        try:
            if input_path is not None and _is_same_file(path, input_path):
                expected = "expected a different file, the input would be overwritten"
                raise UserError(f"output: {os.fspath(path)!r} is also the input, {expected}")
            # /dev/null, pipes and the like can be written but not read back.
            if os.path.exists(path) and stat.S_ISREG(os.stat(path).st_mode):
                self._resume()
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close
        except (OSError, ValueError) as error:
            raise _file_error("output", path, error) from None

    def is_finished(self, entry: BatchItem | BatchFailure) -> bool:
        """Whether the file holds this entry's final record, from an earlier run or from this one."""
        return entry.record_id in self._statuses

    def status_of(self, entry: BatchItem | BatchFailure) -> int | None:
        """Status of this entry's final record, None when there is none. All 200 is `EXIT_OK`."""
        return self._statuses.get(entry.record_id)

    def write_response(self, entry: BatchItem, body: dict[str, Any]) -> None:
        """Append the answer to `entry` with status 200."""
        self._write(entry, 200, body, None)

    def write_error(self, entry: BatchItem | BatchFailure, error: ApiError) -> None:
        """Append the record of a request that failed with `error`."""
        code = error.code or ("invalid_request" if error.status < 500 else "server_error")
        self._write(entry, error.status, error.body(), {"code": code, "message": error.message})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> BatchWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(
        self, entry: BatchItem | BatchFailure, status: int, body: dict[str, Any], error: dict[str, str] | None
    ) -> None:
        record = {
            "id": entry.record_id,
            "custom_id": entry.custom_id,
            "response": {"status_code": status, "request_id": entry.request_id, "body": body},
            "error": error,
        }
        # ASCII: any text survives, and no reader mistakes U+2028 for the end of the line.
        line = json.dumps(record, allow_nan=False).encode("ascii") + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as failure:
            raise _file_error("output", self._path, failure) from None
        if status < 500:
            self._statuses[entry.record_id] = status

    def _resume(self) -> None:
        scan = _scan_output(self._path)
        self._statuses = scan.finished
        if scan.retried:
            _rewrite_without_retried(self._path, scan.end)
        elif scan.end < os.path.getsize(self._path):
            os.truncate(self._path, scan.end)


def finished_ids(path: str | os.PathLike[str]) -> set[str]:
    """The `record_id`s that an output file answers for good: status 200 or 4xx, but not 5xx.

    They are the records' `id`, one to one with custom_ids (line numbers for lines reported by number, which
    a custom_id that happens to read "line 3" must not be mistaken for). A missing file has none. Changes
    nothing. Raises `UserError` when the file cannot be read or is not a batch output.
    """
    try:
        scan = _scan_output(path)
    except FileNotFoundError:
        return set()
    except (OSError, ValueError) as error:
        raise _file_error("output", path, error) from None
    return set(scan.finished)


@dataclass(frozen=True)
class _Scan:
    finished: dict[str, int]  # record id -> status, of all records but those with a 5xx status
    end: int  # bytes up to the end of the last whole record
    retried: bool  # some record has a 5xx status


def _scan_output(path: str | os.PathLike[str]) -> _Scan:
    finished: dict[str, int] = {}
    retried = False
    broken: int | None = None  # line number; forgiven at the very end only
    end = position = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            position += len(raw)
            found = _record_status(raw) if raw.endswith(b"\n") else None
            if broken is not None and raw.strip():
                raise _not_ours(path, broken)
            if found is not None:
                record_id, status = found
                if status < 500:
                    finished[record_id] = status
                else:
                    retried = True
                end = position
            elif raw.strip():
                broken = number
                if end == 0 and not _is_cut_record(raw):
                    raise _not_ours(path, number)
    return _Scan(finished, end, retried)


def _is_cut_record(raw: bytes) -> bool:
    length = min(len(raw), len(_RECORD_START))
    return not raw.endswith(b"\n") and raw[:length] == _RECORD_START[:length]


def _record_status(raw: bytes) -> tuple[str, int] | None:
    """The id and status of one of our records, None for any other line."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("custom_id"), str):
        return None
    record_id, response = record.get("id"), record.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    if not isinstance(record_id, str) or not record_id.startswith(_ID_PREFIX) or type(status) is not int:
        return None
    return record_id, status


def _rewrite_without_retried(path: str | os.PathLike[str], end: int) -> None:
    """Replace the file in one step: a job killed here leaves the old file whole."""
    target = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as copy, open(target, "rb") as file:
            while file.tell() < end:
                raw = file.readline()
                found = _record_status(raw)
                if found is not None and found[1] < 500:
                    copy.write(raw)
            copy.flush()
            os.fsync(copy.fileno())
        os.chmod(name, stat.S_IMODE(target.stat().st_mode))
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _is_same_file(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def _not_ours(path: str | os.PathLike[str], number: int) -> UserError:
    return UserError(
        f"output: line {number} of {os.fspath(path)!r} is not a record of a batch output, so the file is "
        "left as it is; expected a new name, or an output of an earlier run to resume"
    )


def _file_error(role: str, path: str | os.PathLike[str], error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    access = "readable" if role == "input" else "writable"
    return UserError(f"{role}: {os.fspath(path)!r}: {reason}; expected a {access} JSON lines file")
