"""Plugins, found and loaded by name: a typed face over pluggy, whose calls have no types.

An installed plugin is an entry point of the group `tokenflow`, named like the engine or sink that it offers; it is
imported the moment that name is first asked for, so a plugin that the configuration does not name costs nothing and
cannot break anything. A plugin may also be a file. Whatever goes wrong is a `PluginError` of one line, and is
remembered: asking again gives the same answer.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import pluggy

from tokenflow.api.hookspecs import PROJECT, EnginePlugin, Hooks, SinkPlugin
from tokenflow.api.models import ModelSource
from tokenflow.config.load import OUR_KEYS
from tokenflow.errors import PluginError

Offer = TypeVar("Offer", bound=EnginePlugin[Any] | SinkPlugin[Any])


OURS = {name: f"./plugins/{name}" for name in ("ledger", "llamacpp", "prometheus", "synthetic")} | {
    name: f"./plugins/exllama_common ./plugins/{name} (conf/{name}.toml says what it needs beside)"
    for name in ("exllamav2", "exllamav3")
}
"""Plugins that are in the repository of tokenflow, and what pip takes to install them."""
_HOOKS = ", ".join(sorted(hook for hook in vars(Hooks) if not hook.startswith("_")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A plugin that is installed; it need not be loaded, nor loadable."""

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint

    @property
    def origin(self) -> str:
        """`tokenflow-synthetic 0.1.0`."""
        return f"{self.distribution} {self.version}"

    @property
    def key(self) -> str:
        """What it is loaded under: one distribution may have several plugins, and one plugin several names."""
        return f"{self.origin}: {self.entry_point.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plugin that is loaded, and what it offers."""

    name: str
    origin: str
    """Its distribution and version, or its file."""
    engines: tuple[EnginePlugin[Any], ...]
    sinks: tuple[SinkPlugin[Any], ...]


def installed() -> tuple[Installed, ...]:
    """All installed plugins, by name, without loading any."""
    return tuple(
        sorted(
            (
                Installed(
                    name=point.name,
                    distribution=point.dist.name if point.dist else "?",
                    version=point.dist.version if point.dist else "?",
                    entry_point=point,
                )
                for point in entry_points(group=PROJECT)
            ),
            key=lambda plugin: (plugin.name, plugin.distribution),
        )
    )


