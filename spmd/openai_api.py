"""OpenAI request bodies, checked and turned into typed requests.

Follows the OpenAI API reference (chat completions, legacy completions, errors) and vLLM's names for what that
API lacks: top_k, min_p, repetition_penalty, stop_token_ids, min_tokens, ignore_eos,
include_stop_str_in_output, skip_special_tokens, add_special_tokens, return_token_ids, chat_template_kwargs.
Where we differ: `stop` takes up to 16 strings (OpenAI 4), completions `logprobs` up to 20 (OpenAI 5),
`model` may be left out, tool calls are returned as the text the model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from spmd.comm.errors import UserError
from spmd.openai_fields import ApiError, Fields, names, show, to_float, wrong
from spmd.openai_messages import parse_messages, parse_template_kwargs
from spmd.sampling_params import SamplingParams

__all__ = ["ApiError", "ApiRequest", "parse_chat", "parse_completion"]

MAX_STOP_STRINGS: Final = 16
MAX_LOGPROBS: Final = 20
LEGACY_MAX_TOKENS: Final = 16

_COMMON_FIELDS: Final = names(
    "n max_tokens max_completion_tokens min_tokens temperature top_k top_p min_p repetition_penalty "
    "presence_penalty frequency_penalty seed logit_bias logprobs stop stop_token_ids ignore_eos "
    "include_stop_str_in_output skip_special_tokens model add_special_tokens return_token_ids"
)
_COMPLETION_FIELDS: Final = _COMMON_FIELDS | names("prompt best_of echo")
_CHAT_FIELDS: Final = _COMMON_FIELDS | names(
    "messages top_logprobs tools reasoning_effort add_generation_prompt chat_template_kwargs"
)
# Legal in the API or in vLLM but not in this version: refused by name, except null and the values listed.
UNSUPPORTED_FIELDS: Final[Mapping[str, tuple[object, ...]]] = {
    "stream": (False,),
    "stream_options": (),
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
    "echo": (False,),
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
    fields = Fields(body, _CHAT_FIELDS, {**UNSUPPORTED_FIELDS, **UNSUPPORTED_CHAT_FIELDS})
    messages = parse_messages(fields.get("messages"))
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
        template_kwargs=parse_template_kwargs(fields),
    )


def parse_completion(body: object, vocab_size: int, models: Collection[str] | None = None) -> ApiRequest:
    """Check the body of a `/v1/completions` request; arguments and errors as for `parse_chat`."""
    fields = Fields(body, _COMPLETION_FIELDS, {**UNSUPPORTED_FIELDS, **UNSUPPORTED_COMPLETION_FIELDS})
    prompts = _parse_prompts(fields.get("prompt"), vocab_size)
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    if logprobs is not None:
        logprobs = min(logprobs, vocab_size)
    echo = fields.boolean("echo", False)
    params = _parse_sampling(fields, vocab_size, LEGACY_MAX_TOKENS, logprobs, logprobs if echo else None)
    best_of = fields.integer("best_of", params.n, 1)
    if best_of != params.n:
        raise wrong("best_of", best_of, f"the same as n ({params.n}), others are not supported")
    return ApiRequest(
        kind="completion",
        prompts=prompts,
        messages=None,
        params=params,
        model=_parse_model(fields, models),
        echo=echo,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        return_token_ids=fields.boolean("return_token_ids", False),
    )


def _parse_sampling(
    fields: Fields,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    limits = [fields.integer(name, None, 0) for name in ("max_tokens", "max_completion_tokens")]
    given = {limit for limit in limits if limit is not None}
    if len(given) > 1:
        raise wrong("max_completion_tokens", limits[1], f"the same as max_tokens ({limits[0]}), or only one")
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
        prompt_logprobs=prompt_logprobs,
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
        raise wrong("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    return params


def _parse_model(fields: Fields, models: Collection[str] | None) -> str | None:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong("model", model, "a string")
    if model is not None and models is not None and model not in models:
        message = f"model: {show(model)} does not exist, expected one of {', '.join(sorted(models))}"
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
    raise wrong("prompt", value, expected)


def _parse_ids(name: str, ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, list):
        raise wrong(name, ids, "a list of token ids")
    for value in ids:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise wrong(name, value, f"a token id of this model, 0 to {vocab_size - 1}")
    return list(ids)


def _parse_stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong("stop", value, "a non-empty string or a list of them")
    if len(stops) > MAX_STOP_STRINGS:
        raise ApiError(f"stop: {len(stops)} strings, expected at most {MAX_STOP_STRINGS}", "stop")
    return tuple(stops)


def _parse_stop_token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    return () if value is None else tuple(_parse_ids("stop_token_ids", value, vocab_size))


def _parse_logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("logit_bias", value, "an object of token id to bias")
    for key in value:
        if not re.fullmatch(r"0|-?[1-9][0-9]{0,18}", key):
            raise wrong("logit_bias", key, "token ids as keys")
    return {int(key): to_float("logit_bias", bias) for key, bias in value.items()}
