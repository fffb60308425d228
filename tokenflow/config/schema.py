"""The configuration as a JSON schema (draft 2020-12), for editors and for people who generate configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from tokenflow.config.check import adapter
from tokenflow.config.docs import field_docs, summary
from tokenflow.config.load import SECTIONS
from tokenflow.config.model import MODEL_TABLES, Config
from tokenflow.config.shape import keys

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/{model}"


def schema(engines: Mapping[str, type], sinks: Mapping[str, type]) -> dict[str, Any]:
    """The schema of the whole configuration.

    Args:
        engines: configuration classes of the engines that models may name, by the engine's name.
        sinks: those of the sinks.

    Raises:
        PluginError: a class cannot be used.
    """
    classes: dict[tuple[str, str], type] = {("", name): cls for name, cls in SECTIONS.items()}
    classes |= {("model", name): cls for name, cls in MODEL_TABLES.items()}
    classes |= {("engine", name): cls for name, cls in engines.items()}
    classes |= {("sink", name): cls for name, cls in sinks.items()}
    inputs: list[tuple[tuple[str, str], JsonSchemaMode, TypeAdapter[Any]]] = [
        (key, "validation", adapter(cls)) for key, cls in classes.items()
    ]
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF, schema_generator=_Generator)
    schemas = {key: _resolved(value, definitions) for (key, _), value in found.items()}
    help = field_docs(Config)
    properties: dict[str, Any] = {name: schemas["", name] for name in SECTIONS}
    tables = {name: schemas["model", name] for name in MODEL_TABLES}
    properties["models"] = {
        "type": "object",
        "description": help["models"],
        "minProperties": 1,
        "additionalProperties": {"anyOf": [_model(name, schemas["engine", name], tables) for name in engines]},
    }
    properties["sinks"] = {
        "type": "object",
        "description": help["sinks"],
        "properties": {name: schemas["sink", name] for name in sinks},
        "additionalProperties": False,
    }
    whole = {
        "$schema": DIALECT,
        "title": "tokenflow",
        "type": "object",
        "properties": properties,
        "required": ["models"],
        "additionalProperties": False,
    }
    return whole | _used(definitions, whole)


def _model(engine: str, options: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """An engine's own keys, the one that names it, and the tables that every engine's models have."""
    named = {"engine": {"const": engine, "description": "The engine's name."}}
    return options | {
        "properties": named | options.get("properties", {}) | tables,
        "required": ["engine", *options.get("required", [])],
    }


def _resolved(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a class itself: pydantic hands out a reference to it, so that it could be used twice."""
    return dict(definitions["$defs"][value["$ref"].rpartition("/")[2]])


def _used(definitions: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Definitions that something still refers to: what is written out in place needs none."""
    everything = definitions.get("$defs", {})
    used: dict[str, Any] = {}
    reachable = json.dumps(whole)
    while more := {
        n: d for n, d in everything.items() if n not in used and json.dumps(_REF.format(model=n)) in reachable
    }:
        used |= more
        reachable += json.dumps(more)
    return {"$defs": used} if used else {}


class _Generator(GenerateJsonSchema):
    """Adds what the classes do not tell pydantic: the help of each field, and that there are no other keys."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        made = super().dataclass_schema(schema)
        cls: type = schema["cls"]
        made["additionalProperties"] = False
        made.pop("description", None)
        if words := summary(cls):
            made["description"] = words
        help = field_docs(cls)
        properties = {name: made["properties"][name] for name in keys(cls)}  # not what the class makes itself
        for name in properties.keys() & help.keys():
            properties[name].setdefault("description", help[name])
        return made | {"properties": properties}
