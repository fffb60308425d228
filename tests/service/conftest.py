"""A whole service in mock time: the synthetic engine's loop runs in a Trio task, where a step costs `STEP_S`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from tokenflow_synthetic.config import SyntheticConfig
from tokenflow_synthetic.engine import SyntheticEngine, open_in_task

from tokenflow.api import EnginePlugin, LifecycleEvent, SinkPlugin
from tokenflow.config.model import (
    ChatConfig,
    Config,
    DefaultsConfig,
    LimitsConfig,
    ModelConfig,
    ReplayConfig,
    ServerConfig,
    StreamConfig,
    TimeoutsConfig,
)
from tokenflow.core.lifecycle import Ended
from tokenflow.core.types import Delta, GenerationRequest, TextPrompt
from tokenflow.engines.host import EngineHost
from tokenflow.service.feeds import Feeds
from tokenflow.service.nested import alongside
from tokenflow.service.reader import StreamReader
from tokenflow.service.service import Service
from tokenflow.service.stream import Stream

STEP_S = 0.01


class Remember:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.events: list[LifecycleEvent] = []

    async def record(self, event: LifecycleEvent) -> None:
        self.events.append(event)

    def ended(self, id: str) -> Ended:
        """The usage record of a stream; there must be exactly one."""
        [record] = [e for e in self.events if isinstance(e, Ended) and e.id == id]
        return record


class Rig:
    """An open service with one model, and short ways to use it."""

    def __init__(self, service: Service, sink: Remember) -> None:
        self.service = service
        self.sink = sink

    @property
    def engine(self) -> SyntheticEngine:
        engine = self.service.model("").engine
        assert isinstance(engine, SyntheticEngine)
        return engine

    async def open(self, prompt: str = "a prompt", **wishes: Any) -> tuple[Stream, StreamReader]:
        request = GenerationRequest(model="", prompts=(TextPrompt(text=prompt),), stream=True, **wishes)
        return await self.service.open(request, key="-", route="/test")

    async def whole(self, prompt: str = "a prompt", **wishes: Any) -> str:
        """Generate and read to the end; the text of choice 0."""
        _, reader = await self.open(prompt, **wishes)
        events = await read_all(reader)
        return "".join(event.text for source, event in events if isinstance(event, Delta) and source == 0)

    async def settle(self) -> None:
        """Wait until no stream is alive and its record has reached the sink."""
        with trio.fail_after(1000):
            while self.service.live_streams:
                await trio.sleep(STEP_S / 10)
        await trio.testing.wait_all_tasks_blocked()


async def read_all(reader: StreamReader) -> list[tuple[int, Any]]:
    """Read to the end, taking everything at once; (source, event) of each record."""
    events: list[tuple[int, Any]] = []
    while records := await reader.read():
        events += [(record.source, record.event) for record in records]
        reader.ack(records[-1].n)
    reader.close()
    return events


@asynccontextmanager
async def open_rig(
    *,
    timeouts: dict[str, float] | None = None,
    limits: dict[str, Any] | None = None,
    stream: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    replay: dict[str, Any] | None = None,
    open_engine: Any = None,
    chat: ChatConfig | None = None,
    defaults: DefaultsConfig | None = None,
    **engine: Any,
) -> AsyncIterator[Rig]:
    """`async with open_rig(tokens_per_s=…, slots=…, timeouts={…}, stream={…}) as r:`, on a mock clock."""
    options = SyntheticConfig(**{"directives": True} | engine)
    config = Config(
        server=ServerConfig(**server or {}),
        timeouts=TimeoutsConfig(**timeouts or {}),
        limits=LimitsConfig(**limits or {}),
        stream=StreamConfig(**stream or {}),
        replay=ReplayConfig(**replay or {}),
        models={
            "m": ModelConfig(
                engine="synthetic",
                options=options,
                chat=chat or ChatConfig(),
                defaults=defaults or DefaultsConfig(),
            )
        },
    )
    plugin = EnginePlugin(
        name="synthetic", config=SyntheticConfig, open=open_engine or partial(open_in_task, step_s=STEP_S)
    )
    sink = Remember()

    @asynccontextmanager
    async def open_sink(options: None) -> AsyncIterator[Remember]:
        yield sink

    feeds = Feeds({"remember": (SinkPlugin(name="remember", config=type(None), open=open_sink), None)})
    service = Service(config, {"m": EngineHost("m", plugin, options)}, feeds)
    async with alongside(service.run):
        yield Rig(service, sink)
