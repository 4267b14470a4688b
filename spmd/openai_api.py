"""The OpenAI API on both sides of the engine: request bodies to typed requests, results to response bodies.

Follows the OpenAI API reference (chat completions, legacy completions, errors) and vLLM's names for what that
API lacks: top_k, min_p, repetition_penalty, stop_token_ids, min_tokens, ignore_eos,
include_stop_str_in_output, skip_special_tokens, add_special_tokens, return_token_ids, chat_template_kwargs.
Where we differ: `stop` takes up to 16 strings (OpenAI 4), completions `logprobs` up to 20 (OpenAI 5),
`model` may be left out, tool calls are returned as the text the model wrote.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any, Final

from spmd.comm.errors import UserError
from spmd.outputs import CompletionOutput, RequestOutput, TokenLogprob
from spmd.sampling_params import SamplingParams

TokenText = Callable[[int], "str | bytes"]

MAX_STOP_STRINGS: Final = 16
MAX_LOGPROBS: Final = 20
LEGACY_MAX_TOKENS: Final = 16
# The API's value for a token that is too unlikely to say how much; JSON has no minus infinity.
MIN_LOGPROB: Final = -9999.0
_MAX_DEPTH: Final = 64


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMMON_FIELDS: Final = _names(
    "n max_tokens max_completion_tokens min_tokens temperature top_k top_p min_p repetition_penalty "
    "presence_penalty frequency_penalty seed logit_bias logprobs stop stop_token_ids ignore_eos "
    "include_stop_str_in_output skip_special_tokens model add_special_tokens return_token_ids"
)
_COMPLETION_FIELDS: Final = _COMMON_FIELDS | _names("prompt best_of")
_CHAT_FIELDS: Final = _COMMON_FIELDS | _names(
    "messages top_logprobs tools reasoning_effort add_generation_prompt chat_template_kwargs"
)
# Accepted with any value and without effect on the answer.
_HARMLESS_FIELDS: Final = _names(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention prediction parallel_tool_calls priority request_id cache_salt"
)
# Legal in the API or in vLLM but not in this version: refused by name, except null and the values listed.
UNSUPPORTED_FIELDS: Final[Mapping[str, tuple[object, ...]]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "return_tokens_as_token_ids": (False,),
}
UNSUPPORTED_COMPLETION_FIELDS: Final[Mapping[str, tuple[object, ...]]] = {"suffix": ("",)}
UNSUPPORTED_CHAT_FIELDS: Final[Mapping[str, tuple[object, ...]]] = {
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "verbosity": ("medium",),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
}
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
# What the renderer itself passes to a template; a request must not give them a second time.
_RESERVED_TEMPLATE_KWARGS: Final = _names(
    "messages conversation tools tokenize chat_template add_generation_prompt continue_final_message"
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


@dataclass
class ApiRequest:
    """One parsed request body.

    `prompts` is empty for chat; for completions it holds one entry a prompt, text or token ids.
    `messages` is None for completions; for chat every `content` is a string (text parts joined, absent
    content of a tool call empty) and tool-call `arguments` are objects, which is what templates expect.
    `template_kwargs` are keyword arguments for the chat template; `tools`, `reasoning_effort` and
    `add_generation_prompt` are among them when the request gave them.
    """

    kind: str  # "chat" or "completion"
    prompts: list[str | list[int]]
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    model: str | None = None
    echo: bool = False
    add_special_tokens: bool = True
    return_token_ids: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def parse_chat(body: object, vocab_size: int, models: Collection[str] | None = None) -> ApiRequest:
    """Check the body of a `/v1/chat/completions` request.

    `vocab_size` bounds every token id. `models`, when given, are the names served (404 for others).
    Raises `ApiError` naming the first field that is wrong; never anything else, whatever JSON it is given.
    """
    fields = _Fields(body, _CHAT_FIELDS, {**UNSUPPORTED_FIELDS, **UNSUPPORTED_CHAT_FIELDS})
    messages = _parse_messages(fields.get("messages"))
    logprobs = None
    top_logprobs = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if fields.boolean("logprobs", False):
        logprobs = min(top_logprobs, vocab_size)
    elif top_logprobs:
        raise ApiError("top_logprobs: 'logprobs' must be true to use it", "top_logprobs")
    return ApiRequest(
        kind="chat",
        prompts=[],
        messages=messages,
        params=_parse_sampling(fields, vocab_size, None, logprobs),
        model=_parse_model(fields, models),
        add_special_tokens=fields.boolean("add_special_tokens", False),
        return_token_ids=fields.boolean("return_token_ids", False),
        template_kwargs=_parse_template_kwargs(fields),
    )


def parse_completion(body: object, vocab_size: int, models: Collection[str] | None = None) -> ApiRequest:
    """Check the body of a `/v1/completions` request; arguments and errors as for `parse_chat`."""
    fields = _Fields(body, _COMPLETION_FIELDS, {**UNSUPPORTED_FIELDS, **UNSUPPORTED_COMPLETION_FIELDS})
    prompts = _parse_prompts(fields.get("prompt"), vocab_size)
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    if logprobs is not None:
        logprobs = min(logprobs, vocab_size)
    params = _parse_sampling(fields, vocab_size, LEGACY_MAX_TOKENS, logprobs)
    best_of = fields.integer("best_of", params.n, 1)
    if best_of != params.n:
        raise _wrong("best_of", best_of, f"the same as n ({params.n}), others are not supported")
    return ApiRequest(
        kind="completion",
        prompts=prompts,
        messages=None,
        params=params,
        model=_parse_model(fields, models),
        add_special_tokens=fields.boolean("add_special_tokens", True),
        return_token_ids=fields.boolean("return_token_ids", False),
    )


def chat_response(
    request: ApiRequest,
    output: RequestOutput,
    *,
    response_id: str,
    model: str,
    created: int,
    token_text: TokenText | None = None,
    cached_tokens: int = 0,
) -> dict[str, Any]:
    """The `chat.completion` object for one finished chat request.

    `created` is in Unix seconds. `token_text` gives a token's text, or its bytes, which alone can tell
    a piece of a multi-byte character; None for a model without tokenizer, whose tokens read `token_id:N`.
    Choices hold `token_ids` as well when the request asked for them or there is no tokenizer.
    """
    choices = []
    for completion in output.outputs:
        logprobs = None
        if completion.logprobs is not None:
            content = [_chat_logprob(entry, token_text) for entry in completion.logprobs]
            logprobs = {"content": content, "refusal": None}
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text or "", "refusal": None},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        if _wants_token_ids(request, completion, token_text):
            choice["token_ids"] = list(completion.token_ids)
        choices.append(choice)
    response = {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": _usage([output], cached_tokens),
    }
    if request.return_token_ids:
        response["prompt_token_ids"] = list(output.prompt_token_ids)
    return response


def completion_response(
    request: ApiRequest,
    outputs: Sequence[RequestOutput],
    *,
    response_id: str,
    model: str,
    created: int,
    token_text: TokenText | None = None,
    cached_tokens: int = 0,
) -> dict[str, Any]:
    """The `text_completion` object for a completion request: `outputs` has one entry a prompt, in order.

    Choice `i * n + j` is completion j of prompt i. Other arguments as for `chat_response`; `token_ids` are
    given as well when the prompt was ids. `text` is "" for a model without tokenizer.
    """
    choices = []
    for i, output in enumerate(outputs):
        for completion in output.outputs:
            choice: dict[str, Any] = {
                "text": completion.text or "",
                "index": i * request.params.n + completion.index,
                "logprobs": None,
                "finish_reason": completion.finish_reason,
            }
            if completion.logprobs is not None:
                start = len(output.prompt or "")
                choice["logprobs"] = _completion_logprobs(
                    completion.logprobs, token_text, start, bool(request.params.logprobs)
                )
            if _wants_token_ids(request, completion, token_text):
                choice["token_ids"] = list(completion.token_ids)
            if request.return_token_ids:
                choice["prompt_token_ids"] = list(output.prompt_token_ids)
            choices.append(choice)
    return {
        "id": response_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": _usage(outputs, cached_tokens),
    }


class _Fields:
    """Typed access to a request body. Null is the same as absent, as in the API."""

    def __init__(self, body: object, known: frozenset[str], unsupported: Mapping[str, tuple[object, ...]]):
        if not isinstance(body, dict):
            raise ApiError(f"the request body is {_show(body)}, expected a JSON object")
        unknown = sorted(set(body) - known - _HARMLESS_FIELDS - set(unsupported))
        if unknown:
            plural = "s" if len(unknown) > 1 else ""
            listed = ", ".join(_show(name)[1:-1] for name in unknown[:10])
            raise ApiError(f"Unrecognized request argument{plural} supplied: {listed}", unknown[0][:80])
        _check_strings(body)
        for name, neutral in unsupported.items():
            value = body.get(name)
            if value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral):
                message = f"{name}: {_show(value)} is not supported by this version"
                raise ApiError(message, name, "unsupported")
        self._body = body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def integer(self, name: str, default: Any, low: int = -(2**63), high: int = 2**64 - 1) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is not int:
            raise _wrong(name, value, "an integer")
        if not low <= value <= high:
            raise _wrong(name, value, f"at least {low}" if high >= 2**63 else f"between {low} and {high}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._body.get(name)
        return default if value is None else _to_float(name, value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value


def _parse_sampling(
    fields: _Fields, vocab_size: int, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    limits = [fields.integer(name, None, 0) for name in ("max_tokens", "max_completion_tokens")]
    given = {limit for limit in limits if limit is not None}
    if len(given) > 1:
        raise _wrong("max_completion_tokens", limits[1], f"the same as max_tokens ({limits[0]}), or only one")
    params = SamplingParams(
        n=fields.integer("n", 1),
        max_tokens=given.pop() if given else max_tokens,
        min_tokens=fields.integer("min_tokens", 0, 0),
        temperature=fields.number("temperature", 1.0),
        # More than the vocabulary is the same as all of it, and always fits the sampler's integers.
        top_k=min(fields.integer("top_k", 0), vocab_size),
        top_p=fields.number("top_p", 1.0),
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        seed=fields.integer("seed", None),
        logit_bias=_parse_logit_bias(fields.get("logit_bias")),
        logprobs=logprobs,
        stop=_parse_stop(fields.get("stop")),
        stop_token_ids=_parse_stop_token_ids(fields.get("stop_token_ids"), vocab_size),
        ignore_eos=fields.boolean("ignore_eos", False),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )
    try:
        params.validate(vocab_size)
    except UserError as error:
        name = re.match(r"\w*", str(error))
        raise ApiError(str(error), name.group() if name else None) from None
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _wrong("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    return params


def _parse_model(fields: _Fields, models: Collection[str] | None) -> str | None:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise _wrong("model", model, "a string")
    if model is not None and models is not None and model not in models:
        message = f"model: {_show(model)} does not exist, expected one of {', '.join(sorted(models))}"
        raise ApiError(message, "model", "model_not_found", 404)
    return model


def _parse_prompts(value: object, vocab_size: int) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(isinstance(item, list) and item for item in value):
            return [_parse_ids("prompt", ids, vocab_size) for ids in value]
        if not any(isinstance(item, (str, list)) for item in value):
            return [_parse_ids("prompt", value, vocab_size)]
    expected = "a string, a list of token ids, a list of strings or a list of lists of ids, none empty"
    raise _wrong("prompt", value, expected)


def _parse_ids(name: str, ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, list):
        raise _wrong(name, ids, "a list of token ids")
    for value in ids:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise _wrong(name, value, f"a token id of this model, 0 to {vocab_size - 1}")
    return list(ids)


def _parse_stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong("stop", value, "a non-empty string or a list of them")
    if len(stops) > MAX_STOP_STRINGS:
        raise ApiError(f"stop: {len(stops)} strings, expected at most {MAX_STOP_STRINGS}", "stop")
    return tuple(stops)


def _parse_stop_token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    return () if value is None else tuple(_parse_ids("stop_token_ids", value, vocab_size))


def _parse_logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong("logit_bias", value, "an object of token id to bias")
    for key in value:
        if not re.fullmatch(r"0|-?[1-9][0-9]{0,18}", key):
            raise _wrong("logit_bias", key, "token ids as keys")
    return {int(key): _to_float("logit_bias", bias) for key, bias in value.items()}


def _parse_messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", value, "a non-empty list of messages")
    return [_parse_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _parse_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(where, message, "an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    result = {key: value for key, value in message.items() if value is not None}
    content = result.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif content is None and role == "assistant" and ("tool_calls" in result or "function_call" in result):
        content = ""  # templates print a null content as "None"
    elif not isinstance(content, str):
        raise _wrong(f"{where}.content", content, "a string or a list of text parts")
    result["content"] = content
    if "tool_calls" in result:
        calls = result["tool_calls"]
        if not isinstance(calls, list):
            raise _wrong(f"{where}.tool_calls", calls, "a list")
        result["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return result


def _part_text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "refusal"):
        raise _wrong(f"{where}.type", kind, "'text', the only supported type of part")
    text = part.get(kind)
    if not isinstance(text, str):
        raise _wrong(f"{where}.{kind}", text, "a string")
    return text


def _tool_call(where: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or not _is_named_function(call.get("function")):
        raise _wrong(where, call, "an object with a function that has a name")
    function = call["function"]
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        parsed = None
    where = f"{where}.function.arguments"
    if not isinstance(parsed, dict):
        raise _wrong(where, arguments, "the text of a JSON object")
    _check_strings({where: parsed})
    return {**call, "function": {**function, "arguments": parsed}}


def _is_named_function(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _parse_template_kwargs(fields: _Fields) -> dict[str, Any]:
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise _wrong("chat_template_kwargs", given, "an object")
    kwargs: dict[str, Any] = dict(given or {})
    reserved = sorted(_RESERVED_TEMPLATE_KWARGS & set(kwargs))
    if reserved:
        message = f"chat_template_kwargs: {reserved[0]!r} cannot be set here"
        raise ApiError(message, "chat_template_kwargs")
    tools = fields.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise _wrong("tools", tools, "a list")
        for i, tool in enumerate(tools):
            if not isinstance(tool, dict) or not _is_named_function(tool.get("function")):
                raise _wrong(f"tools[{i}]", tool, "an object with a function that has a name")
        if tools and fields.get("tool_choice") != "none":
            kwargs["tools"] = tools
    effort = fields.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise _wrong("reasoning_effort", effort, "a string")
        kwargs["reasoning_effort"] = effort
    if not fields.boolean("add_generation_prompt", True):
        kwargs["add_generation_prompt"] = False
    return kwargs


def _to_float(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _wrong(name, value, "a number of ordinary size") from None


def _check_strings(body: dict[str, Any]) -> None:
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


def _wrong(name: str, value: object, expected: str) -> ApiError:
    return ApiError(f"{name}: {_show(value)} found, expected {expected}", name)


def _show(value: object) -> str:
    """A value as it stands in the request, cut short: a prompt can be megabytes."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    shortener = Repr()
    shortener.maxstring = 80
    return shortener.repr(value)


