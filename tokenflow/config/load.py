"""Configuration in one call: read what was written, check all of it, say where each value came from.

Flag over environment over file over default. The tables of models and sinks belong to plugins, so their classes are
asked from a catalogue that is passed in; it may load a plugin the moment its name is asked for, and not before. Every
check notes its problems and goes on with what is right, so that one run shows all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from tokenflow.config.check import check_table
from tokenflow.config.keys import KeyPath, dotted, got, has
from tokenflow.config.model import MODEL_TABLES, ChatConfig, Config, DefaultsConfig, ModelConfig, ServerConfig
from tokenflow.config.raw import Raw, read
from tokenflow.config.rules import findings
from tokenflow.config.tls import tls_fault
from tokenflow.config.words import assigned, unknown_key
from tokenflow.errors import PluginError

SECTIONS: dict[str, type] = {
    name: hint for name, hint in get_type_hints(Config).items() if isinstance(hint, type) and is_dataclass(hint)
}
"""The tables whose keys are ours."""
OUR_KEYS = frozenset({"engine", *MODEL_TABLES})
"""Keys of a model's table that are not its engine's."""

TemplateFault = Callable[[str | Path], str | None]
"""What is wrong with a chat template, given as text or as a file; None: nothing."""
Missing = Callable[[Any], Iterable[tuple[str, str]]]
"""Files that a plugin's options name and that cannot be had: the key, and what to do."""


class Catalogue(Protocol):
    """What is asked about plugins. Each method raises PluginError with a line for people."""

    def load_file(self, path: Path) -> None:
        """Load a plugin that is a file."""

    def engine_config(self, name: str) -> type:
        """The configuration class of an engine."""
        ...

    def sink_config(self, name: str) -> type:
        """The configuration class of a sink."""
        ...

    def engine_missing(self, name: str, options: Any) -> Iterable[tuple[str, str]]:
        """Files that an engine's options name and that cannot be had: the key, and what to do."""
        ...

    def sink_missing(self, name: str, options: Any) -> Iterable[tuple[str, str]]:
        """The same of a sink."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration that holds, and how it came about."""

    config: Config
    provenance: Mapping[str, str]
    """For every dotted key: `conf/x.toml:4`, `environment TOKENFLOW_SERVER__PORT`, `--port` or `default`."""


def load(
    path: Path | str | None,
    env: Mapping[str, str],
    overrides: Mapping[str, object],
    catalogue: Catalogue,
    *,
    look: bool = False,
    template_fault: TemplateFault = lambda given: None,
) -> Loaded:
    """Load a configuration.

    Args:
        path: the TOML file; None: environment and flags alone.
        env: `TOKENFLOW_<SECTION>__<KEY>` is read from it, as a TOML value, a list or table in JSON, or else as text.
        overrides: by dotted key. Strings are read like those of the environment. `Flag(name, value)` says which flag
            a value came from; otherwise it is taken to be `--set`.
        catalogue: knows the plugins; those that the configuration names are asked for, no others.
        look: whether the files that it names can be had, too.
        template_fault: asked about each chat template that it gives: known now, and not after the minutes that a model
            takes.

    Raises:
        ConfigError: with every problem, one line each.
    """
    raw = read(Path(path) if path is not None else None, env, overrides)
    _check_sections(raw)
    sections = {name: _section(raw, name, hint) for name, hint in SECTIONS.items()}
    for finding in findings({name: section for name, section in sections.items() if section is not None}):
        if not raw.is_wrong(finding.key) and not raw.is_wrong(finding.other):
            raw.problem(finding.key, finding.text)
    _load_files(raw, catalogue)
    models = dict(_models(raw, catalogue, template_fault))
    sinks = dict(_sinks(raw, catalogue))
    if look:
        for name, model in models.items():
            _look(raw, ("models", name), ("engine",), model.options, partial(catalogue.engine_missing, model.engine))
        for name, options in sinks.items():
            _look(raw, ("sinks", name), (), options, partial(catalogue.sink_missing, name))
        _look_at_tls(raw, sections["server"])
    raw.raise_problems()
    config = Config(**sections, models=models, sinks=sinks)
    return Loaded(config=config, provenance={dotted(key): _origin(raw, key) for key, _ in flatten(config)})


