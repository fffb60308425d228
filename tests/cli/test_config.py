"""`tokenflow config`, `plugins`, `engine check`: what they print, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import CONFIG
from tokenflow.cli.group import Group
from tokenflow.errors import PluginError, StartupError, TokenflowError


def test_check(run, folder: Path) -> None:
    result = run("config", "check")
    assert (result.exit_code, result.stdout) == (0, "The configuration holds. Models: m.\n")


def test_all_problems_on_stderr(run, folder: Path) -> None:
    (folder / "x.toml").write_text(CONFIG + "time = 3\n[server]\nport = true\n")
    result = run("config", "check", "-c", "x.toml")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "tokenflow: x.toml:5: models.m.time: unknown key; did you mean times?\n"
        "tokenflow: x.toml:7: server.port: expected an integer, got true; write a number like 8000\n"
    )


@pytest.mark.parametrize("command", [("config", "check"), ("serve",)], ids=" ".join)
def test_a_template_that_is_none_is_told_before_a_model_is_read(run, folder: Path, command: tuple[str, ...]) -> None:
    (folder / "a.jinja").write_text("{% if %}")
    (folder / "b.jinja").write_bytes(b"\xff")
    chats = [
        *('template_file = "a.jinja"', 'template_file = "b.jinja"', 'template = "{{ messages }}"'),
        'template = "{{ a"',
    ]
    ids = ["m0", "m1", "m2", '"m.3"']
    models = [
        f'[models.{id}]\nengine = "synthetic"\n[models.{id}.chat]\n{chat}\n'
        for id, chat in zip(ids, chats, strict=True)
    ]
    (folder / "x.toml").write_text("".join(models))
    result = run(*command, "-c", "x.toml")
    assert (result.exit_code, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert [line.partition(": ")[2].partition(": ")[0] for line in lines] == ["x.toml:4", "x.toml:8", "x.toml:16"]
    assert "models.m0.chat.template_file: chat template, line 1: Expected an expression" in lines[0]
    assert lines[1].endswith("models.m1.chat.template_file: byte 0xff is not UTF-8; save it as UTF-8")
    assert 'models."m.3".chat.template: ' in lines[2]


def test_check_looks_for_the_files_of_models(run, folder: Path) -> None:
    models = '[models.a]\nengine = "llamacpp"\nmodel = "a.gguf"\n[models.b]\nengine = "llamacpp"\nmodel = "b.gguf"\n'
    (folder / "x.toml").write_text(models + "[server]\nport = true\n")
    result = run("config", "check", "-c", "x.toml")
    assert (result.exit_code, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"tokenflow: x.toml:3: models.a.model: {folder}/a.gguf: there is no such model file; ")
    assert lines[1].startswith(f"tokenflow: x.toml:6: models.b.model: {folder}/b.gguf: there is no such model file; ")
    assert lines[2].startswith("tokenflow: x.toml:8: server.port: ")
    (folder / "x.toml").write_text(models)
    assert run("config", "show", "-c", "x.toml").exit_code == 0


def test_a_folder_is_no_model(run, folder: Path) -> None:
    (folder / "dir.gguf").mkdir()
    flags = ("--set", "models.m.engine=llamacpp", "--set", "models.m.model=dir.gguf")
    assert run("config", "check", *flags).stderr == (
        f"tokenflow: --set models.m.model: models.m.model: {folder}/dir.gguf: this is a directory; "
        "`model` is the path of a GGUF file in it\n"
    )


@pytest.mark.parametrize("command", [("config", "check"), ("serve",)], ids=" ".join)
def test_a_ledger_that_cannot_be_written_is_told_by_its_line(run, folder: Path, command: tuple[str, ...]) -> None:
    (folder / "taken").touch()
    (folder / "x.toml").write_text(CONFIG + '[sinks.ledger]\npath = "taken/deep/l.jsonl"\n')
    result = run(*command, "-c", "x.toml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"tokenflow: x.toml:6: sinks.ledger.path: cannot write {folder}/taken/deep/l.jsonl: "
        "Not a directory (errno 20); make it writable for this user, or name another file\n"
    )


def test_a_word_where_a_number_stands_for_all(run, folder: Path) -> None:
    (folder / "x.toml").write_text('[models.a]\nengine = "llamacpp"\ngpu_layers = "all"\n')
    assert run("config", "show", "-c", "x.toml").stderr == (
        'tokenflow: x.toml:3: models.a.gpu_layers: expected an integer, got "all"; write a number from -1 on '
        "(Layers to put on the GPU. Unset or -1: as many as this build of llama.cpp can)\n"
    )


def test_a_context_larger_than_its_cache_does_not_hold(run, folder: Path) -> None:
    (folder / "x.toml").write_text('[models.a]\nengine = "llamacpp"\ncontext_length = 1000000\ncache_tokens = 10\n')
    assert run("config", "show", "-c", "x.toml").stderr == (
        "tokenflow: x.toml:1: models.a: context_length = 1000000 is larger than cache_tokens = 10, which has to hold "
        "it; lower context_length or raise cache_tokens\n"
    )


def test_a_missing_model_does_not_hide_a_template(run, folder: Path) -> None:
    (folder / "x.toml").write_text(
        '[models.f]\nengine = "synthetic"\nchat = { template = "{% if" }\n'
        '[models.b]\nengine = "llamacpp"\nmodel = "/x.gguf"\n'
    )
    lines = run("config", "check", "-c", "x.toml").stderr.splitlines()
    assert [line.removeprefix("tokenflow: x.toml:")[:25] for line in lines] == [
        "3: models.f.chat.template",
        "6: models.b.model: /x.ggu",
    ]


def test_show(run, folder: Path) -> None:
    result = run("config", "show", "--set", "models.m.api_key=hunter2", "--set", "server.port = 9")
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "server.port = 9 # --set server.port" in rows
    assert 'models.m.engine = "echo" # tokenflow.toml:4' in rows
    assert 'models.m.api_key = "***" # --set models.m.api_key' in rows


def test_set_needs_a_value(run, folder: Path) -> None:
    result = run("config", "show", "--set", "server.port")
    assert result.exit_code == 2
    assert "'server.port' has no '='; write --set server.port=9000" in result.stderr


def test_schema(run, folder: Path) -> None:
    whole = json.loads(run("config", "schema").stdout)
    [model] = whole["properties"]["models"]["additionalProperties"]["anyOf"]
    assert model["properties"]["times"]["description"] == "How often."


def test_schema_of_all_that_is_installed(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokenflow.cli.config.Registry.load_all", lambda self: {"bad": PluginError("bad is broken")})
    result = run("config", "schema", "--installed")
    assert json.loads(result.stdout)["title"] == "tokenflow"
    assert result.stderr == "tokenflow: left out: bad is broken\n"


def test_template_for_other_plugins(run) -> None:
    text = run("config", "template", "--model", "a=synthetic", "--model", "synthetic", "--sink", "ledger").stdout
    assert [line for line in text.splitlines() if line.startswith(("[models", "[sinks"))] == [
        "[models.a]",
        "[models.a.chat]",
        "[models.a.defaults]",
        "[models.synthetic]",
        "[models.synthetic.chat]",
        "[models.synthetic.defaults]",
        "[sinks.ledger]",
    ]


# --- which configuration --------------------------------------------------------------------------------------------


def test_the_first_that_exists(run, folder: Path) -> None:
    (folder / "conf").mkdir()
    (folder / "conf/tokenflow.toml").write_text(CONFIG.replace("echo_plugin", "../echo_plugin").replace("m]", "other]"))
    assert "Models: m." in run("config", "check").stdout
    (folder / "tokenflow.toml").unlink()
    assert "Models: other." in run("config", "check").stdout


def test_named_by_the_environment(run, folder: Path) -> None:
    (folder / "x.toml").write_text(CONFIG.replace("models.m", "models.x"))
    assert "Models: x." in run("config", "check", env={"TOKENFLOW_CONFIG": "x.toml"}).stdout
    assert "Models: m." in run("config", "check", "-c", "tokenflow.toml", env={"TOKENFLOW_CONFIG": "x.toml"}).stdout


def test_the_environment_alone(run, folder: Path) -> None:
    (folder / "tokenflow.toml").unlink()
    env = {"TOKENFLOW_PLUGINS__FILES": '["echo_plugin.py"]', "TOKENFLOW_MODELS__M__ENGINE": "echo"}
    assert "Models: m." in run("config", "check", env=env).stdout


def test_none_at_all(run, folder: Path) -> None:
    (folder / "tokenflow.toml").unlink()
    result = run("config", "check")
    assert result.exit_code == 1
    assert result.stderr == (
        "tokenflow: no configuration: there is neither tokenflow.toml nor conf/tokenflow.toml here. Name one with "
        "-c FILE or TOKENFLOW_CONFIG, write one with `tokenflow config template > tokenflow.toml`, or do without: "
        "--set models.qwen.engine=llamacpp --set models.qwen.model=FILE.gguf\n"
    )
    assert run("config", "check", "--set", "server.port=9").stderr == result.stderr


def test_models_that_flags_name_need_no_file(run, folder: Path) -> None:
    (folder / "tokenflow.toml").unlink()
    (folder / "qwen.gguf").write_bytes(b"GGUF")
    flags = ("--set", "models.qwen.engine=llamacpp", "--set", "models.qwen.model=qwen.gguf")
    assert run("config", "check", *flags).stdout == "The configuration holds. Models: qwen.\n"
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"\ntokenflow serve {' '.join(flags)}\n" in readme


STRAY = "environment TOKENFLOW_SERVER_PORT: no variable of tokenflow's, so it is ignored; "


def test_a_variable_that_is_none_is_told(run, folder: Path) -> None:
    result = run("config", "check", env={"TOKENFLOW_SERVER_PORT": "9"})
    assert result.exit_code == 0
    assert result.stderr == f"tokenflow: {STRAY}did you mean TOKENFLOW_SERVER__PORT?\n"


def test_serve_logs_it(run, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.cli.serve.start_logging", lambda level: None)
    run("serve", "--set", "server.port=x", env={"TOKENFLOW_SERVER_PORT": "9"})
    assert [record.getMessage() for record in caplog.records] == [f"{STRAY}did you mean TOKENFLOW_SERVER__PORT?"]


# --- plugins --------------------------------------------------------------------------------------------------------


def test_plugins(run) -> None:
    lines = run("plugins").stdout.splitlines()
    assert [line for line in lines if line.startswith("synthetic ")] == ["synthetic   tokenflow-synthetic 0.1.0"]
    assert not any(line.startswith(" ") for line in lines)


def test_plugins_loaded(run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run("plugins", "--load").stdout
    assert "llamacpp    tokenflow-llamacpp 0.1.0\n  engines: llamacpp\n  models: smollm2-135m-instruct\n" in text
    assert "ledger      tokenflow-ledger 0.1.0\n  sinks: ledger\n" in text


def test_a_plugin_that_fails_is_listed(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.cli.plugins.Registry.load_all", lambda self: {"ledger": PluginError("is broken")})
    assert "ledger      tokenflow-ledger 0.1.0\n  fails: is broken\n" in run("plugins", "--load").stdout


def test_no_plugin(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.cli.plugins.installed", lambda: ())
    said = "No plugin is installed. For an engine, in a clone of tokenflow: pip install ./plugins/llamacpp\n"
    assert run("plugins").stdout == said


# --- engine check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1])
def test_engine_check(run, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    asked = []

    def check(config, registry, name) -> int:
        asked.append((list(config.models), registry.engine("echo").name, name))
        return code

    monkeypatch.setattr("tokenflow.testing.check.run", check)
    assert run("engine", "check", "m").exit_code == code
    assert asked == [(["m"], "echo", "m")]


def test_engine_check_of_an_unknown_model(run, folder: Path) -> None:
    result = run("engine", "check", "n")
    assert (result.exit_code, result.stderr) == (1, 'tokenflow: no model "n" is configured; there is m\n')


def test_engine_check_without_pytest(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, "tokenflow.testing.check", raising=False)
    result = run("engine", "check", "m")
    assert result.exit_code == 1
    assert result.stderr.startswith("tokenflow: the conformance kit needs pytest; install it: pip install pytest")


def test_a_broken_kit_is_a_fault_of_ours(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenflow.testing.check", None)
    assert isinstance(run("engine", "check", "m").exception, ModuleNotFoundError)


# --- failing --------------------------------------------------------------------------------------------------------


def failing(run, error: BaseException):
    group = Group()

    @group.command("fail")
    def fail() -> None:
        raise error

    from click.testing import CliRunner

    return CliRunner().invoke(group, ["fail"])


def test_known_errors_in_groups_are_lines_too(run) -> None:
    group = BaseExceptionGroup("", [StartupError("a"), ExceptionGroup("", [PluginError("b"), StartupError("a")])])
    result = failing(run, group)
    assert (result.exit_code, result.stderr) == (1, "tokenflow: a\ntokenflow: b\n")


@pytest.mark.parametrize(
    "error", [TokenflowError("ours"), ExceptionGroup("", [StartupError("a"), ValueError("b")]), ValueError("c")]
)
def test_unforeseen_errors_keep_their_trace(run, error: Exception) -> None:
    assert failing(run, error).exception is error


def test_interrupted(run) -> None:
    assert failing(run, KeyboardInterrupt()).exit_code == 130


def test_the_help_of_serve_says_what_signals_do(run) -> None:
    said = " ".join(run("serve", "--help").stdout.split())
    assert "for up to server.drain_s seconds; a second one ends them at once." in said


COMMANDS = ["serve", "chat", "lab", "pull", "config check", "config template", "plugins", "engine check"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_narrow_terminal_breaks_no_words_of_the_help(run, command: str) -> None:
    narrow, wide = (run(*command.split(), "--help", env={"COLUMNS": width}).stdout.split() for width in ("40", "80"))
    assert set(narrow) - set(wide) == set()


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "tokenflow", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tokenflow, version ")


def test_the_console_script_is_the_same() -> None:
    from importlib.metadata import entry_points

    from tokenflow.cli import main

    [script] = entry_points(group="console_scripts", name="tokenflow")
    assert script.load() is main