def _wants_token_ids(request: ApiRequest, output: CompletionOutput, token_text: TokenText | None) -> bool:
    given_ids = any(isinstance(prompt, list) for prompt in request.prompts)
    return request.return_token_ids or given_ids or token_text is None or output.text is None


def _token(token_id: int, token_text: TokenText | None) -> tuple[str, bytes | None]:
    """A token's text and its bytes; the bytes are None when only a lossy text is known."""
    text = f"token_id:{token_id}" if token_text is None else token_text(token_id)
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8"), text
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text), text
    return text, None if token_text is None or "\ufffd" in text else text.encode("utf-8")


def _chat_entry(token_id: int, logprob: float, token_text: TokenText | None) -> dict[str, Any]:
    token, raw = _token(token_id, token_text)
    return {
        "token": token,
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": None if raw is None else list(raw),
    }


def _chat_logprob(entry: TokenLogprob, token_text: TokenText | None) -> dict[str, Any]:
    top = [_chat_entry(token_id, logprob, token_text) for token_id, logprob in entry.top]
    return {**_chat_entry(entry.token_id, entry.logprob, token_text), "top_logprobs": top}


def _completion_logprobs(
    entries: Sequence[TokenLogprob], token_text: TokenText | None, start: int, with_top: bool
) -> dict[str, Any]:
    """Legacy form. `text_offset` counts characters from the start of the prompt. The sampled token is always
    among the top ones, so there are up to `logprobs + 1`; top_logprobs is null when none were asked for."""
    tokens, offsets, tops = [], [], []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offset = start
    for entry in entries:
        token, raw = _token(entry.token_id, token_text)
        tokens.append(token)
        offsets.append(offset)
        if token_text is not None:
            offset += len(token) if raw is None else len(decoder.decode(raw))
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(_token(token_id, token_text)[0], max(logprob, MIN_LOGPROB))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in entries],
        "top_logprobs": tops if with_top else None,
        "text_offset": offsets,
    }


def _usage(outputs: Sequence[RequestOutput], cached_tokens: int) -> dict[str, Any]:
    """Tokens as they ran: each prompt counted once however many completions it has, BOS included."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(output.completion_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
