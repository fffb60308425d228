"""A plugin for tests: an engine with a witness beside it, and a page on which the witness says what it saw.

    [plugins]
    files = ["…/watched.py"]
    [models.m]
    engine = "watched-llamacpp"     the real one, or "watched-synthetic"
    [sinks.watched]                 GET /metrics -> {"added": …, "sequences": {id: {…}}, "gauges": {…}}

The witness stands between the loop and the stepper, so it sees what the engine really did, whatever the server's own
accounts say. Its times are `time.monotonic`, which on Linux is one clock for all processes: a test can compare them
with the moment at which its client left.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from tokenflow_llamacpp.config import LlamaConfig
from tokenflow_llamacpp.engine import open_llama
from tokenflow_synthetic.config import SyntheticConfig
from tokenflow_synthetic.engine import open_synthetic

from tokenflow.api import EnginePlugin, Exposition, Gauges, LifecycleEvent, Sequence, SinkPlugin, Step, hookimpl

REMEMBERED = 64
"""Sequences that the page shows."""


class Witness:
    """What became of the last sequences. Written by the engine's thread, read by the server's."""

    def __init__(self) -> None:
        self.added = 0
        self.sequences: dict[str, dict[str, Any]] = {}

    def slot_taken(self, id: str) -> None:
        self.sequences[id] = {"added": monotonic(), "removed": None, "tokens": []}
        while len(self.sequences) > REMEMBERED:
            del self.sequences[next(iter(self.sequences))]
        self.added += 1  # last: whoever sees the number finds the entry

    def token(self, id: str, count: int) -> None:
        self.sequences[id]["tokens"] += [monotonic()] * count

    def slot_free(self, id: str) -> None:
        self.sequences[id]["removed"] = monotonic()

    def page(self) -> dict[str, Any]:
        return {"added": self.added, "sequences": dict(list(self.sequences.items()))}


WITNESS = Witness()


class WatchedStepper:
    """A stepper, and the witness."""

    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper
        self.close, self.interrupt = stepper.close, stepper.interrupt

    def add(self, seq: Sequence) -> bool:
        if not self._stepper.add(seq):
            return False
        WITNESS.slot_taken(seq.request.id)
        return True

    def remove(self, seq: Sequence) -> None:
        self._stepper.remove(seq)
        WITNESS.slot_free(seq.request.id)

    def step(self, run: list[Sequence]) -> Iterator[tuple[Sequence, Step]]:
        for seq, step in self._stepper.step(run):
            WITNESS.token(seq.request.id, step.tokens if step.error is None else 0)
            yield seq, step


def _watched(open_engine: Any) -> Any:
    @asynccontextmanager
    async def open_watched(config: Any) -> AsyncGenerator[Any, None]:
        async with open_engine(config) as engine:
            engine.loop.stepper = WatchedStepper(engine.loop.stepper)
            yield engine

    return open_watched


@dataclass(frozen=True, slots=True, kw_only=True)
class PageConfig:
    """`[sinks.watched]`"""


class Page:
    """A sink for its page alone."""

    async def record(self, event: LifecycleEvent) -> None:
        pass

    def expose(self, gauges: Gauges) -> Exposition:
        [model] = gauges.models
        return Exposition(json.dumps(WITNESS.page() | {"gauges": asdict(model)}).encode(), "application/json")


@asynccontextmanager
async def _open_page(config: PageConfig) -> AsyncIterator[Page]:
    yield Page()


@hookimpl
def register_engines() -> list[EnginePlugin[Any]]:
    return [
        EnginePlugin(name="watched-llamacpp", config=LlamaConfig, open=_watched(open_llama)),
        EnginePlugin(name="watched-synthetic", config=SyntheticConfig, open=_watched(open_synthetic)),
    ]


@hookimpl
def register_sinks() -> list[SinkPlugin[Any]]:
    return [SinkPlugin(name="watched", config=PageConfig, open=_open_page)]
