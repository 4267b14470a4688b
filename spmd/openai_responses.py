"""Results of the engine as OpenAI response bodies."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Final

from spmd.openai_api import ApiRequest
from spmd.outputs import CompletionOutput, RequestOutput, TokenLogprob

TokenText = Callable[[int], "str | bytes"]

# The API's value for a token that is too unlikely to say how much; JSON has no minus infinity.
MIN_LOGPROB: Final = -9999.0


def chat_response(
    request: ApiRequest,
    output: RequestOutput,
    *,
    response_id: str,
    model: str,
    created: int,
    token_text: TokenText | None = None,
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
        "usage": _usage([output]),
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
) -> dict[str, Any]:
    """The `text_completion` object for a completion request: `outputs` has one entry a prompt, in order.

    Choice `i * n + j` is completion j of prompt i. Other arguments as for `chat_response`; `token_ids` are
    given as well when the prompt was ids. `text` is "" for a model without tokenizer. With `echo` the text
    and the logprobs begin with the prompt's, whose first token has no logprob (null).
    """
    choices = []
    for i, output in enumerate(outputs):
        for completion in output.outputs:
            echoed = (output.prompt or "") if request.echo else ""
            choice: dict[str, Any] = {
                "text": echoed + (completion.text or ""),
                "index": i * request.params.n + completion.index,
                "logprobs": None,
                "finish_reason": completion.finish_reason,
            }
            if completion.logprobs is not None:
                entries: list[TokenLogprob | None] = list(completion.logprobs)
                start = len(output.prompt or "")
                if request.echo and output.prompt_logprobs is not None:
                    entries, start = [*output.prompt_logprobs, *entries], 0
                choice["logprobs"] = _completion_logprobs(
                    entries, output.prompt_token_ids[0], token_text, start, bool(request.params.logprobs)
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
        "usage": _usage(outputs),
    }


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
    entries: Sequence[TokenLogprob | None],
    first_id: int,
    token_text: TokenText | None,
    start: int,
    with_top: bool,
) -> dict[str, Any]:
    """Legacy form. An entry None stands for the prompt's first token, `first_id`. `text_offset` counts
    characters from the start of the prompt. The sampled token is always among the top ones, so there are
    up to `logprobs + 1`; top_logprobs is null when none were asked for."""
    tokens: list[str] = []
    offsets: list[int] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offset = start
    for entry in entries:
        token, raw = _token(first_id if entry is None else entry.token_id, token_text)
        tokens.append(token)
        offsets.append(offset)
        if token_text is not None:
            offset += len(token) if raw is None else len(decoder.decode(raw))
        logprobs.append(None if entry is None else max(entry.logprob, MIN_LOGPROB))
        tops.append(None if entry is None else _top_logprobs(entry, token_text))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops if with_top else None,
        "text_offset": offsets,
    }


def _top_logprobs(entry: TokenLogprob, token_text: TokenText | None) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(_token(token_id, token_text)[0], max(logprob, MIN_LOGPROB))
    return top


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens as they ran: each prompt counted once however many completions it has, BOS included."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(output.completion_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
    }
