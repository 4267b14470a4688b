"""Typed access to the fields of an OpenAI request body, and the error that names the one that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Any, Final

from spmd.comm.errors import UserError

_MAX_DEPTH: Final = 64


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Accepted with any value and without effect on the answer.
_HARMLESS_FIELDS: Final = names(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention prediction parallel_tool_calls priority request_id cache_salt"
)


class ApiError(UserError):
    """A request that is answered with an HTTP error. `param` names the field, `code` is for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """The error body of the API: `{"error": {"message", "type", "param", "code"}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Fields:
    """Typed access to a request body. Null is the same as absent, as in the API."""

    def __init__(self, body: object, known: frozenset[str], unsupported: Mapping[str, tuple[object, ...]]):
        if not isinstance(body, dict):
            raise ApiError(f"the request body is {show(body)}, expected a JSON object")
        unknown = sorted(set(body) - known - _HARMLESS_FIELDS - set(unsupported))
        if unknown:
            plural = "s" if len(unknown) > 1 else ""
            listed = ", ".join(show(name)[1:-1] for name in unknown[:10])
            raise ApiError(f"Unrecognized request argument{plural} supplied: {listed}", unknown[0][:80])
        check_strings(body)
        for name, neutral in unsupported.items():
            value = body.get(name)
            if value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral):
                message = f"{name}: {show(value)} is not supported by this version"
                raise ApiError(message, name, "unsupported")
        self._body = body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def integer(self, name: str, default: Any, low: int = -(2**63), high: int = 2**64 - 1) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is not int:
            raise wrong(name, value, "an integer")
        if not low <= value <= high:
            raise wrong(name, value, f"at least {low}" if high >= 2**63 else f"between {low} and {high}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._body.get(name)
        return default if value is None else to_float(name, value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value


def to_float(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise wrong(name, value, "a number of ordinary size") from None


def check_strings(body: dict[str, Any]) -> None:
    """Refuse lone surrogates, which JSON can spell and no tokenizer can encode, and endless nesting."""
    pending: list[tuple[str, object, int]] = [(name, value, 1) for name, value in body.items()]
    while pending:
        name, value, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise ApiError(f"{name}: nested deeper than {_MAX_DEPTH} levels", name)
        if isinstance(value, str):
            if not value.isascii() and re.search("[\ud800-\udfff]", value):
                raise ApiError(f"{name}: holds half of a surrogate pair, which is not text", name)
        elif isinstance(value, (list, dict)):
            inner = value if isinstance(value, list) else [*value, *value.values()]
            pending.extend((name, v, depth + 1) for v in inner if isinstance(v, (str, list, dict)))


def wrong(name: str, value: object, expected: str) -> ApiError:
    return ApiError(f"{name}: {show(value)} found, expected {expected}", name)


def show(value: object) -> str:
    """A value as it stands in the request, cut short: a prompt can be megabytes."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    shortener = Repr()
    shortener.maxstring = 80
    return shortener.repr(value)