def flatten(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """All keys of a configuration with their plain values, in order. A model's options count as its own keys.

    A table that can have no keys is there for itself: it switches something on.
    """
    if is_dataclass(value) and not fields(value):
        yield path, {}
    elif is_dataclass(value):
        for field in fields(value):
            below = getattr(value, field.name)
            if not isinstance(value, ModelConfig) or field.name != "options":
                yield from flatten(below, (*path, field.name))
            elif fields(below):  # else `engine` is there to show the model
                yield from flatten(below, path)
    elif isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from flatten(below, (*path, key))
    elif isinstance(value, tuple) and any(map(is_dataclass, value)):
        for index, below in enumerate(value):
            yield from flatten(below, (*path, index))
    else:
        yield path, value


def _origin(raw: Raw, path: KeyPath) -> str:
    value: Any = raw.data
    for step in path:
        if not has(value, step):
            return "default"
        value = value[step]
    return raw.source(path).text


# --- sections -------------------------------------------------------------------------------------------------------


def _check_sections(raw: Raw) -> None:
    known = [field.name for field in fields(Config)]
    for name in raw.data:
        if name not in known:
            raw.problem((name,), unknown_key(name, known))


def _section(raw: Raw, name: str, cls: type) -> Any:
    return check_table(raw, (name,), raw.data.get(name, {}), cls)


def _load_files(raw: Raw, catalogue: Catalogue) -> None:
    plugins = raw.data.get("plugins")
    names = plugins.get("files") if isinstance(plugins, dict) else None
    for index, name in enumerate(names if isinstance(names, list) else ()):
        if not isinstance(name, str):
            continue  # that is noted
        try:
            catalogue.load_file(raw.folder / name)
        except PluginError as exc:
            raw.problem(("plugins", "files", index), exc.message)


# --- plugins' tables ------------------------------------------------------------------------------------------------


def _models(raw: Raw, catalogue: Catalogue, template_fault: TemplateFault) -> Iterator[tuple[str, ModelConfig]]:
    tables = _tables(raw, "models")
    if raw.data.get("models", {}) == {}:
        raw.problem(("models",), 'there is none; add [models.<id>] with engine = "…"')
    for name, table in tables.items():
        path = ("models", name)
        chat = _chat(raw, path, table, template_fault)
        defaults = check_table(raw, (*path, "defaults"), table.get("defaults", {}), DefaultsConfig) or DefaultsConfig()
        engine = table.get("engine")
        if engine is None:
            raw.problem(path, 'engine is missing; add `engine = "…"`')
        elif not isinstance(engine, str):
            raw.problem(
                (*path, "engine"), f"expected a string, got {got(path, engine)}; write the engine's name in quotes"
            )
        else:
            try:
                cls = catalogue.engine_config(engine)
                misplaced = table.keys() & _names(DefaultsConfig) - _names(cls)
                for key in misplaced:
                    raw.problem((*path, key), f"it belongs in [{dotted((*path, 'defaults'))}]; write it there")
                options = {key: value for key, value in table.items() if key not in OUR_KEYS | misplaced}
                instance = check_table(raw, path, options, cls, MODEL_TABLES)
            except PluginError as exc:
                raw.problem((*path, "engine"), exc.message)
            else:
                yield name, ModelConfig(engine=engine, options=instance, chat=chat, defaults=defaults)


def _names(cls: type) -> set[str]:
    return {field.name for field in fields(cls)}


def _look(raw: Raw, path: KeyPath, plugin: KeyPath, options: Any, missing: Missing) -> None:
    """Note which of a table's files are missing. `plugin`: the key in it that names the plugin."""
    if options is None:
        return  # what is wrong with them is noted
    try:
        for key, text in missing(options):
            if not raw.is_wrong((*path, key)):
                raw.problem((*path, key), text)
    except PluginError as exc:
        if not raw.is_wrong(path):  # else that may be why
            raw.problem((*path, *plugin), exc.message)


def _look_at_tls(raw: Raw, server: ServerConfig | None) -> None:
    files = []
    for key in ("tls_certificate", "tls_key"):
        name = getattr(server, key, None)
        if name is None:
            continue
        path = Path(name).absolute()
        if not path.is_file():
            raw.problem(("server", key), f"there is no file {path}; paths are relative to the working directory")
        elif not os.access(path, os.R_OK):
            raw.problem(("server", key), f"{path} is not readable by this user; mend its permissions")
        else:
            files.append(path)
    if len(files) == 2 and (fault := tls_fault(*files)) is not None:
        key, text = fault
        raw.problem(("server", key), text)


def _chat(raw: Raw, model: KeyPath, table: dict[str, Any], template_fault: TemplateFault) -> ChatConfig:
    path = (*model, "chat")
    chat = check_table(raw, path, table.get("chat", {}), ChatConfig) or ChatConfig()
    if chat.template_file is not None:
        chat = replace(chat, template_file=raw.folder / chat.template_file)
    for key in ("template", "template_file"):
        given: str | Path | None = getattr(chat, key)
        if isinstance(given, Path) and not given.is_file():
            raw.problem((*path, key), f"there is no file {given}; paths are relative to this file's folder")
        elif given is not None and (fault := template_fault(given)):
            raw.problem((*path, key), fault)
    return chat


def _sinks(raw: Raw, catalogue: Catalogue) -> Iterator[tuple[str, Any]]:
    for name, table in _tables(raw, "sinks").items():
        try:
            yield name, check_table(raw, ("sinks", name), table, catalogue.sink_config(name))
        except PluginError as exc:
            raw.problem(("sinks", name), exc.message)


def _tables(raw: Raw, section: str) -> dict[str, dict[str, Any]]:
    """The tables of a section whose names are free; what is no table is a problem."""
    found = raw.data.get(section, {})
    if not isinstance(found, dict):
        way_out = _in_braces(raw, (section,), "{name = {key = …}}") or f"write [{section}.<name>]"
        raw.problem((section,), f"expected tables, got {got((section,), found)}; {way_out}")
        return {}
    for name, table in found.items():
        if not isinstance(table, dict):
            way_out = _in_braces(raw, (section, name), "{key = …}") or f"write [{dotted((section, name))}]"
            raw.problem((section, name), f"expected a table, got {got((section, name), table)}; {way_out}")
        elif not name:
            raw.problem((section, name), "the name is empty; give it one")
    return {name: table for name, table in found.items() if isinstance(table, dict) and name}


def _in_braces(raw: Raw, path: KeyPath, example: str) -> str:
    """How to give a table as text; empty where it is in the file."""
    outside = raw.outside(path)
    return f"write it as a whole, as TOML or JSON: {assigned(outside, example)}" if outside else ""
