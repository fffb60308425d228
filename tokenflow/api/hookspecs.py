"""The hooks. Synchronous and few: each returns factories; the work happens in what the factory opens.

A plugin is a module (an installed entry point of the group `tokenflow`, or a file) that implements some of these:

    from tokenflow.api import EnginePlugin, hookimpl

    @hookimpl
    def register_engines():
        return [EnginePlugin(name="echo", config=EchoConfig, open=open_echo)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pluggy

from tokenflow.api.engine import Engine
from tokenflow.api.models import ModelSource
from tokenflow.api.sink import Sink

PROJECT = "tokenflow"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

C = TypeVar("C")


def _nothing(config: object) -> Iterable[tuple[str, str]]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlugin(Generic[C]):
    """An engine that can be opened.

    Attributes:
        name: what `engine = "…"` in the configuration says.
        config: a frozen keyword-only dataclass: the keys of `[models.<id>]` beside `engine`. Types are enforced,
            bounds come from `annotated_types` (`Annotated[int, Ge(1)]`), help from the docstring under each field.
        open: opens the engine for as long as the context lasts. Heavy imports belong inside. Raises `StartupError`
            with a line for people when it cannot. If what it runs fails later, it cancels its body and raises.
        models: files that `tokenflow pull NAME` can fetch for it.
        missing: `missing(config)` yields (key, message) for each file that the configuration names and that cannot be
            read; the message says what is wrong and how to mend it. It creates nothing. Called by `tokenflow config
            check`, and by `serve` before a model loads.
    """

    name: str
    config: type[C]
    open: Callable[[C], AbstractAsyncContextManager[Engine]]
    models: tuple[ModelSource, ...] = ()
    missing: Callable[[C], Iterable[tuple[str, str]]] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPlugin(Generic[C]):
    """A sink that can be opened; fields as in `EnginePlugin`, with the keys of `[sinks.<name>]`."""

    name: str
    config: type[C]
    open: Callable[[C], AbstractAsyncContextManager[Sink]]
    missing: Callable[[C], Iterable[tuple[str, str]]] = _nothing


class Hooks:
    """The specification that pluggy checks plugins against."""

    @hookspec
    def register_engines(self) -> Iterable[EnginePlugin[Any]]:
        """Engines that this plugin offers."""
        raise NotImplementedError

    @hookspec
    def register_sinks(self) -> Iterable[SinkPlugin[Any]]:
        """Sinks that this plugin offers."""
        raise NotImplementedError
