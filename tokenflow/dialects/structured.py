"""What a body says about the form of the answer: OpenAI's `response_format`, and the fields that other servers have for
it (vLLM's `structured_outputs` and its older `guided_*`, llama-server's `json_schema` and `grammar`).

Whether it compiles is the engine's to say; here only its form is judged, and that it is not nested beyond reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenflow.core.types import Grammar
from tokenflow.dialects.fields import Fields, as_text, missing, shown, unsupported, wrong_type
from tokenflow.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of arrays and objects in a schema. What reads schemas goes down one call for each."""
_OBJECT = {"type": "object"}


def grammar(fields: Fields) -> Grammar | None:
    """What the answer must match; None: anything.

    Raises:
        InvalidRequest: something of the wrong form, or more than one of them.
    """
    asked = [*_response_format(fields), *_others(fields)]
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise InvalidRequest(f"'{first}' and '{second}' both say what to answer; leave one of them out.", param=second)
    return asked[0] if asked else None


def schema_grammar(schema: object, param: str) -> Grammar:
    """A JSON schema, as a JSON value, to the grammar of what it describes."""
    if not isinstance(schema, Mapping):
        raise wrong_type(param, "a JSON schema: an object", schema)
    check_depth(schema, param)
    return Grammar(kind="json_schema", source=json.dumps(schema), param=param)


def _response_format(fields: Fields) -> Iterator[Grammar]:
    wanted = fields.object("response_format")
    if wanted is None:
        return
    kind = wanted.text("type")
    if kind is None:
        raise missing(wanted.path("type"))
    if kind == "text":
        _refuse_schema(wanted)
        return
    if kind not in ("json_object", "json_schema"):
        raise unsupported("response_format", f"its type is text, json_object or json_schema, not {shown(kind)}.")
    holder = _schema_holder(wanted)
    schema, param = holder.get("schema"), holder.path("schema")
    if kind == "json_schema":
        if schema is None:
            raise missing(wanted.path("json_schema"))
        yield schema_grammar(schema, param)
    elif schema is None:
        yield _any_object("response_format")
    else:  # what says of no type is an object's
        yield schema_grammar(_OBJECT | schema if isinstance(schema, dict) else schema, param)


def _refuse_schema(wanted: Fields) -> None:
    """To pass it over would be to give prose to a client that reads what comes by its schema."""
    for name in ("json_schema", "schema"):
        if wanted.get(name):
            param = wanted.path(name)
            raise InvalidRequest(f"'{param}' counts only under the type json_schema or json_object.", param=param)


def _schema_holder(wanted: Fields) -> Fields:
    """Where the schema stands: in `json_schema`, as OpenAI has it, or beside the type, as llama-server has it."""
    inside = wanted.object("json_schema")
    if inside is None:
        return wanted
    first, second = wanted.path("json_schema"), wanted.path("schema")
    if wanted.get("schema") is not None:
        raise InvalidRequest(f"'{first}' and '{second}' both hold a schema; leave one of them out.", param=second)
    if inside.get("schema") is None:
        raise missing(inside.path("schema"))
    return inside


def _others(fields: Fields) -> Iterator[Grammar]:
    for name, read in _READERS.items():
        for field in (f"guided_{name}", _LLAMA_SERVER.get(name, "")):
            if (value := fields.get(field)) not in (None, ""):  # llama-server's default is an empty grammar
                yield read(value, field)
    wanted = fields.object("structured_outputs")
    if wanted is None:
        return
    if wanted.get("structural_tag"):
        raise unsupported(wanted.path("structural_tag"), "a form holds for the whole answer; send 'grammar'.")
    if wanted.boolean("json_object"):
        yield _any_object(wanted.path("json_object"))
    for name, read in _READERS.items():
        if (value := wanted.get(name)) is not None:
            yield read(value, wanted.path(name))


def _any_object(param: str) -> Grammar:
    return schema_grammar(_OBJECT, param)


def _json(value: object, param: str) -> Grammar:
    if not isinstance(value, str):
        return schema_grammar(value, param)
    try:
        return schema_grammar(json.loads(value), param)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"'{param}' is a string, but not one of JSON: {exc}.", param=param) from exc


def _regex(value: object, param: str) -> Grammar:
    return Grammar(kind="regex", source=_source(value, param), param=param)


def _grammar(value: object, param: str) -> Grammar:
    return Grammar(kind="grammar", source=_source(value, param), param=param)


def _source(value: object, param: str) -> str:
    text = as_text(value, param)
    if not text:
        raise InvalidRequest(f"'{param}' is an empty string, which only an empty answer would match.", param=param)
    return text


def _choice(value: object, param: str) -> Grammar:
    if not isinstance(value, list):
        raise wrong_type(param, "an array of strings", value)
    choices = [_source(item, f"{param}[{i}]") for i, item in enumerate(value)]
    if not choices:
        raise InvalidRequest(f"'{param}' is empty; there is nothing to choose.", param=param)
    return Grammar(kind="grammar", source="start: " + " | ".join(map(json.dumps, choices)), param=param)


_READERS: dict[str, Callable[[object, str], Grammar]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
"""vLLM's names, inside `structured_outputs` and after `guided_`."""
_LLAMA_SERVER = {"json": "json_schema", "grammar": "grammar"}


def check_depth(schema: object, param: str) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        inner = [value for value in level if isinstance(value, Mapping | list)]
        level = [item for value in inner for item in (value.values() if isinstance(value, Mapping) else value)]
        if not level:
            return
    if any(isinstance(value, Mapping | list) for value in level):
        raise InvalidRequest(f"'{param}' is nested more than {MAX_DEPTH} levels deep.", param=param)
