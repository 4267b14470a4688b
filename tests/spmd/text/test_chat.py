"""Chat templates: where they come from, BOS once, message shapes, errors (C22, C24, C49)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmd.comm.errors import UserError
from spmd.text.chat import ChatTemplate, chat_prompt_ids, checked_messages, load_chat_template
from spmd.text.tokenizer import Tokenizer, load_tokenizer

TURNS = "{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
PROMPT = TURNS + "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
WITH_BOS = "{{ bos_token }}" + PROMPT

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}

CHAT = [
    {"role": "system", "content": "be quick"},
    {"role": "user", "content": "the fox, 中?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "it's <s> 12"},
]


def template_of(folder: Path, override: str | None = None) -> ChatTemplate:
    template = load_chat_template(folder, None, override)
    assert template is not None
    return template


def tokenizer_of(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder, None)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("source", [PROMPT, WITH_BOS])
def test_ids_equal_apply_chat_template(
    make_folder: Callable[..., Path], source: str, add_generation_prompt: bool
) -> None:
    """The tokenizer's post-processor adds BOS to plain text; the chat prompt has the template's only."""
    from transformers import AutoTokenizer

    folder = make_folder({**CONFIG, "chat_template": source}, add_bos=True)
    tokenizer = tokenizer_of(folder)
    reference = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        CHAT, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    ids = chat_prompt_ids(template_of(folder), tokenizer, CHAT, add_generation_prompt)
    assert ids == reference
    assert ids[:2].count(0) == (1 if source is WITH_BOS else 0)


def test_bos_is_never_there_twice(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(CONFIG, add_bos=True)
    tokenizer = tokenizer_of(folder)
    chat = [{"role": "user", "content": "the"}]
    for source in (PROMPT, WITH_BOS):
        template = ChatTemplate({"default": source}, "test")
        ids = chat_prompt_ids(template, tokenizer, chat, add_special_tokens=True)
        assert ids.count(0) == 1
        assert ids[0] == 0


def test_default_model_adds_no_bos_of_its_own(
    smollm2: Tokenizer, smollm2_metadata: dict[str, Any], smollm2_path: Path
) -> None:
    from transformers import AutoTokenizer

    template = load_chat_template(smollm2_path, smollm2_metadata)
    assert template is not None
    reference = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    expected = reference.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert chat_prompt_ids(template, smollm2, chat) == expected
    # Its template joins the content unseen, so a call of a tool without any must not break it.
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    text = smollm2.decode(chat_prompt_ids(template, smollm2, [*chat, call]), skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n")


def test_precedence(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    in_config = make_folder({**CONFIG, "chat_template": "config"})
    assert template_of(in_config).render(chat) == "config"
    file_only = make_folder(CONFIG, files={"chat_template.jinja": "file é"})
    assert template_of(file_only).render(chat) == "file é"
    both = make_folder({**CONFIG, "chat_template": "config"}, files={"chat_template.jinja": "file"})
    assert template_of(both).render(chat) == "file"
    assert template_of(both, "{{ 'line' }}").render(chat) == "line"
    (tmp_path / "mine.jinja").write_text("mine")
    assert template_of(both, str(tmp_path / "mine.jinja")).render(chat) == "mine"
    metadata = {"tokenizer.chat_template": "gguf"}
    from_gguf = load_chat_template(tmp_path / "model.gguf", metadata)
    assert from_gguf is not None
    assert from_gguf.render(chat) == "gguf"
    overridden = load_chat_template(tmp_path / "model.gguf", metadata, "{{ 'line' }}")
    assert overridden is not None
    assert overridden.render(chat) == "line"


def test_no_template(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    assert load_chat_template(make_folder(CONFIG), None, None) is None
    assert load_chat_template(make_folder(), None, None) is None
    assert load_chat_template(tmp_path / "model.gguf", {"tokenizer.ggml.model": "gpt2"}, None) is None


def test_named_templates(make_folder: Callable[..., Path]) -> None:
    chat = [{"role": "user", "content": "x"}]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    in_list = template_of(make_folder({**CONFIG, "chat_template": named}))
    in_files = template_of(
        make_folder(
            CONFIG,
            files={"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"},
        )
    )
    for template in (in_list, in_files):
        assert template.render(chat) == "plain"
        assert template.render(chat, tools=[{"type": "function", "function": {"name": "f"}}]) == "tools"
    without_default = template_of(make_folder({**CONFIG, "chat_template": named[1:]}))
    with pytest.raises(UserError, match=r"tool_use.*'default'"):
        without_default.render(chat)


@pytest.mark.parametrize("value", [3, [{"name": "default"}], ["text"]])
def test_a_template_field_of_the_wrong_form(make_folder: Callable[..., Path], value: object) -> None:
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template"):
        load_chat_template(make_folder({**CONFIG, "chat_template": value}), None, None)


def test_an_override_that_is_no_file_and_no_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--chat-template.*nosuch\.jinja"):
        load_chat_template(tmp_path, None, "nosuch.jinja")


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_text_parts_equal_the_joined_string(make_folder: Callable[..., Path], role: str) -> None:
    folder = make_folder({**CONFIG, "chat_template": WITH_BOS})
    template, tokenizer = template_of(folder), tokenizer_of(folder)
    parts = [{"type": "text", "text": "the quick "}, {"type": "text", "text": "fox"}]
    rest = [{"role": "user", "content": "go"}]
    assert chat_prompt_ids(template, tokenizer, [{"role": role, "content": parts}, *rest]) == chat_prompt_ids(
        template, tokenizer, [{"role": role, "content": "the quick fox"}, *rest]
    )


@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_a_tool_call_needs_no_content(make_folder: Callable[..., Path], message: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    source = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    source += "{{ 'none' if messages[0].content is not defined else 'some' }}"
    folder = make_folder({**CONFIG, "chat_template": source})
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "<é>"}}}],
        **message,
    }
    reference = AutoTokenizer.from_pretrained(str(folder))
    text = template_of(folder).render([call])
    assert text == reference.apply_chat_template([call], tokenize=False)
    assert json.loads(text.removesuffix("none")) == call["tool_calls"]


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([{"role": "wizard", "content": "x"}], r"messages\[0\]\.role: found 'wizard'"),
        ([{"content": "x"}], r"messages\[0\]\.role: found None"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content: missing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content: missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\]\.content: missing"),
        ([CHAT[0], {"role": "user", "content": 3}], r"messages\[1\]\.content: .*int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\]: .*'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]: .*'str'"),
        (["hello"], r"messages\[0\]: .*str"),
        ([], "empty"),
        ("hello", "messages: .*str"),
        ({"role": "user"}, "messages: .*dict"),
        (None, "messages: .*NoneType"),
    ],
)
def test_messages_of_the_wrong_form(messages: Any, found: str) -> None:
    with pytest.raises(UserError, match=found):
        checked_messages(messages)


def test_a_template_refuses_in_its_own_words() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{% endfor %}ok"
    )
    template = ChatTemplate({"default": source}, "test")
    with pytest.raises(UserError, match=r"^System role not supported$"):
        template.render(CHAT)
    with pytest.raises(UserError, match=r"^Roles must alternate user/assistant$"):
        template.render([CHAT[1], CHAT[1]])
    assert template.render([CHAT[1], CHAT[2]]) == "ok"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",  # syntax
        "{{ nosuch.field }}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox(source: str) -> None:
    with pytest.raises(UserError, match="chat template of test failed"):
        ChatTemplate({"default": source}, "test").render(CHAT)


def test_messages_are_not_changed() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]
    before = json.dumps(chat)
    ChatTemplate({"default": PROMPT}, "test").render(chat)
    assert json.dumps(chat) == before
