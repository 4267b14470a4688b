"""Chat messages and chat-template arguments of an OpenAI request, in the form that templates expect."""

from __future__ import annotations

import json
from typing import Any, Final

from spmd.openai_fields import ApiError, Fields, check_strings, names, wrong

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
# What the renderer itself passes to a template; a request must not give them a second time.
_RESERVED_TEMPLATE_KWARGS: Final = names(
    "messages conversation tools tokenize chat_template add_generation_prompt continue_final_message"
)


def parse_messages(value: object) -> list[dict[str, Any]]:
    """Checked messages, every `content` a string. Raises `ApiError` naming the message and its part."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a non-empty list of messages")
    return [_parse_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _parse_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    result = {key: value for key, value in message.items() if value is not None}
    content = result.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif content is None and role == "assistant" and ("tool_calls" in result or "function_call" in result):
        content = ""  # templates print a null content as "None"
    elif not isinstance(content, str):
        raise wrong(f"{where}.content", content, "a string or a list of text parts")
    result["content"] = content
    if "tool_calls" in result:
        calls = result["tool_calls"]
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", calls, "a list")
        result["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return result


def _part_text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "refusal"):
        raise wrong(f"{where}.type", kind, "'text', the only supported type of part")
    text = part.get(kind)
    if not isinstance(text, str):
        raise wrong(f"{where}.{kind}", text, "a string")
    return text


def _tool_call(where: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or not _is_named_function(call.get("function")):
        raise wrong(where, call, "an object with a function that has a name")
    function = call["function"]
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        parsed = None
    where = f"{where}.function.arguments"
    if not isinstance(parsed, dict):
        raise wrong(where, arguments, "the text of a JSON object")
    check_strings({where: parsed})
    return {**call, "function": {**function, "arguments": parsed}}


def _is_named_function(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def parse_template_kwargs(fields: Fields) -> dict[str, Any]:
    """Keyword arguments for the chat template: those given, tools and the like included."""
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise wrong("chat_template_kwargs", given, "an object")
    kwargs: dict[str, Any] = dict(given or {})
    reserved = sorted(_RESERVED_TEMPLATE_KWARGS & set(kwargs))
    if reserved:
        message = f"chat_template_kwargs: {reserved[0]!r} cannot be set here"
        raise ApiError(message, "chat_template_kwargs")
    tools = fields.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise wrong("tools", tools, "a list")
        for i, tool in enumerate(tools):
            if not isinstance(tool, dict) or not _is_named_function(tool.get("function")):
                raise wrong(f"tools[{i}]", tool, "an object with a function that has a name")
        if tools and fields.get("tool_choice") != "none":
            kwargs["tools"] = tools
    effort = fields.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise wrong("reasoning_effort", effort, "a string")
        kwargs["reasoning_effort"] = effort
    if not fields.boolean("add_generation_prompt", True):
        kwargs["add_generation_prompt"] = False
    return kwargs
