"""Chat messages to a prompt, by the model's chat template, exactly as `transformers` renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd.comm.errors import UserError
from spmd.text.folder_tokenizer import read_json_object
from spmd.text.tokenizer import Tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja templates of a model by name.

    "default" is the one for chat; "tool_use", where there is one, serves requests with tools.
    """

    templates: Mapping[str, str]
    source: str  # where they were found, for messages

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt for `messages`. `kwargs` are passed to the template (special tokens, tools, ...).

        Rendering is `transformers`': sandboxed Jinja. Raises `UserError` for messages of the wrong form, and
        with the template's own text when it refuses them.
        """
        chat = checked_messages(messages)
        template = self._choose(kwargs.get("tools"))
        # A key that is absent is what transformers gives the template for a content of null. Many templates
        # join the content unseen and fail; they are served the empty string.
        import jinja2

        try:
            return _render(template, chat, add_generation_prompt, kwargs)
        except jinja2.UndefinedError as error:
            if all("content" in message for message in chat):
                raise self._failure(error) from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise self._failure(error) from error
        try:
            return _render(template, [{"content": "", **m} for m in chat], add_generation_prompt, kwargs)
        except Exception as error:
            raise self._failure(error) from error

    def _choose(self, tools: object) -> str:
        if tools is not None and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" not in self.templates:
            raise UserError(
                f"{self.source}: chat templates {sorted(self.templates)} but none named 'default'; "
                "give one with --chat-template"
            )
        return self.templates["default"]

    def _failure(self, error: Exception) -> UserError:
        import jinja2

        if type(error) is jinja2.TemplateError:  # raise_exception in the template
            return UserError(str(error))
        return UserError(
            f"chat template of {self.source} failed: {type(error).__name__}: {error}; "
            "check the messages, or give another template with --chat-template"
        )


def _render(
    template: str, chat: list[dict[str, Any]], add_generation_prompt: bool, kwargs: Mapping[str, Any]
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[chat],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **kwargs,
    )
    return rendered[0][0]  # (texts, generation indices), a text per conversation


def load_chat_template(
    path: Path, gguf_metadata: Mapping[str, Any] | None = None, override: str | None = None
) -> ChatTemplate | None:
    """The chat template of a checkpoint, None when it has none.

    `override`, a file or the text of a template, comes first. In a folder, chat_template.jinja beats the
    chat_template of tokenizer_config.json. A GGUF file holds its own in the metadata.
    """
    if override is not None:
        return _override(override)
    if gguf_metadata is not None:
        return _from_gguf(gguf_metadata, path)
    files = {"default": path / "chat_template.jinja"}
    files.update((file.stem, file) for file in sorted((path / "additional_chat_templates").glob("*.jinja")))
    templates = {name: _read(file) for name, file in files.items() if file.is_file()}
    if templates:
        return ChatTemplate(templates, str(files["default"] if "default" in templates else path))
    config_path = path / "tokenizer_config.json"
    return _from_field(read_json_object(config_path).get("chat_template"), str(config_path))


def _override(text_or_file: str) -> ChatTemplate:
    # No file name holds a Jinja delimiter; a template without one would ignore the messages.
    if "{{" in text_or_file or "{%" in text_or_file:
        return ChatTemplate({"default": text_or_file}, "the command line")
    file = Path(text_or_file)
    if not file.is_file():
        raise UserError(
            f"--chat-template: {text_or_file!r} is neither a file nor a Jinja template, expected one of them"
        )
    return ChatTemplate({"default": _read(file)}, str(file))


def _from_gguf(metadata: Mapping[str, Any], path: Path) -> ChatTemplate | None:
    prefix = "tokenizer.chat_template"
    templates = {
        "default" if key == prefix else key.removeprefix(f"{prefix}."): value
        for key, value in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    return ChatTemplate(templates, str(path)) if templates else None


def _from_field(field: object, source: str) -> ChatTemplate | None:
    if field is None:
        return None
    if isinstance(field, str):
        return ChatTemplate({"default": field}, source)
    try:
        if isinstance(field, dict):
            return ChatTemplate({str(name): str(text) for name, text in field.items()}, source)
        if isinstance(field, list):
            return ChatTemplate({entry["name"]: entry["template"] for entry in field}, source)
    except (TypeError, KeyError):
        pass
    raise UserError(
        f"{source}: chat_template is a {type(field).__name__}, "
        "expected a string or a list of {name, template}"
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: can't be read as a chat template ({error})") from error


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Messages in the form templates expect: content is a string, or absent where there is none.

    A list of text parts is joined. Keys whose value is null are left out, as `transformers` does. Raises
    `UserError` naming the message for an unknown role or part, or a missing content; an assistant that calls
    tools needs none.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise UserError(f"messages: expected a list of messages, found {type(messages).__name__}")
    if not messages:
        raise UserError("messages: the list is empty, expected at least one message")
    return [_checked_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{name}: expected an object with role and content, found {type(message).__name__}")
    role = message.get("role")
    if role not in _ROLES:
        raise UserError(f"{name}.role: found {role!r}, expected one of {', '.join(_ROLES)}")
    present = {key: value for key, value in message.items() if value is not None}
    if "content" in present:
        present["content"] = _joined_content(f"{name}.content", present["content"])
    elif not (role == "assistant" and (present.get("tool_calls") or present.get("function_call"))):
        raise UserError(f"{name}.content: missing, expected a string or a list of text parts")
    return present


def _joined_content(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UserError(f"{name}: expected a string or a list of text parts, found {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise UserError(f"{name}[{i}]: part of type {kind!r}, expected 'text'")
        if not isinstance(part.get("text"), str):
            raise UserError(f"{name}[{i}].text: found {part.get('text')!r}, expected a string")
        texts.append(part["text"])
    return "".join(texts)


def chat_prompt_ids(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    **kwargs: Any,
) -> list[int]:
    """Prompt ids for `messages`, equal to `transformers`' `apply_chat_template(messages, tokenize=True)`.

    The template writes BOS itself, so encoding adds none. With `add_special_tokens` encoding adds what the
    tokenizer adds to plain text, unless the template's text starts with BOS: it is never there twice.
    """
    text = template.render(messages, add_generation_prompt, **{**tokenizer.special_tokens, **kwargs})
    bos = tokenizer.bos_token
    starts_with_bos = bos is not None and text.startswith(bos)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens and not starts_with_bos)
