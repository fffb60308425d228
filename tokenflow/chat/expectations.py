"""What a template expects of an assistant's earlier words, where templates differ and none says so.

A call's arguments are an object to most templates, which write them as JSON, and JSON text to some, which copy it. A
message that only called tools has no content, or the content None, or an empty string: some templates look for None,
which others would write. It is found out by trying, once for each template: the first form that comes out right holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Render = Callable[[list[Mapping[str, Any]], list[Mapping[str, Any]]], str | None]
"""Messages and tools to text; None: it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """The form in which one template takes messages."""

    arguments: Literal["object", "text"] = "object"
    no_content: Literal["absent", "none", "text"] = "absent"

    def applied(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message as clients send it, in that form."""
        if "tool_calls" not in message and "reasoning_content" not in message:
            return message
        changed = dict(message)
        calls = changed.get("tool_calls")
        if calls:
            changed["tool_calls"] = [self._call(call) for call in calls]
            if changed["content"] is None:
                changed |= {"content": ""} if self.no_content == "text" else {}
                if self.no_content == "absent":
                    del changed["content"]
        if "reasoning_content" in changed and not (calls and changed.get("content")):
            changed["thinking"] = changed["reasoning_content"]  # gpt-oss's name; its template refuses a call with both
        return changed

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        if self.arguments == "text":
            return call
        return {**call, "function": {**function, "arguments": _object(function["arguments"])}}


def _object(text: Any) -> Any:
    """Arguments as an object; what a model wrote as none stays as it is."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def expectations(render: Render) -> Expectations:
    """What the template that `render` renders expects."""
    tried = list(_tried(render))
    right = [form for form, text in tried if _is_right(text)]
    usable = [form for form, text in tried if text is not None]
    return [*right, *usable, Expectations()][0]


def _tried(render: Render) -> Iterator[tuple[Expectations, str | None]]:
    for arguments in ("object", "text"):
        for no_content in ("absent", "none", "text"):
            form = Expectations(arguments=arguments, no_content=no_content)
            yield form, render([form.applied(message) for message in _MESSAGES], _TOOLS)


def _is_right(text: str | None) -> bool:
    """The arguments are there, neither as Python writes them nor as JSON within JSON; and no None for a content."""
    if text is None or "the_key" not in text:
        return False
    return not any(wrong in text for wrong in ("'the_key'", '\\"the_key', "None"))


_TOOLS: list[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "the_name",
            "description": "",
            "parameters": {"type": "object", "properties": {"a_key": {"type": "string", "description": ""}}},
        },
    }
]
_MESSAGES: list[Mapping[str, Any]] = [
    {"role": "user", "content": "A question"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [  # nine characters: Mistral's templates insist on it
            {"id": "123456789", "type": "function", "function": {"name": "the_name", "arguments": '{"the_key": "x"}'}}
        ],
    },
    {"role": "tool", "name": "the_name", "tool_call_id": "123456789", "content": "An answer"},
]
