"""Request bodies of the OpenAI API; the ranges are those of its reference."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.comm.errors import UserError
from spmd.openai_api import ApiError, ApiRequest, parse_chat, parse_completion
from spmd.sampling_params import SamplingParams

VOCAB = 128
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ApiRequest:
    return parse_chat({"messages": HELLO, **fields}, VOCAB)


def completion(**fields: Any) -> ApiRequest:
    return parse_completion({"prompt": "Hello", **fields}, VOCAB)


def refused(parse: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert isinstance(caught.value, UserError)
    return caught.value


def test_a_full_chat_request() -> None:
    body = json.loads("""{
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "n": 2, "max_completion_tokens": 7, "min_tokens": 1, "temperature": 0.5, "top_k": 4, "top_p": 0.9,
        "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -1, "frequency_penalty": 2, "seed": 3,
        "logit_bias": {"5": 100, "127": -100.0}, "logprobs": true, "top_logprobs": 3, "stop": "END",
        "stop_token_ids": [0, 127], "ignore_eos": true, "include_stop_str_in_output": true,
        "skip_special_tokens": false, "add_special_tokens": true, "return_token_ids": true,
        "chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "low",
        "user": "me", "metadata": {"a": "b"}, "store": false, "stream": false, "tools": null, "audio": null,
        "response_format": {"type": "text"}, "stream_options": null
    }""")
    request = parse_chat(body, VOCAB, models=["m"])
    assert request.params == SamplingParams(
        n=2,
        max_tokens=7,
        min_tokens=1,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        seed=3,
        logit_bias={5: 100.0, 127: -100.0},
        logprobs=3,
        stop=("END",),
        stop_token_ids=(0, 127),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    assert (request.kind, request.model, request.prompts) == ("chat", "m", [])
    assert request.messages == body["messages"]
    assert request.add_special_tokens
    assert request.return_token_ids
    assert request.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


def test_defaults_are_those_of_the_api() -> None:
    assert chat().params == SamplingParams()
    assert completion().params == SamplingParams(max_tokens=16)
    # The template writes BOS for chat, the tokenizer for completions.
    assert not chat().add_special_tokens
    assert completion().add_special_tokens
    fields = [
        "model",
        "n",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "logit_bias",
        "logprobs",
        "echo",
    ]
    nulls = dict.fromkeys(fields)
    assert completion(**nulls) == completion()
    assert chat(**nulls, top_logprobs=None) == chat()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([0, 127], [[0, 127]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [[1], []], ["a", 1], [1, "a"], [[1], "a"], [1.0], [True], {}, 5]
)
def test_what_is_not_a_prompt(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).param == "prompt"


# C30: -1, V, 2^31 and "abc", wherever a request holds token ids
@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, "abc"])
def test_ids_outside_the_vocabulary(bad: Any) -> None:
    for parse in (chat, completion):
        for fields in ({"logit_bias": {str(bad): 1}}, {"stop_token_ids": [1, bad]}):
            error = refused(parse, **fields)
            assert (error.status, error.param) == (400, next(iter(fields)))
            assert str(bad) in error.message
    for prompt in ([1, bad], [[1], [2, bad]]):
        error = refused(completion, prompt=prompt)
        assert (error.status, error.param) == (400, "prompt")
    assert completion(logit_bias={"0": 100, "127": -100}).params.logit_bias == {0: 100.0, 127: -100.0}


@pytest.mark.parametrize("key", ["", " 5", "+5", "05", "5.0", "1_0", "٥", "9" * 5000])
def test_logit_bias_keys_that_python_alone_would_read(key: str) -> None:
    assert refused(chat, logit_bias={key: 1}).param == "logit_bias"


# C37
def test_max_tokens() -> None:
    assert completion().params.max_tokens == 16
    assert chat().params.max_tokens is None
    for name in ("max_tokens", "max_completion_tokens"):
        for parse in (chat, completion):
            for value in (0, 1, 10**9):
                assert parse(**{name: value}).params.max_tokens == value
            for value in (-1, 1.5, "1", True):
                error = refused(parse, **{name: value})
                assert (error.status, error.param) == (400, name)
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    refused(chat, max_tokens=5, max_completion_tokens=6)
    assert refused(chat, max_tokens=5, min_tokens=6).param == "min_tokens"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, 129, 1.0, "1"]),
        ("temperature", [-0.1, "hot", True, math.inf, math.nan, 10**400]),
        ("top_p", [0, 1.1]),
        ("top_k", [-2, 0.5]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1]),
        ("seed", [1.5, 2**64, "a"]),
        ("min_tokens", [-1]),
        ("stop", ["", [""], [1], 5, {}, ["a"] * 17]),
        ("stop_token_ids", [5, {}, "", False, [1.0], [True]]),
        ("logit_bias", [[], "x", {"5": 101}, {"5": "1"}, {"5": None}, {"5": 10**400}]),
        ("ignore_eos", [1, "true"]),
        ("model", [5, {}]),
    ],
)
def test_wrong_values_name_their_field(name: str, values: list[Any]) -> None:
    for parse in (chat, completion):
        for value in values:
            error = refused(parse, **{name: value})
            assert (error.status, error.param) == (400, name), value
            assert error.message.startswith(name)


def test_top_k_beyond_the_vocabulary_is_all_of_it() -> None:
    assert chat(top_k=10**15).params.top_k == VOCAB
    assert chat(top_k=-1).params.top_k == -1


def test_stop_strings() -> None:
    assert chat(stop="a").params.stop == ("a",)
    assert chat(stop=["a"] * 16).params.stop == ("a",) * 16
    assert chat(stop=[]).params.stop == ()


def test_logprobs_of_both_kinds() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None
    assert [completion(logprobs=k).params.logprobs for k in (0, 5, 20)] == [0, 5, 20]
    assert parse_completion({"prompt": "a", "logprobs": 20}, vocab_size=8).params.logprobs == 8
    assert refused(chat, logprobs=5).param == "logprobs"
    assert refused(chat, top_logprobs=5).param == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(completion, logprobs=True).param == "logprobs"
    assert refused(completion, logprobs=21).param == "logprobs"
    assert (
        refused(completion, top_logprobs=2).message == "Unrecognized request argument supplied: top_logprobs"
    )


@pytest.mark.parametrize(
    ("parse", "name", "value"),
    [
        (chat, "stream", True),
        (chat, "stream_options", {"include_usage": True}),
        (chat, "tool_choice", "required"),
        (chat, "tool_choice", {"type": "function", "function": {"name": "f"}}),
        (chat, "response_format", {"type": "json_object"}),
        (chat, "modalities", ["text", "audio"]),
        (chat, "functions", [{"name": "f"}]),
        (chat, "echo", True),
        (completion, "stream", True),
        (completion, "stream", 0),
        (completion, "suffix", "end"),
        (completion, "best_of", 2),
        (completion, "response_format", {"type": "json_schema", "json_schema": {}}),
    ],
)
def test_legal_fields_of_a_later_version_are_refused_by_name(parse: Any, name: str, value: Any) -> None:
    error = refused(parse, **{name: value})
    assert (error.status, error.param) == (400, name)
    assert name in error.message


def test_best_of_equal_to_n() -> None:
    assert completion(n=3, best_of=3).params.n == 3
    assert refused(completion, n=3, best_of=2).param == "best_of"


def test_unknown_fields() -> None:
    error = refused(chat, temprature=1)
    assert error.body() == {
        "error": {
            "message": "Unrecognized request argument supplied: temprature",
            "type": "invalid_request_error",
            "param": "temprature",
            "code": None,
        }
    }
    assert refused(completion, b=1, a=1).message == "Unrecognized request arguments supplied: a, b"


def test_a_model_that_is_not_served_is_404() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({"messages": HELLO, "model": "other"}, VOCAB, models=["this"])
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")
    assert parse_chat({"messages": HELLO}, VOCAB, models=["this"]).model is None


# C49, the shapes
def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]
    messages = [{"role": role, "content": parts} for role in ("system", "user", "assistant")]
    assert [m["content"] for m in chat(messages=messages).messages or []] == ["a b c"] * 3


def test_tool_calls_without_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parsed = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    answer = {"role": "tool", "tool_call_id": "1", "content": "2"}
    for extra in ({}, {"content": None}):
        request = chat(messages=[*HELLO, {"role": "assistant", "tool_calls": [call], **extra}, answer])
        expected = {"role": "assistant", "tool_calls": [parsed], "content": ""}
        assert request.messages == [*HELLO, expected, answer]
    call["function"] = {"name": "f", "arguments": "[1"}
    error = refused(chat, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert error.param == "messages[0].tool_calls[0].function.arguments"


def test_tools_reach_the_template_unless_not_to_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat(tools=tools, tool_choice="auto").template_kwargs == {"tools": tools}
    assert chat(tools=tools, tool_choice="none").template_kwargs == {}
    assert refused(chat, tools=[{"type": "function"}]).param == "tools[0]"
    for name in ("messages", "tools", "tokenize"):
        assert refused(chat, chat_template_kwargs={name: 1}).param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([*HELLO, {"role": "robot", "content": "hi"}], "messages[1].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
)
def test_wrong_messages(messages: Any, param: str) -> None:
    error = refused(chat, messages=messages)
    assert (error.status, error.param) == (400, param)


def test_text_that_no_tokenizer_can_encode() -> None:
    assert refused(completion, prompt="a\udfff").param == "prompt"
    assert refused(completion, stop=["\ud83d"]).param == "stop"
    assert completion(prompt="😀").prompts == ["😀"]


def test_endless_nesting_and_huge_values_give_short_errors() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    assert refused(chat, chat_template_kwargs={"x": deep}).param == "chat_template_kwargs"
    error = refused(completion, temperature="x" * 10**6)
    assert len(error.message) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *("prompt", "messages", "n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed"),
        *("stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "best_of", "stream", "model"),
        *("tools", "tool_choice", "chat_template_kwargs"),
    ]
)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@given(body=JSON | st.dictionaries(NAMES, JSON))
def test_no_json_raises_anything_but_an_api_error(parse: Any, body: Any) -> None:
    if isinstance(body, dict):
        body = {"messages": HELLO, **body} if parse is parse_chat else {"prompt": "a", **body}
    found = None
    try:
        parse(body, VOCAB).params.validate(VOCAB)
    except ApiError as error:
        found = error
    if found is not None:
        assert found.status == 400
        json.dumps(found.body(), allow_nan=False)
