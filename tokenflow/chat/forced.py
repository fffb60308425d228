"""A call that must be made: the grammar that its text is held to, and its reader. The same for every model.

Held to a grammar from its first token, a model neither reasons nor writes its family's markup: it writes the call as
JSON, `{"name": …, "arguments": {…}}`, of which the parts that leave no choice cost no step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenflow.chat.calls import CallFormat
from tokenflow.chat.message import MessageBuilder
from tokenflow.chat.source import Read, Source
from tokenflow.chat.values import json_call
from tokenflow.core.types import Grammar, Tools

PARAM = "tool_choice"
_SAYS_WHAT = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"})


def is_forced(tools: Tools | None) -> bool:
    """A call must be made."""
    return tools is not None and tools.choice in ("required", "named")


def call_grammar(tools: Tools) -> Grammar:
    """One call of one of the tools, with arguments as its schema describes them."""
    calls = [_call(tool["function"], f"#/anyOf/{i}/properties/arguments") for i, tool in enumerate(tools.functions)]
    return Grammar(kind="json_schema", source=json.dumps({"anyOf": calls}), param=PARAM)


def _call(function: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = function.get("parameters") or {}
    if not arguments.keys() & _SAYS_WHAT:  # it is an object all the same: many leave that out
        arguments = {"type": "object", **arguments}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": _moved(arguments, path)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, path: str) -> Any:
    """A schema that now stands at `path`: what it refers to within itself has moved with it."""
    if isinstance(schema, list):
        return [_moved(item, path) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, path) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = path + reference[1:]
    return moved


def _read(source: Source, message: MessageBuilder) -> Read[None]:
    yield from source.skip()
    yield from json_call(source, message)


def forced_format(id_chars: int | None) -> CallFormat:
    """How such a call is read, with ids of the length that the model's templates want."""
    return CallFormat(_read, (), id_chars=id_chars)
