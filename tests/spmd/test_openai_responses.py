"""Response bodies of the OpenAI API, written out from its reference."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from spmd.openai_api import ApiRequest, parse_chat, parse_completion
from spmd.openai_responses import chat_response, completion_response
from spmd.outputs import CompletionOutput, RequestOutput, TokenLogprob

VOCAB = 128


def chat(**fields: Any) -> ApiRequest:
    return parse_chat({"messages": [{"role": "user", "content": "Hello"}], **fields}, VOCAB)


def completion(**fields: Any) -> ApiRequest:
    return parse_completion({"prompt": "Hello", **fields}, VOCAB)


TOKENS = {1: "Hel", 2: "lo", 3: "!", 4: "."}


def output(n: int = 1, prompt: str | None = "Say", text: str | None = "Hello") -> RequestOutput:
    logprobs = [TokenLogprob(1, -0.5, ((1, -0.5), (3, -1.5))), TokenLogprob(2, -3.0, ((4, -0.1), (3, -2.0)))]
    outputs = [CompletionOutput(i, [1, 2], text, "length", logprobs=logprobs) for i in range(n)]
    return RequestOutput("r", prompt, [7, 8, 9], outputs)


def test_chat_response_as_in_the_reference() -> None:
    request = chat(logprobs=True, top_logprobs=2)
    response = chat_response(
        request, output(), response_id="chatcmpl-1", model="m", created=17, token_text=TOKENS.__getitem__
    )
    assert response == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 17,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": {
                    "content": [
                        {
                            "token": "Hel",
                            "logprob": -0.5,
                            "bytes": [72, 101, 108],
                            "top_logprobs": [
                                {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108]},
                                {"token": "!", "logprob": -1.5, "bytes": [33]},
                            ],
                        },
                        {
                            "token": "lo",
                            "logprob": -3.0,
                            "bytes": [108, 111],
                            "top_logprobs": [
                                {"token": ".", "logprob": -0.1, "bytes": [46]},
                                {"token": "!", "logprob": -2.0, "bytes": [33]},
                            ],
                        },
                    ],
                    "refusal": None,
                },
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_completion_response_as_in_the_reference() -> None:
    response = completion_response(
        completion(logprobs=2),
        [replace(output(), cached_tokens=2)],
        response_id="cmpl-1",
        model="m",
        created=17,
        token_text=TOKENS.__getitem__,
    )
    assert response == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 17,
        "model": "m",
        "choices": [
            {
                "text": "Hello",
                "index": 0,
                "logprobs": {
                    "tokens": ["Hel", "lo"],
                    "token_logprobs": [-0.5, -3.0],
                    # "up to logprobs+1 elements": the sampled token is always there
                    "top_logprobs": [{"Hel": -0.5, "!": -1.5}, {".": -0.1, "!": -2.0, "lo": -3.0}],
                    # counted from the start of the prompt, "Say"
                    "text_offset": [3, 6],
                },
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def respond(request: ApiRequest, outputs: list[RequestOutput], token_text: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {"response_id": "x", "model": "m", "created": 0, "token_text": token_text}
    if request.kind == "chat":
        return chat_response(request, outputs[0], **keys)
    return completion_response(request, outputs, **keys)


def test_choices_and_usage_of_several_prompts() -> None:
    response = respond(completion(prompt=["a", "b"], n=2), [output(n=2), output(n=2)], TOKENS.__getitem__)
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    # Each prompt's 3 tokens count once, not once a completion.
    assert response["usage"]["prompt_tokens"] == 6
    assert response["usage"]["completion_tokens"] == 8
    assert response["usage"]["total_tokens"] == 14


def test_logprobs_zero_gives_no_top() -> None:
    result = output()
    result.outputs[0].logprobs = [TokenLogprob(1, -0.5)]
    response = respond(completion(logprobs=0), [result], TOKENS.__getitem__)
    expected = {"tokens": ["Hel"], "token_logprobs": [-0.5], "top_logprobs": None, "text_offset": [3]}
    assert response["choices"][0]["logprobs"] == expected
    result = respond(chat(logprobs=True), [result], TOKENS.__getitem__)["choices"][0]["logprobs"]
    assert result["content"][0]["top_logprobs"] == []


def test_pieces_of_a_character_keep_their_bytes() -> None:
    pieces = {1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"x", 4: b"y"}
    result = output()
    result.outputs[0].logprobs = [TokenLogprob(i, -0.5) for i in (1, 2, 3)]
    content = respond(chat(logprobs=True), [result], pieces.__getitem__)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "x"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "éx"
    logprobs = respond(completion(logprobs=0), [result], pieces.__getitem__)["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [3, 3, 4]
    # A text that already lost the bytes says so.
    lossy = respond(chat(logprobs=True), [result], lambda token_id: "\ufffd")["choices"][0]["logprobs"]
    assert [entry["bytes"] for entry in lossy["content"]] == [None] * 3


def test_minus_infinity_becomes_what_the_api_says() -> None:
    result = output()
    result.outputs[0].logprobs = [TokenLogprob(1, -math.inf, ((2, 0.0), (3, -math.inf)))]
    for request in (chat(logprobs=True, top_logprobs=2), completion(logprobs=2)):
        text = json.dumps(respond(request, [result], TOKENS.__getitem__), allow_nan=False)
        assert "-9999.0" in text


def test_a_model_without_tokenizer() -> None:
    request = completion(prompt=[7, 8, 9], logprobs=1)
    choice = respond(request, [output(prompt=None, text=None)], None)["choices"][0]
    assert choice["text"] == ""
    assert choice["token_ids"] == [1, 2]
    assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:1": -0.5, "token_id:3": -1.5}


def test_when_token_ids_are_given() -> None:
    text = TOKENS.__getitem__
    assert "token_ids" not in respond(completion(), [output()], text)["choices"][0]
    assert respond(completion(prompt=[7, 8, 9]), [output()], text)["choices"][0]["token_ids"] == [1, 2]
    choice = respond(completion(return_token_ids=True), [output()], text)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8, 9], [1, 2])
    response = respond(chat(return_token_ids=True), [output()], text)
    assert (response["prompt_token_ids"], response["choices"][0]["token_ids"]) == ([7, 8, 9], [1, 2])


def test_no_new_tokens() -> None:
    result = RequestOutput("r", "Say", [7, 8, 9], [CompletionOutput(0, [], "", "length", logprobs=[])])
    response = respond(completion(max_tokens=0, logprobs=1), [result], TOKENS.__getitem__)
    assert response["choices"][0]["text"] == ""
    assert response["choices"][0]["logprobs"] == {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    assert response["usage"]["completion_tokens"] == 0


def test_echo_repeats_the_prompt_with_its_logprobs() -> None:
    request = completion(echo=True, logprobs=1, max_tokens=2)
    assert request.params.prompt_logprobs == 1
    assert completion(echo=True).params.prompt_logprobs is None
    scored = replace(
        output(),
        prompt_token_ids=[3, 1],
        prompt=TOKENS[3] + TOKENS[1],
        prompt_logprobs=[None, TokenLogprob(1, -0.5, ((1, -0.5),))],
    )
    plain = completion_response(
        completion(logprobs=1), [scored], response_id="a", model="m", created=1, token_text=TOKENS.__getitem__
    )["choices"][0]
    choice = completion_response(
        request, [scored], response_id="a", model="m", created=1, token_text=TOKENS.__getitem__
    )["choices"][0]
    assert choice["text"] == scored.prompt + plain["text"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [TOKENS[3], TOKENS[1], *plain["logprobs"]["tokens"]]
    assert logprobs["token_logprobs"] == [None, -0.5, *plain["logprobs"]["token_logprobs"]]
    assert logprobs["top_logprobs"][:2] == [None, {TOKENS[1]: -0.5}]
    assert logprobs["text_offset"][:2] == [0, len(TOKENS[3])]
    assert logprobs["text_offset"][2:] == plain["logprobs"]["text_offset"]
