"""The host of one engine: opens it, watches it, opens it anew when it ends, closes it.

    closed --open--> ready --its own failure, or fail()--> closed --after a pause--> open again

The first opening must succeed, or the server does not start. A later failure lets every stream of this engine go with
an error, and the host tries again with growing pauses; the other engines do not notice. An engine that says that this
process cannot open it again stays closed, and is lost.
"""

from __future__ import annotations

import logging
from math import inf
from typing import Any

import trio

from tokenflow.api import Engine, EngineInfo, EnginePlugin, EngineStats
from tokenflow.errors import (
    EngineClosed,
    EngineLost,
    PluginError,
    StartupError,
    TokenflowError,
    described,
    first_error,
)

log = logging.getLogger("tokenflow.engines")

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 30.0
"""Open for this long, it counts as mended, and the pauses begin anew. One that breaks at its first work never is."""
WEDGED_S = 30.0
"""A step that takes longer than this makes the model not ready."""


class EngineHost:
    """Keeps one engine open.

    Args:
        id: the model's id, as clients ask for it.
        plugin: what opens it.
        options: an instance of `plugin.config`.
    """

    def __init__(self, id: str, plugin: EnginePlugin[Any], options: Any) -> None:
        self.id = id
        self.plugin = plugin
        self._options = options
        self._engine: Engine | None = None
        self._opening = trio.CancelScope()
        self._open_since = inf
        self._info: EngineInfo | None = None
        self.lost = trio.Event()
        """It will not be opened again."""
        self.openings = 0
        """Counter: how often it has been opened."""

    @property
    def engine(self) -> Engine:
        """The engine; EngineClosed while there is none."""
        if self._engine is None:
            raise EngineClosed(f"The engine of model {self.id!r} is restarting.", retry_after_s=1.0)
        return self._engine

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when it was last opened."""
        assert self._info is not None, "not opened yet"
        return self._info

    async def stats(self) -> EngineStats:
        """The engine's own numbers; all zero while it is closed."""
        return await self._engine.stats() if self._engine is not None else EngineStats()

    async def ready(self) -> bool:
        """It is open, and no step has been going on for too long."""
        return self._engine is not None and (await self._engine.stats()).step_age_s < WEDGED_S

    def fail(self, engine: Engine, why: str) -> None:
        """Give `engine` up and open a new one; nothing, where that has been done: several may be stuck in it."""
        if engine is self._engine:
            log.error("model %s: %s; restarting its engine", self.id, why)
            self._engine = None
            self._opening.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep it open until cancelled. Started once it is open.

        Raises:
            StartupError: it could not be opened the first time.
        """
        failures = 0
        while True:
            self._open_since = inf
            try:
                with trio.CancelScope() as self._opening:
                    await self._stay_open(trio.TASK_STATUS_IGNORED if self.openings else task_status)
            except Exception as exc:
                if not self.openings:
                    raise _for_people(self.id, exc) from exc
                if (loss := _loss(exc)) is not None:
                    log.error("model %s: its engine is lost to this process: %s", self.id, loss)
                    self._engine = None
                    self.lost.set()
                    await trio.sleep_forever()
                cause = first_error(exc)
                if isinstance(cause, TokenflowError):
                    log.error("model %s: its engine ended: %s", self.id, cause)
                else:  # its author wants the place
                    log.error("model %s: its engine ended", self.id, exc_info=cause)
            finally:
                self._engine = None
            if trio.current_time() - self._open_since >= STEADY_S:
                failures = 0
            await trio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            failures += 1

    async def _stay_open(self, task_status: trio.TaskStatus[None]) -> None:
        async with self.plugin.open(self._options) as engine:
            if not isinstance(engine, Engine):
                raise PluginError(f"plugin {self.plugin.name!r} opened {type(engine).__name__}, which is no Engine")
            self._engine, self._info = engine, engine.info
            self.openings += 1
            self._open_since = trio.current_time()
            log.info(
                "model %s: %s, context %d, %d slots",
                self.id,
                self.info.model,
                self.info.context_length,
                self.info.slots,
            )
            task_status.started()
            await trio.sleep_forever()


def _loss(exc: Exception) -> BaseException | None:
    """The EngineLost that `exc` is, or has in it beside others."""
    losses = exc.subgroup(EngineLost) if isinstance(exc, ExceptionGroup) else exc
    leaf = None if losses is None else first_error(losses)
    return leaf if isinstance(leaf, EngineLost) else None


def _for_people(id: str, exc: Exception) -> StartupError:
    leaf = first_error(exc)
    if isinstance(leaf, StartupError):
        return type(leaf)(f"model {id!r}: {leaf.message}")
    return StartupError(f"model {id!r}: its engine does not open: {described(leaf)}")
