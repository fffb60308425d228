"""The fields that say what an answer must look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenflow.core.types import Grammar
from tokenflow.dialects import openai_chat, openai_completions
from tokenflow.dialects.fields import INVALID_TYPE, MISSING, UNSUPPORTED
from tokenflow.dialects.structured import MAX_DEPTH
from tokenflow.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}


def asked(**fields: Any) -> Grammar | None:
    chat = openai_chat.parse({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}).grammar
    assert openai_completions.parse({"model": "m", "prompt": "a", **fields}).grammar == chat
    return chat


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}', "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            json.dumps(SCHEMA),
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"required": ["a"]}}},
            "json_schema",
            '{"type": "object", "required": ["a"]}',
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            "json_schema",
            '{"type": "array"}',
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": None, "json_schema": None, "name": "n"}},
            "json_schema",
            '{"type": "object"}',
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"required": ["a"]}}},
            "json_schema",
            '{"required": ["a"]}',
            "response_format.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: X"}}, "grammar", "start: X", "structured_outputs.grammar"),
        (
            {"structured_outputs": {"choice": ['"', "é"]}},
            "grammar",
            r'start: "\"" | "\u00e9"',
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "json_schema",
            '{"type": "object"}',
            "structured_outputs.json_object",
        ),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA), "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"]}, "grammar", 'start: "a"', "guided_choice"),
        ({"guided_grammar": "root ::= a"}, "grammar", "root ::= a", "guided_grammar"),
        ({"json_schema": SCHEMA}, "json_schema", json.dumps(SCHEMA), "json_schema"),
        ({"grammar": "root ::= a"}, "grammar", "root ::= a", "grammar"),
    ],
    ids=str,
)
def test_each_way_to_ask(fields: dict[str, Any], kind: Any, source: str, param: str) -> None:
    grammar = asked(**fields)
    assert grammar is not None
    assert (grammar.kind, grammar.source, grammar.param) == (kind, source, param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None, "schema": {}}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        dict.fromkeys(("response_format", "structured_outputs", "guided_json", "json_schema", "grammar")),
    ],
    ids=str,
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def nested(levels: int) -> dict[str, Any]:
    """A schema of so many levels of objects."""
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "text"}, "response_format", INVALID_TYPE),
        ({"response_format": {}}, "response_format.type", MISSING),
        ({"response_format": {"type": None, "schema": SCHEMA}}, "response_format.type", MISSING),
        ({"response_format": {"type": "xml"}}, "response_format", UNSUPPORTED),
        ({"response_format": {"type": 1}}, "response_format.type", INVALID_TYPE),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", MISSING),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            MISSING,
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {}}},
            "response_format.json_schema.schema",
            MISSING,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}},
            "response_format.schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {}, "schema": SCHEMA}},
            "response_format.schema",
            "invalid_value",
        ),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema", INVALID_TYPE),
        ({"response_format": {"type": "json_schema", "schema": []}}, "response_format.schema", INVALID_TYPE),
        (
            {"response_format": {"type": "json_object", "schema": nested(MAX_DEPTH + 1)}},
            "response_format.schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
            "invalid_value",
        ),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", UNSUPPORTED),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json", INVALID_TYPE),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex", INVALID_TYPE),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", INVALID_TYPE),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "invalid_value"),
        ({"grammar": "\ud800"}, "grammar", "invalid_value"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": "[1]"}, "guided_json", INVALID_TYPE),
        ({"guided_json": "[" * 100_000}, "guided_json", "invalid_value"),
        ({"json_schema": nested(MAX_DEPTH + 1)}, "json_schema", "invalid_value"),
        ({"json_schema": {}, "grammar": "a"}, "grammar", "invalid_value"),
        ({"response_format": {"type": "json_object"}, "json_schema": {}}, "json_schema", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "invalid_value"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_refused(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_the_deepest_schema() -> None:
    assert asked(json_schema=nested(MAX_DEPTH)) is not None
