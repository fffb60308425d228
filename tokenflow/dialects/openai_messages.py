"""Chat messages: what a client may send, as the plain mappings that a model's template renders.

A template sees `role`, `content` as one string, and `name`, `tool_calls`, `tool_call_id`, `reasoning_content` where
given; each message is built anew from fields that were checked, so nothing of an unknown shape reaches a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenflow.core.types import ChatPrompt, Ending, Tools
from tokenflow.dialects.fields import (
    INVALID_TYPE,
    Fields,
    as_object,
    as_text,
    missing,
    shown,
    unsupported,
    wrong_type,
)
from tokenflow.dialects.openai_tools import check_text, parse_tools
from tokenflow.errors import InvalidRequest

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ROLES |= {"developer": "system", "function": "tool"}
"""Roles taken, and what a template hears: of two words of OpenAI's for one role, the one that templates know."""


def parse_messages(fields: Fields) -> ChatPrompt:
    """The fields `messages`, `tools` with what belongs to them, and what a client says to the template itself.

    Raises:
        InvalidRequest: with `param` naming the place, as in `messages[2].content`.
    """
    items = fields.array("messages")
    if items is None:
        raise missing("messages")
    if not items:
        raise InvalidRequest("'messages' is empty; send at least one message.", param="messages")
    messages = tuple(_message(item, f"messages[{i}]") for i, item in enumerate(items))
    tools = parse_tools(fields)
    return ChatPrompt(
        messages=messages,
        tools=tools,
        variables=_variables(fields),
        reasoning_effort=fields.text("reasoning_effort"),
        ending=_ending(fields, messages, tools),
    )


def _ending(fields: Fields, messages: tuple[Mapping[str, Any], ...], tools: Tools | None) -> Ending:
    name = "continue_final_message"
    opening = fields.boolean("add_generation_prompt")
    if not fields.boolean(name):
        return "closed" if opening is False else "opening"
    if opening:
        raise InvalidRequest(f"'{name}' goes without 'add_generation_prompt'.", param="add_generation_prompt")
    last, path = messages[-1], f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise InvalidRequest(f"'{name}' wants the last message to be what an assistant said.", param=f"{path}.role")
    if not last["content"].strip():
        raise InvalidRequest(f"'{name}' finds nothing to go on from; leave the message out.", param=f"{path}.content")
    if tools is not None and tools.choice in ("required", "named"):
        raise InvalidRequest(f"'{name}' goes on from a text, which a call is not.", param="tool_choice")
    return "continued"


def _variables(fields: Fields) -> Mapping[str, Any]:
    """Values for the template, by name. Which of them a client may set is the server's to say."""
    name = "chat_template_kwargs"
    table = fields.object(name)
    variables = {} if table is None else {key: table.get(key) for key in table if table.get(key) is not None}
    check_text(variables, name)
    return variables


def _message(item: object, path: str) -> Mapping[str, Any]:
    fields = as_object(item, path)
    role = fields.text("role")
    if role is None:
        raise missing(f"{path}.role")
    if role not in ROLES:
        raise InvalidRequest(
            f"'{path}.role' must be one of {', '.join(ROLES)}; got {shown(role)}.", param=f"{path}.role"
        )
    assistant = role == "assistant"
    calls = _tool_calls(fields) if assistant else []
    refusal = fields.text("refusal") if assistant else None
    content = _content(fields, assistant=assistant, optional=bool(calls or refusal))
    if refusal and not content:
        content = refusal
    message: dict[str, Any] = {"role": ROLES[role], "content": content}
    name, call_id = fields.text("name"), fields.text("tool_call_id")
    if assistant:
        reasoning = fields.text("reasoning_content") or fields.text("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
    if name is not None:
        message["name"] = name
    if call_id is not None:
        message["tool_call_id"] = call_id
    if calls:
        message["tool_calls"] = calls
    return message


def _content(fields: Fields, *, assistant: bool, optional: bool) -> str | None:
    value, path = fields.get("content"), fields.path("content")
    if value is None:
        if optional:  # an assistant that only called tools, or refused, has none
            return None
        raise InvalidRequest(
            f"'{path}' must be a string or an array of parts, not null.", param=path, code=INVALID_TYPE
        )
    if isinstance(value, str):
        return as_text(value, path)
    if not isinstance(value, list):
        raise wrong_type(path, "a string or an array of parts", value)
    if not value and not optional:
        raise InvalidRequest(f"'{path}' has no parts.", param=path)
    # Parts are pieces of one text, not lines: a client that wants a newline between them writes it.
    return "".join(_part(part, f"{path}[{i}]", assistant=assistant) for i, part in enumerate(value))


def _part(item: object, path: str, *, assistant: bool) -> str:
    """A part's text. What an assistant refused with, which clients send back as they got it, is what it said."""
    part = as_object(item, path)
    kind = part.text("type")
    if kind is None:
        raise missing(f"{path}.type")
    if kind != "text" and not (assistant and kind == "refusal"):
        raise unsupported(f"{path}.type", f"only text parts are; got {shown(kind)}.")
    text = part.text(kind)  # the field is called as the kind is
    if text is None:
        raise missing(f"{path}.{kind}")
    return text


def _tool_calls(fields: Fields) -> list[dict[str, Any]]:
    """What an assistant called earlier in the conversation."""
    calls = fields.array("tool_calls") or []
    return [_tool_call(call, fields.path(f"tool_calls[{i}]")) for i, call in enumerate(calls)]


def _tool_call(item: object, path: str) -> dict[str, Any]:
    call = as_object(item, path)
    kind = call.text("type") or "function"
    if kind != "function":
        raise unsupported(f"{path}.type", f"only function calls are; got {shown(kind)}.")
    function = call.object("function")
    if function is None:
        raise missing(f"{path}.function")
    name = function.text("name")
    if name is None:
        raise missing(f"{path}.function.name")
    return {
        "id": call.text("id") or "",
        "type": kind,
        "function": {"name": name, "arguments": function.text("arguments") or ""},
    }
