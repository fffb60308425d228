"""Plugins are found and loaded by name, and whatever is wrong with one is one line."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.engines.conftest import ENGINE
from tokenflow.engines.registry import OURS, Registry, installed
from tokenflow.errors import PluginError


@pytest.fixture
def empty() -> Registry:
    """A registry that finds nothing installed."""
    return Registry(find=lambda: ())


def refusal(call, *arguments) -> str:
    with pytest.raises(PluginError) as caught:
        call(*arguments)
    assert "\n" not in caught.value.message
    return caught.value.message


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_offers_engines_and_sinks(empty: Registry, write) -> None:
    path = write("mine.py")
    empty.load_file(path)
    assert empty.engine("echo").name == "echo"
    assert empty.engine_config("echo") is empty.engine("echo").config
    assert empty.sink_config("echo-sink") is empty.sink("echo-sink").config
    [plugin] = empty.plugins()
    assert (plugin.name, plugin.origin) == ("mine", str(path))
    assert list(empty.engines()) == ["echo"]
    assert list(empty.sinks()) == ["echo-sink"]


def test_a_file_is_loaded_once(empty: Registry, write) -> None:
    path = write("mine.py")
    empty.load_file(path)
    config = empty.engine_config("echo")
    empty.load_file(path)
    assert empty.engine_config("echo") is config


def test_a_file_cannot_shadow_a_module(empty: Registry, write) -> None:
    empty.load_file(write("json.py"))
    import json

    assert json.__name__ == "json"
    assert empty.engine_config("echo").__module__.startswith("tokenflow_plugin_json_")


FAULTS = {
    "exception": ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    "syntax": ("def", "cannot be imported: SyntaxError: invalid syntax"),
    "missing module": ("import no_such_module", "cannot be imported: ModuleNotFoundError: No module named"),
    "unknown hook": (
        "from tokenflow.api import hookimpl\n@hookimpl\ndef register_engine(): return []",
        "has a wrong hook: unknown hook 'register_engine'",
    ),
    "no hook": ("def register_engines(): return []", "registers nothing; mark its register_engines or register_sinks"),
    "hook with arguments": (
        "from tokenflow.api import hookimpl\n@hookimpl\ndef register_engines(config): return []",
        "has a wrong hook: ",
    ),
    "hook raises": (
        "from tokenflow.api import hookimpl\n@hookimpl\ndef register_engines(): raise OSError('no disk')",
        "register_engines failed: OSError: no disk; mend the plugin",
    ),
    "hook returns nothing": (
        "from tokenflow.api import hookimpl\n@hookimpl\ndef register_engines(): return 3",
        "register_engines failed: TypeError: 'int' object is not iterable; mend the plugin",
    ),
    "hook returns something else": (
        "from tokenflow.api import hookimpl\n@hookimpl\ndef register_sinks(): return ['x']",
        "register_sinks returned 'x'; return a list of SinkPlugin",
    ),
    "config is no dataclass": (
        ENGINE.format(name="echo").replace("@dataclass(frozen=True, slots=True, kw_only=True)", ""),
        'the config of "echo" is no dataclass; make it one',
    ),
    "config has a taken field": (
        ENGINE.format(name="echo").replace("times: int", "engine: int"),
        'the config of "echo" has a field `engine`, which is taken; rename it',
    ),
}


@pytest.mark.parametrize(("text", "message"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_file(empty: Registry, write, text: str, message: str) -> None:
    path = write("bad.py", text)
    modules = set(sys.modules)
    first = refusal(empty.load_file, path)
    assert message in first
    assert str(path) in first
    assert refusal(empty.load_file, path) == first
    assert empty.plugins() == ()
    if "cannot be imported" in message:
        assert set(sys.modules) == modules
    empty.load_file(write("good.py"))  # what came before does no harm
    assert empty.engine("echo")


def test_a_wrong_hook_names_the_right_ones(empty: Registry, write) -> None:
    line = refusal(empty.load_file, write("bad.py", FAULTS["unknown hook"][0]))
    assert line.endswith("; the hooks are register_engines, register_sinks")


def test_no_such_file(empty: Registry, tmp_path: Path) -> None:
    line = refusal(empty.load_file, tmp_path / "no.py")
    assert line == f"plugin file {tmp_path}/no.py does not exist; paths are relative to the configuration's folder"


def test_no_python_file(empty: Registry, write) -> None:
    path = write("plugin.txt")
    assert refusal(empty.load_file, path) == f"plugin file {path} is no Python file; give it the suffix .py"


# --- installed ------------------------------------------------------------------------------------------------------


def test_only_what_is_asked_for_is_loaded(install) -> None:
    install("tokenflow-tst", {"tst": "tst_plugin"}, tst_plugin=ENGINE.format(name="tst"))
    install("tokenflow-tst-bad", {"tstbad": "tst_bad"}, tst_bad="1 / 0")
    registry = Registry()
    assert registry.plugins() == ()
    assert registry.engine("tst").config(times=2).times == 2
    assert [plugin.origin for plugin in registry.plugins()] == ["tokenflow-tst 1.0"]
    assert "tst_bad" not in sys.modules
    line = refusal(registry.engine, "tstbad")
    assert line == 'plugin "tstbad" (tokenflow-tst-bad 1.0) cannot be imported: ZeroDivisionError: division by zero'


def test_missing_plugin(empty: Registry, write) -> None:
    line = 'no plugin offers the engine "nope"; install the package that does, or name its file in [plugins] files '
    assert refusal(empty.engine, "nope") == line + "(installed: none)"
    empty.load_file(write("mine.py"))
    assert refusal(empty.engine, "nope") == line + "(installed: echo)"


def test_a_missing_plugin_that_is_in_the_repository(empty: Registry) -> None:
    assert refusal(empty.sink, "ledger") == (
        'no plugin offers the sink "ledger"; install it from a clone of tokenflow: pip install ./plugins/ledger, '
        "or name its file in [plugins] files (installed: none)"
    )
    assert "pip install ./plugins/exllama_common ./plugins/exllamav2 (conf/exllamav2.toml says" in refusal(
        empty.engine, "exllamav2"
    )


def test_what_is_in_the_repository_can_be_installed_as_it_is_said() -> None:
    """By the name that a configuration has, with those of its dependencies that no index has."""
    root = Path(__file__).parents[2]
    files = root.glob("plugins/*/pyproject.toml")
    projects = {file.parent: tomllib.loads(file.read_text())["project"] for file in files}
    folders = {project["name"]: folder for folder, project in projects.items()}
    told = dict(OURS)
    for folder, project in projects.items():
        for name in project.get("entry-points", {}).get("tokenflow", {}):
            said = [root / word for word in told.pop(name).split() if word.startswith("./")]
            needed = {folders[need] for need in project["dependencies"] if need in folders}
            assert set(said) == needed | {folder}
    assert not told


def test_misspelt_plugin(install) -> None:
    install("tokenflow-tst", {"tst-engine": "tst_plugin"}, tst_plugin=ENGINE.format(name="tst-engine"))
    assert 'no plugin offers the engine "tst-engin"; did you mean tst-engine? Otherwise install' in refusal(
        Registry().engine, "tst-engin"
    )


def test_misspelt_plugin_of_the_repository(empty: Registry) -> None:
    assert 'the engine "exlamav2"; did you mean exllamav2? Otherwise' in refusal(empty.engine, "exlamav2")


def test_a_sink_is_no_engine(install) -> None:
    install("tokenflow-tst", {"tst-sink": "tst_plugin"}, tst_plugin=ENGINE.format(name="tst"))
    registry = Registry()
    assert registry.sink("tst-sink")
    assert refusal(registry.engine, "tst-sink") == 'plugin "tst-sink" offers no engine of that name; its engines: tst'


def test_an_empty_plugin_offers_nothing(install) -> None:
    install("tokenflow-tst", {"tst": "tst_plugin"}, tst_plugin="")
    assert refusal(Registry().sink, "tst").startswith('plugin "tst" (tokenflow-tst 1.0) registers nothing; mark its ')


def test_one_module_under_two_names(install) -> None:
    text = ENGINE.format(name="tsta") + ENGINE.format(name="tstb").replace("register_sinks", "_").replace(
        'return [EnginePlugin(name="tstb"',
        'return [EnginePlugin(name="tsta", config=tstaConfig, open=open_it), EnginePlugin(name="tstb"',
    )
    install("tokenflow-tst", {"tsta": "tst_plugin", "tstb": "tst_plugin"}, tst_plugin=text)
    registry = Registry()
    assert registry.engine("tsta").name == "tsta"
    assert registry.engine("tstb").name == "tstb"


def test_two_plugins_offer_the_same_engine(install, write) -> None:
    install("tokenflow-tst", {"echo": "tst_plugin"}, tst_plugin=ENGINE.format(name="echo"))
    registry = Registry()
    path = write("mine.py")
    registry.load_file(path)
    assert refusal(registry.engine, "echo") == (
        f'engine "echo" is offered twice, by {path} and tokenflow-tst 1.0; rename one or leave it out'
    )


def test_two_distributions_offer_the_same_plugin(install) -> None:
    install("tokenflow-tst", {"tst": "tst_plugin"}, tst_plugin=ENGINE.format(name="tst"))
    install("tokenflow-tst-two", {"tst": "tst_plugin"})
    line = 'plugin "tst" is installed by tokenflow-tst and tokenflow-tst-two; uninstall one of them'
    assert refusal(Registry().engine, "tst") == line


def test_listing_loads_nothing(install) -> None:
    install("tokenflow-tst", {"tst": "tst_plugin"}, tst_plugin="1 / 0")
    found = {plugin.name: plugin.origin for plugin in installed()}
    assert found["tst"] == "tokenflow-tst 1.0"
    assert "tst_plugin" not in sys.modules


def test_an_entry_point_without_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="tst", value="tst_plugin", group="tokenflow")
    monkeypatch.setattr("tokenflow.engines.registry.entry_points", lambda group: [point])
    assert [plugin.origin for plugin in installed()] == ["? ?"]


def test_load_all_returns_what_fails(install) -> None:
    install("tokenflow-tst", {"tst": "tst_plugin"}, tst_plugin=ENGINE.format(name="tst"))
    install("tokenflow-tst-bad", {"tstbad": "tst_bad"}, tst_bad="1 / 0")
    ours = [plugin for plugin in installed() if plugin.name.startswith("tst")]
    registry = Registry(find=lambda: tuple(ours))
    failures = registry.load_all()
    assert list(failures) == ["tstbad"]
    assert list(registry.engines()) == ["tst"]


def test_models_of_loaded_engines(empty: Registry, write) -> None:
    source = (
        'ModelSource(name="tiny", requirement="tiny==1", member="m", sha256="0", size=1, license="MIT", filename="f")'
    )
    text = ENGINE.format(name="echo").replace("open=open_it)]", f"open=open_it, models=({source},))]", 1)
    empty.load_file(write("mine.py", text.replace("import EnginePlugin", "import ModelSource, EnginePlugin")))
    assert empty.models()["tiny"].requirement == "tiny==1"


def test_files_that_are_missing(empty: Registry, write) -> None:
    text = ENGINE.format(name="echo")
    look = "open=open_it, missing=lambda config: [('times', str(1 // config.times))])]"
    empty.load_file(write("mine.py", text.replace("open=open_it)]", look, 1)))
    empty.load_file(write("other.py", name="other"))
    config = empty.engine_config("echo")
    assert empty.engine_missing("echo", config()) == [("times", "1")]
    assert empty.engine_missing("other", empty.engine_config("other")()) == []
    assert refusal(empty.engine_missing, "echo", config(times=0)) == (
        '"echo" failed to look for its files: ZeroDivisionError: integer division or modulo by zero; mend the plugin'
    )


def test_files_of_sinks_likewise(empty: Registry, write) -> None:
    text = ENGINE.format(name="echo")
    look = 'name="echo-sink", missing=lambda config: [("times", str(1 // config.times))]'
    empty.load_file(write("mine.py", text.replace('name="echo-sink"', look)))
    config = empty.sink_config("echo-sink")
    assert empty.sink_missing("echo-sink", config()) == [("times", "1")]
    assert '"echo-sink" failed to look for its files: ZeroDivisionError' in refusal(
        empty.sink_missing, "echo-sink", config(times=0)
    )


def test_one_distribution_with_several_plugins(install) -> None:
    modules = {"tst_a": ENGINE.format(name="tsta"), "tst_b": ENGINE.format(name="tstb"), "tst_c": "1 / 0"}
    install("tokenflow-tst", {"tsta": "tst_a", "tstb": "tst_b", "tstc": "tst_c"}, **modules)
    registry = Registry()
    assert "division by zero" in refusal(registry.engine, "tstc")
    assert registry.engine("tstb").name == "tstb"
    assert registry.engine("tsta").name == "tsta"
    offers = {plugin.name: registry.offered_by(plugin) for plugin in installed() if plugin.name.startswith("tst")}
    assert [engine.name for engine in offers["tsta"].engines] == ["tsta"]
    assert offers["tstc"] is None