class Registry:
    """Engines and sinks by name. Serves as the configuration's catalogue, too."""

    def __init__(self, *, find: Callable[[], tuple[Installed, ...]] = installed) -> None:
        self._installed = find()
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(Hooks)
        self._plugins: dict[str, Plugin] = {}
        """Loaded, by key or file."""
        self._failures: dict[str, PluginError] = {}
        """Likewise."""

    # --- loading ------------------------------------------------------------------------------------------------

    def load_file(self, path: Path) -> None:
        """Load a plugin that is a Python file. Raises PluginError."""
        self._load(str(path), path.stem, str(path), lambda: _import_file(path))

    def load_installed(self, name: str) -> bool:
        """Load the installed plugin of that name; False if there is none. Raises PluginError."""
        found = [plugin for plugin in self._installed if plugin.name == name]
        if len(found) > 1:
            both = " and ".join(plugin.distribution for plugin in found)
            raise PluginError(f'plugin "{name}" is installed by {both}; uninstall one of them')
        for plugin in found:
            self._load(plugin.key, name, plugin.origin, plugin.entry_point.load)
        return bool(found)

    def load_all(self) -> Mapping[str, PluginError]:
        """Load every installed plugin; those that fail are returned by name, not raised."""
        failures: dict[str, PluginError] = {}
        for plugin in self._installed:
            try:
                self.load_installed(plugin.name)
            except PluginError as exc:
                failures[plugin.name] = exc
        return failures

    # --- what is offered ----------------------------------------------------------------------------------------

    def engine(self, name: str) -> EnginePlugin[Any]:
        """The engine of that name, loading its plugin if need be. Raises PluginError."""
        return self._one("engine", name, lambda plugin: plugin.engines)

    def sink(self, name: str) -> SinkPlugin[Any]:
        """The sink of that name, loading its plugin if need be. Raises PluginError."""
        return self._one("sink", name, lambda plugin: plugin.sinks)

    def engine_config(self, name: str) -> type[Any]:
        """The configuration class of an engine. Raises PluginError."""
        return self.engine(name).config

    def sink_config(self, name: str) -> type[Any]:
        """The configuration class of a sink. Raises PluginError."""
        return self.sink(name).config

    def engine_missing(self, name: str, options: object) -> list[tuple[str, str]]:
        """Files that an engine's options name and that cannot be had: key, and what to do. Raises PluginError."""
        return _looked(self.engine(name), options)

    def sink_missing(self, name: str, options: object) -> list[tuple[str, str]]:
        """The same of a sink. Raises PluginError."""
        return _looked(self.sink(name), options)

    def plugins(self) -> tuple[Plugin, ...]:
        """The plugins loaded so far."""
        return tuple(self._plugins.values())

    def offered_by(self, plugin: Installed) -> Plugin | None:
        """What an installed plugin offers, if it is loaded."""
        return self._plugins.get(plugin.key)

    def engines(self) -> Mapping[str, EnginePlugin[Any]]:
        """The engines of the plugins loaded so far."""
        return {engine.name: engine for plugin in self.plugins() for engine in plugin.engines}

    def sinks(self) -> Mapping[str, SinkPlugin[Any]]:
        """The sinks of the plugins loaded so far."""
        return {sink.name: sink for plugin in self.plugins() for sink in plugin.sinks}

    def models(self) -> Mapping[str, ModelSource]:
        """Model files that the engines loaded so far can use, by the name that `tokenflow pull` takes."""
        return {source.name: source for engine in self.engines().values() for source in engine.models}

    def _one(self, kind: Literal["engine", "sink"], name: str, offers: Callable[[Plugin], Iterable[Offer]]) -> Offer:
        is_installed = self.load_installed(name)
        found = [(plugin, offer) for plugin in self.plugins() for offer in offers(plugin) if offer.name == name]
        if len(found) > 1:
            both = " and ".join(plugin.origin for plugin, _ in found)
            raise PluginError(f'{kind} "{name}" is offered twice, by {both}; rename one or leave it out')
        if not found and is_installed:
            there = [offer.name for plugin in self.plugins() if plugin.name == name for offer in offers(plugin)]
            raise PluginError(
                f'plugin "{name}" offers no {kind} of that name; its {kind}s: {", ".join(there) or "none"}'
            )
        if not found:
            raise PluginError(self._missing(kind, name, [o.name for plugin in self.plugins() for o in offers(plugin)]))
        return found[0][1]

    def _missing(self, kind: str, name: str, loaded: list[str]) -> str:
        there = sorted({plugin.name for plugin in self._installed} | set(loaded))
        close = difflib.get_close_matches(name, [*there, *OURS], n=1)
        if name in OURS:
            way_out = f"install it from a clone of tokenflow: pip install {OURS[name]}"
        else:
            meant = f"did you mean {close[0]}? Otherwise install" if close else "install"
            way_out = f"{meant} the package that does"
        return (
            f'no plugin offers the {kind} "{name}"; {way_out}, or name its file in [plugins] files '
            f"(installed: {', '.join(there) or 'none'})"
        )

    def _load(self, key: str, name: str, origin: str, load: Callable[[], Any]) -> None:
        if key in self._failures:
            raise self._failures[key]
        if key in self._plugins:
            return
        try:
            self._plugins[key] = self._register(name, origin, _imported(name, origin, load))
        except PluginError as exc:
            self._failures[key] = exc
            raise

    def _register(self, name: str, origin: str, module: object) -> Plugin:
        try:
            self._pluggy.register(module)
            self._pluggy.check_pending()  # a misspelt hook must fail, not be silently unused
            if not self._pluggy.get_hookcallers(module):
                hooks = _HOOKS.replace(", ", " or ")
                raise PluginError(f'plugin "{name}" ({origin}) registers nothing; mark its {hooks} with @hookimpl')
            return Plugin(
                name=name,
                origin=origin,
                engines=tuple(self._offers(module, origin, "register_engines", EnginePlugin)),
                sinks=tuple(self._offers(module, origin, "register_sinks", SinkPlugin)),
            )
        except pluggy.PluginValidationError as exc:
            self._forget(module)
            reason = str(exc).replace("\n", " ").strip()
            raise PluginError(f'plugin "{name}" ({origin}) has a wrong hook: {reason}; the hooks are {_HOOKS}') from exc
        except PluginError:
            self._forget(module)
            raise

    def _forget(self, module: object) -> None:
        # pluggy itself may or may not have taken back a registration that failed.
        if self._pluggy.is_registered(module):
            self._pluggy.unregister(module)

    def _offers(self, module: object, origin: str, hook: str, kind: type[Offer]) -> Iterator[Offer]:
        """What one plugin's hook returns, checked: it comes from code that no type checker may have seen."""
        others = [plugin for plugin in self._pluggy.get_plugins() if plugin is not module]
        try:
            offers = [o for result in self._pluggy.subset_hook_caller(hook, others)() for o in result]
        except Exception as exc:
            raise PluginError(f"{origin}: {hook} failed: {_reason(exc)}; mend the plugin") from exc
        for offer in offers:
            if not isinstance(offer, kind):
                raise PluginError(f"{origin}: {hook} returned {offer!r}; return a list of {kind.__name__}")
            if not is_dataclass(offer.config):
                raise PluginError(f'{origin}: the config of "{offer.name}" is no dataclass; make it one')
            for taken in OUR_KEYS & {field.name for field in fields(offer.config)}:
                if kind is EnginePlugin:
                    raise PluginError(
                        f'{origin}: the config of "{offer.name}" has a field `{taken}`, which is taken; rename it'
                    )
            yield offer


def _looked(offer: EnginePlugin[Any] | SinkPlugin[Any], options: object) -> list[tuple[str, str]]:
    try:
        return list(offer.missing(options))
    except PluginError:
        raise
    except Exception as exc:
        raise PluginError(f'"{offer.name}" failed to look for its files: {_reason(exc)}; mend the plugin') from exc


def _imported(name: str, origin: str, load: Callable[[], Any]) -> object:
    try:
        return load()
    except PluginError:
        raise
    except Exception as exc:
        raise PluginError(f'plugin "{name}" ({origin}) cannot be imported: {_reason(exc)}') from exc


def _reason(exc: Exception) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, so that no file can shadow a module of the same name."""
    if not path.is_file():
        raise PluginError(f"plugin file {path} does not exist; paths are relative to the configuration's folder")
    name = f"tokenflow_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin file {path} is no Python file; give it the suffix .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there while they are made
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
