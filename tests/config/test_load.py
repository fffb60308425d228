"""Right configurations: what comes out of them, and what is said to come from where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tokenflow.chat.calls import CALLS
from tokenflow.chat.reasoning import THINK
from tokenflow.config import Config, Flag, KeyConfig, load, show
from tokenflow.config.keys import dotted
from tokenflow.config.load import SECTIONS, flatten
from tokenflow.config.model import ChatConfig
from tokenflow.core.hosts import is_loopback

HASH = "0123456789abcdef" * 4
MODEL = '[models.m]\nengine = "echo"\n'


def test_defaults(load_text, catalogue) -> None:
    config = load_text(MODEL).config
    assert {name: getattr(config, name) for name in SECTIONS} == {name: cls() for name, cls in SECTIONS.items()}
    assert config.models["m"].engine == "echo"
    assert config.models["m"].options == catalogue.engine_config("echo")()
    assert config.sinks == {}


def test_every_section_has_its_default_in_config() -> None:
    assert Config() == Config(**{name: cls() for name, cls in SECTIONS.items()})


def test_values_of_all_kinds(load_text) -> None:
    text = f"""
    sinks = {{ needy.path = "x" }}
    [server]
    drain_s = 3          # an integer is a number
    [[auth.keys]]
    name = "a"
    sha256 = "{HASH}"
    [plugins]
    files = ["a.py", "sub/b.py"]
    [models."smol.lm"]
    engine = "echo"
    file = "some/file"
    mode = "loud"
    size = 7
    weights = {{ a = 1, b = 2.5 }}
    tags = ["x", "x", "y"]
    voices = [{{ name = "v" }}, {{ name = "w", pitch = 2 }}]
    [models."smol.lm".voice]
    name = "u"
    """
    config = load_text(text).config
    assert config.server.drain_s == 3.0
    assert type(config.server.drain_s) is float
    assert config.auth.keys == (KeyConfig(name="a", sha256=HASH),)
    assert config.plugins.files == ("a.py", "sub/b.py")
    assert config.sinks["needy"].path == "x"
    options = config.models["smol.lm"].options
    assert (options.file, options.mode, options.size, options.tags) == (Path("some/file"), "loud", 7, {"x", "y"})
    assert options.weights == {"a": 1.0, "b": 2.5}
    assert [(voice.name, voice.pitch) for voice in (options.voice, *options.voices)] == [("u", 1), ("v", 1), ("w", 2)]


def test_plugin_files_are_relative_to_the_configuration(load_text, catalogue) -> None:
    load_text('plugins.files = ["a.py"]\n' + MODEL)
    assert catalogue.files == [Path("conf/a.py")]


def test_a_models_chat_is_beside_its_engines_keys(load_text) -> None:
    Path("conf/a.jinja").write_text("{{ messages }}")
    chat = '[models.m.chat]\ntemplate_file = "a.jinja"\ntool_calls = "hermes"\ntemplate_kwargs = ["effort"]\n'
    model = load_text(MODEL + "times = 3\n" + chat).config.models["m"]
    assert model.options.times == 3
    assert (model.chat.template_file, model.chat.tool_calls) == (Path("conf/a.jinja"), "hermes")
    assert (model.chat.reasoning, model.chat.template_kwargs) == ("auto", ("effort",))
    assert load_text(MODEL).config.models["m"].chat == ChatConfig()


def test_a_models_defaults(load_text) -> None:
    loaded = load_text(MODEL + "[models.m.defaults]\nmax_tokens = 100\ntemperature = 0.7\ntop_p = 1\n")
    defaults = loaded.config.models["m"].defaults
    assert (defaults.max_tokens, defaults.sampling) == (100, {"temperature": 0.7, "top_p": 1.0})
    assert loaded.provenance["models.m.defaults.temperature"].endswith(":5")


def test_chats_formats_are_those_that_can_be_read() -> None:
    """The configuration is told of them by name, for it knows nothing of chat."""
    hints = get_type_hints(ChatConfig)
    assert set(get_args(hints["tool_calls"])) == {"auto", "none", "harmony", *CALLS}
    assert set(get_args(hints["reasoning"])) == {"auto", "none", "harmony", *THINK}


def test_only_what_is_named_is_asked_for(load_text, catalogue) -> None:
    asked: list[str] = []
    catalogue.engine_config = lambda name: asked.append(name) or catalogue.classes[name]
    load_text(MODEL)
    assert asked == ["echo"]


def test_a_byte_order_mark_is_no_key(load_text) -> None:
    assert load_text(b"\xef\xbb\xbf" + MODEL.encode()).config.models


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(load_text, host: str) -> None:
    assert is_loopback(host)
    assert load_text(f'server.host = "{host}"\n{MODEL}').config.server.host == host


def test_with_keys_any_host(load_text) -> None:
    text = f'server.host = "0.0.0.0"\nauth.keys = [{{ name = "a", sha256 = "{HASH}" }}]\n{MODEL}'
    assert load_text(text).config.server.host == "0.0.0.0"


# --- who outranks whom ----------------------------------------------------------------------------------------------


def test_flag_over_environment_over_file_over_default(load_text) -> None:
    text = f"[server]\nport = 1\nname = 'file'\ndrain_s = 1\n{MODEL}"
    env = {"TOKENFLOW_SERVER__PORT": "2", "TOKENFLOW_SERVER__NAME": "env"}
    loaded = load_text(text, env, server__port=Flag("--port", 3))
    server = loaded.config.server
    assert (server.port, server.name, server.drain_s, server.host) == (3, "env", 1.0, "127.0.0.1")
    where = {key: loaded.provenance[f"server.{key}"] for key in ("port", "name", "drain_s", "host")}
    assert where == {
        "port": "--port",
        "name": "environment TOKENFLOW_SERVER__NAME",
        "drain_s": "conf/x.toml:4",
        "host": "default",
    }


def test_every_key_has_a_provenance(load_text) -> None:
    loaded = load_text(MODEL + 'voices = [{ name = "a" }]\n[[auth.keys]]\nname = "a"\nsha256 = "' + HASH + '"')
    assert loaded.provenance["models.m.engine"] == "conf/x.toml:2"
    assert loaded.provenance["models.m.times"] == "default"
    assert loaded.provenance["models.m.voices[0].name"] == "conf/x.toml:3"
    assert loaded.provenance["models.m.voices[0].pitch"] == "default"
    assert loaded.provenance["auth.keys[0].sha256"] == "conf/x.toml:6"
    assert loaded.provenance["sinks"] == "default"


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("SERVER__PORT", "9000", "server.port", 9000),
        ("SERVER__DEBUG", "true", "server.debug", True),
        ("SERVER__NAME", "seven", "server.name", "seven"),
        ("SERVER__NAME", "7", "server.name", "7"),
        ("SERVER__NAME", '"quoted"', "server.name", "quoted"),
        ("PLUGINS__FILES", '["a.py"]', "plugins.files", ("a.py",)),
        ("LIMITS__MAX_TOKENS", "5", "limits.max_tokens", 5),
        ("MODELS__MY_MODEL_1__API_KEY", '{"a": 1}', 'models."My-Model.1".api_key', '{"a": 1}'),
        ("MODELS__MY_MODEL_1__FILE", "7", 'models."My-Model.1".file', Path("7")),
        ("MODELS__MY_MODEL_1__WEIGHTS", '{"a": 1}', 'models."My-Model.1".weights.a', 1.0),
        ("MODELS__MY_MODEL_1__TIMES", "5", 'models."My-Model.1".times', 5),
        ("MODELS__MY_MODEL_1__API_KEY", "1979-05-27", 'models."My-Model.1".api_key', "1979-05-27"),
        ("MODELS__MY_MODEL_1__SIZE", "5", 'models."My-Model.1".size', 5),
        ("MODELS__MY_MODEL_1__VOICE__NAME", "5", 'models."My-Model.1".voice.name', "5"),
    ],
)
def test_environment(load_text, name: str, text: str, key: str, value: object) -> None:
    loaded = load_text('[models."My-Model.1"]\nengine = "echo"', {f"TOKENFLOW_{name}": text})
    assert {dotted(path): found for path, found in flatten(loaded.config)}[key] == value
    assert loaded.provenance[key] == f"environment TOKENFLOW_{name}"


def test_a_whole_list_from_the_environment_replaces_that_of_the_file(load_text) -> None:
    text = f'[[auth.keys]]\nname = "a"\nsha256 = "{HASH}"\n{MODEL}'
    for variable in (f'[{{ name = "b", sha256 = "{HASH}" }}]', f'[{{"name": "b", "sha256": "{HASH}"}}]'):
        loaded = load_text(text, {"TOKENFLOW_AUTH__KEYS": variable})
        assert [key.name for key in loaded.config.auth.keys] == ["b"]
        assert loaded.provenance["auth.keys[0].name"] == "environment TOKENFLOW_AUTH__KEYS"


def test_other_variables_are_left_alone(load_text) -> None:
    assert load_text(MODEL, {"TOKENFLOW_CACHE": "x", "TOKENFLOW_CONFIG": "y", "OTHER__X": "1"}).config.models


def test_a_value_cannot_smuggle_in_another_key(load_text) -> None:
    loaded = load_text(MODEL, {"TOKENFLOW_MODELS__M__SIZE": "1\nother = 2"})
    assert loaded.config.models["m"].options.size == "1\nother = 2"


def test_without_a_file(catalogue) -> None:
    env = {"TOKENFLOW_MODELS__M__ENGINE": "echo", "TOKENFLOW_MODELS__M__TIMES": "3"}
    loaded = load(None, env, {"server.port": 0}, catalogue)
    assert loaded.config.models["m"].options.times == 3
    assert loaded.provenance["server.port"] == "--set server.port"


def test_set_reaches_quoted_keys(load_text) -> None:
    loaded = load_text('[models."smol.lm"]\nengine = "echo"', **{'models."smol.lm".times': "4"})
    assert loaded.config.models["smol.lm"].options.times == 4


# --- show -----------------------------------------------------------------------------------------------------------


def test_show(load_text) -> None:
    text = (
        f'[server]\nport = 9\n{MODEL}api_key = "hunter2"\nfile = "a b"\nvoices = [{{ name = "v" }}]\nweights.x = 1'
        f'\n[[auth.keys]]\nname = "ann"\nsha256 = "{HASH}"'
    )
    shown = show(load_text(text))
    lines = {line.partition(" = ")[0]: line.partition(" = ")[2] for line in shown.splitlines()}
    columns = {key: tuple(part.strip() for part in rest.rsplit("# ", 1)) for key, rest in lines.items()}
    assert columns["server.port"] == ("9", "conf/x.toml:2")
    assert columns["server.host"] == ('"127.0.0.1"', "default")
    assert columns["limits.max_tokens"] == ("unset", "default")
    assert columns["auth.keys[0].name"] == ('"ann"', "conf/x.toml:10")
    assert columns["auth.keys[0].sha256"] == ('"01234567…"', "conf/x.toml:11")
    assert columns["models.m.api_key"] == ('"***"', "conf/x.toml:5")
    assert columns["models.m.file"] == ('"a b"', "conf/x.toml:6")
    assert columns["models.m.voices[0].pitch"] == ("1.0", "default")
    assert columns["models.m.weights.x"] == ("1.0", "conf/x.toml:8")
    assert "hunter2" not in shown
    assert HASH not in shown
    assert len({line.index("  # ") for line in shown.splitlines()}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BareConfig:
    """Has no keys."""


def test_show_has_what_has_no_keys(load_text, catalogue) -> None:
    catalogue.classes = {**catalogue.classes, "bare": BareConfig}
    shown = show(load_text('[models.m]\nengine = "bare"\n[sinks.bare]\n[sinks.echo]\n'))
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "sinks.bare = {} # conf/x.toml:3" in rows
    assert "sinks.echo.times = 1 # default" in rows
    assert [row for row in rows if row.startswith("models.m") and not re.search(r"\.(chat|defaults)\.", row)] == [
        'models.m.engine = "bare" # conf/x.toml:2'
    ]
    shown = show(load_text(MODEL, {"TOKENFLOW_SINKS__BARE": "{}"}))
    assert "sinks.bare = {} # environment TOKENFLOW_SINKS__BARE" in [
        " ".join(row.split()) for row in shown.splitlines()
    ]
