"""The JSON schema, the template, and the files in conf/ that must be what the code says."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokenflow.cli import main
from tokenflow.config import Config, ServerConfig, schema, template
from tokenflow.config.docs import field_docs, summary
from tokenflow.config.load import SECTIONS
from tokenflow.config.model import ChatConfig
from tokenflow.config.shape import keys
from tokenflow.engines.registry import Registry

ROOT = Path(__file__).parents[2]


# --- help -----------------------------------------------------------------------------------------------------------


def test_every_key_of_ours_has_help() -> None:
    for cls in SECTIONS.values():
        assert set(field_docs(cls)) >= set(keys(cls)), cls
        assert summary(cls)


def test_help_is_one_line_and_inherited() -> None:
    assert field_docs(Child) == {"a": "First, on two lines.", "b": "Second."}


def test_no_source_no_help() -> None:
    made = dataclass(type("Made", (), {"__annotations__": {"x": int}}))
    assert field_docs(made) == {}
    assert summary(made) == ""


@dataclass
class Parent:
    a: int
    """First,
    on two lines."""
    c: int


@dataclass
class Child(Parent):
    b: int
    """Second."""


# --- schema ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(catalogue) -> dict:
    return schema(catalogue.classes, {"needy": catalogue.sink_config("needy")})


def test_schema_of_our_own_keys(whole: dict) -> None:
    assert whole["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert list(whole["properties"]) == [*SECTIONS, "models", "sinks"]
    port = whole["properties"]["server"]["properties"]["port"]
    assert (port["type"], port["minimum"], port["maximum"], port["default"]) == ("integer", 0, 65535, 8000)
    assert port["description"] == field_docs(ServerConfig)["port"]
    assert whole["properties"]["server"]["additionalProperties"] is False
    assert whole["required"] == ["models"]


def test_schema_of_plugins_keys(whole: dict) -> None:
    echo, needy = whole["properties"]["models"]["additionalProperties"]["anyOf"]
    assert list(echo["properties"])[:2] == ["engine", "times"]
    assert echo["properties"]["engine"]["const"] == "echo"
    assert "both" not in echo["properties"]
    assert echo["properties"]["times"]["description"] == "How often."
    assert (echo["required"], needy["required"]) == (["engine"], ["engine", "path"])
    assert whole["properties"]["sinks"]["properties"]["needy"]["required"] == ["path"]


def test_schema_refers_to_nothing_that_is_not_there(whole: dict) -> None:
    text = json.dumps(whole)
    assert {name for name in whole["$defs"] if f'"#/$defs/{name}"' in text} == set(whole["$defs"])
    assert text.count('"$ref"') == sum(text.count(f'"$ref": "#/$defs/{name}"') for name in whole["$defs"])
    assert whole["$defs"]["Voice"]["properties"]["name"]["description"] == "Whose."


def test_schema_without_plugins() -> None:
    assert schema({}, {})["properties"]["sinks"]["properties"] == {}


# --- template -------------------------------------------------------------------------------------------------------


def test_template_changes_nothing(load_text, catalogue) -> None:
    text = template({"m": ("echo", catalogue.engine_config("echo"))}, {"echo": catalogue.sink_config("echo")})
    config = load_text(text).config
    assert {name: getattr(config, name) for name in SECTIONS} == {name: getattr(Config(), name) for name in SECTIONS}
    assert config.models["m"].options == catalogue.engine_config("echo")()
    assert config.sinks["echo"] == catalogue.engine_config("echo")()


def test_template_has_every_key(catalogue) -> None:
    text = template({"m": ("echo", catalogue.engine_config("echo"))}, {})
    for cls in (*SECTIONS.values(), catalogue.engine_config("echo")):
        for key in keys(cls):
            assert any(
                line.lstrip("#[").startswith((f"{key} = ", "auth.keys]]", "models.m.voices]]"))
                for line in text.splitlines()
            ), key


def test_template_switches_off_what_has_no_default(catalogue) -> None:
    text = template({"m": ("needy", catalogue.engine_config("needy"))}, {"echo": catalogue.sink_config("echo")})
    assert '# Where to.\n#path = "<text>"\n' in text
    assert '#file = "<path>"\n' in text
    assert "#voice = <value>\n" in text
    assert '#level = "low"\n' in text
    assert "pair = [1.0, 2.0]\n" in text
    assert '#[[sinks.echo.voices]]\n# Whose.\n#name = "<text>"\n' in text


def test_switched_on_rows_are_right(load_text, catalogue) -> None:
    text = template({"m": ("echo", catalogue.engine_config("echo"))}, {})
    on = text.replace("#[[auth.keys]]", "[[auth.keys]]").replace('#name = "<text>"', 'name = "a"', 1)
    on = on.replace('#sha256 = "<text>"', f'sha256 = "{"a" * 64}"')
    assert load_text(on).config.auth.keys[0].name == "a"


# --- the files in conf/ ---------------------------------------------------------------------------------------------


def test_the_whole_configuration_is_what_the_command_writes() -> None:
    written = CliRunner().invoke(main, ["config", "template"])
    assert written.exit_code == 0, written.output
    assert (ROOT / "conf/tokenflow.toml").read_text() == written.stdout, (
        "write it anew: tokenflow config template > conf/tokenflow.toml"
    )


def test_each_key_that_is_a_file_says_what_it_is_relative_to() -> None:
    registry = Registry()
    classes = [*SECTIONS.values(), ChatConfig, registry.engine_config("llamacpp"), registry.sink_config("ledger")]
    told = {key: help for cls in classes for key, help in field_docs(cls).items() if re.search(r"\bfiles?\b", help)}
    assert told.keys() == {"tls_certificate", "tls_key", "files", "template_file", "model", "path"}
    assert [help for help in told.values() if "elative to the " not in help] == []


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("*.toml")), ids=lambda path: path.name)
def test_configurations_hold(path: Path) -> None:
    from tokenflow.config import load

    assert load(path, {}, {}, Registry()).config.models


def test_the_two_configurations_say_the_same() -> None:
    whole, minimal = (tomllib.loads((ROOT / "conf" / name).read_text()) for name in ("tokenflow.toml", "minimal.toml"))
    assert list(whole["models"]) == list(minimal["models"]) == ["smollm2"]
    assert list(whole["sinks"]) == ["prometheus", "ledger"]
    assert whole["server"]["host"] == "127.0.0.1"
    assert whole["server"]["port"] == 8000
