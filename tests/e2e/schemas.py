"""JSON schemas, as clients send them: sensible ones, hostile ones, and any number of made ones."""

from __future__ import annotations

import random
from typing import Any

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "date": {"type": "string", "format": "date"},
        "forecast": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "hour": {"type": "integer", "minimum": 0, "maximum": 23},
                    "celsius": {"type": "number", "minimum": -40, "maximum": 50},
                    "sky": {"enum": ["clear", "clouds", "rain", None]},
                },
                "required": ["hour", "celsius", "sky"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["city", "date", "forecast"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
EITHER = {
    "anyOf": [
        {"type": "object", "properties": {"yes": {"const": True}}, "required": ["yes"], "additionalProperties": False},
        {"type": "object", "properties": {"why": {"type": "string", "maxLength": 30}}, "required": ["why"]},
        {"type": "null"},
    ]
}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "number"}, 'é"': {"type": "null"}}}
SENSIBLE = {"person": PERSON, "weather": WEATHER, "tree": TREE, "either": EITHER, "optional": OPTIONAL}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def references(links: int) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    return {"$defs": {**chain, f"d{links}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": nested(200),
    "an enum of 3000": {"enum": [f"value {i}" for i in range(3000)]},
    "an enum of a long string": {"enum": ["x" * 60_000]},
    "an enum of objects": {"enum": [{"a": i, "b": [i] * 5} for i in range(1200)]},
    "too large": {"enum": ["x" * 70_000]},
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "references": references(1500),
    "multiples": {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]},
    "patterns": {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(1, 60)]},
    "a pattern": {"type": "string", "pattern": "(((a{1,100}){1,100}){1,100}){1,100}"},
    "a pattern that looks far": {"type": "string", "pattern": "(.*a.{20}b){20}"},
    "1500 properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
    "a thousand arrays": {"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000}},
    "whitespace": {"x-guidance": {"whitespace_pattern": "(a{1,1000}){1,1000}"}, "type": "object"},
    "numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "all formats": {"allOf": [{"type": "string", "format": name} for name in ("uri", "email", "hostname", "ipv6")]},
}

_WORDS = ["a", "b", "name", "", "é", '"', "\\", "\n", "x" * 300, "$ref", "\u2028"]


def made(dice: random.Random, depth: int = 5) -> Any:
    """Some schema, often a wrong one: every keyword may hold what another one should."""
    if depth == 0 or dice.random() < 0.1:
        return dice.choice(
            [{}, True, False, {"type": "string"}, {"type": dice.choice(_WORDS)}, {"const": _value(dice, 3)}]
        )
    schema: dict[str, Any] = {}
    for _ in range(dice.randint(1, 4)):
        keyword = dice.choice(list(_KEYWORDS))
        schema[keyword] = _KEYWORDS[keyword](dice, depth - 1) if dice.random() < 0.93 else _value(dice, 3)
    return schema


def _value(dice: random.Random, depth: int) -> Any:
    plain = [None, True, 0, -1, 1.5, 1e300, 10**30, *_WORDS]
    if depth == 0 or dice.random() < 0.6:
        return dice.choice(plain)
    inner = [_value(dice, depth - 1) for _ in range(dice.randint(0, 3))]
    return inner if dice.random() < 0.5 else {dice.choice(_WORDS): value for value in inner}


def _several(dice: random.Random, depth: int) -> list[Any]:
    return [made(dice, depth) for _ in range(dice.randint(0, 4))]


def _named(dice: random.Random, depth: int) -> dict[str, Any]:
    return {dice.choice(_WORDS): made(dice, depth) for _ in range(dice.randint(0, 4))}


def _number(dice: random.Random, depth: int) -> Any:
    return dice.choice([0, 1, 2, 7, -1, 0.1, 100, 10**6, 10**18, 1e-9])


def _pattern(dice: random.Random, depth: int) -> str:
    pieces = [
        "a",
        ".",
        ".*",
        "[a-z]",
        "(b|c)",
        "{1,40}",
        "+",
        "\\d",
        "^",
        "$",
        "(",
        ")",
        "{3000}",
        "(?=a)",
        "\\p{L}",
        "|",
    ]
    return "".join(dice.choice(pieces) for _ in range(dice.randint(1, 9)))


_TYPES = ["string", "object", "array", "integer", "number", "boolean", "null"]
_KEYWORDS = {
    "type": lambda dice, depth: dice.choice([*_TYPES, dice.sample(_TYPES, 2)]),
    "enum": lambda dice, depth: [_value(dice, 2) for _ in range(dice.randint(0, 6))],
    "properties": _named,
    "patternProperties": lambda dice, depth: {_pattern(dice, 0): made(dice, depth)},
    "required": lambda dice, depth: dice.sample(_WORDS, 2),
    "additionalProperties": made,
    "items": made,
    "prefixItems": _several,
    "allOf": _several,
    "anyOf": _several,
    "oneOf": _several,
    "not": made,
    "$ref": lambda dice, depth: dice.choice(["#", "#/$defs/a", "#/properties/a", "#/nowhere", "http://x/", ""]),
    "$defs": _named,
    "pattern": _pattern,
    "format": lambda dice, depth: dice.choice(["date", "uri", "email", "uuid", "nothing"]),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _number),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "multipleOf"), _number),
}
