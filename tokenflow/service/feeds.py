"""Sinks, fed: each by a task of its own through a bounded memory channel, so that none can slow or break a stream."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import Any

import trio

from tokenflow.api import LifecycleEvent, MetricsSink, Sink, SinkPlugin

log = logging.getLogger("tokenflow.sinks")

BACKLOG = 4096
"""Records that may wait for one sink; about a megabyte."""
CLOSE_S = 5.0
"""How long a sink may take to write what is left when the server ends."""


class Feeds:
    """All sinks of a server.

    Args:
        plugins: by the sink's name, its plugin and an instance of its config.
    """

    def __init__(self, plugins: dict[str, tuple[SinkPlugin[Any], Any]]) -> None:
        self._plugins = plugins
        self._channels: dict[str, trio.MemorySendChannel[LifecycleEvent]] = {}
        self.metrics: MetricsSink | None = None
        """The first sink that has a page to show."""
        self.dropped = 0
        """Counter: records that a full channel refused."""

    def emit(self, event: LifecycleEvent) -> None:
        """Hand `event` to every sink. Never blocks, never raises."""
        for name, channel in self._channels.items():
            try:
                channel.send_nowait(event)
            except trio.WouldBlock:
                self.dropped += 1
                if self.dropped.bit_count() == 1:  # 1, 2, 4, 8 …: enough to be seen, too few to be a flood
                    log.warning("sink %s is too slow: %d records dropped so far", name, self.dropped)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.dropped += 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open every sink and feed them until cancelled; then let each write what is left, within a bound."""
        async with AsyncExitStack() as sinks:
            opened = [(name, await sinks.enter_async_context(p.open(c))) for name, (p, c) in self._plugins.items()]
            async with trio.open_nursery() as nursery:
                for name, sink in opened:
                    send, receive = trio.open_memory_channel[LifecycleEvent](BACKLOG)
                    self._channels[name] = send
                    nursery.start_soon(_feed, name, sink, receive)
                    if self.metrics is None and isinstance(sink, MetricsSink):
                        self.metrics = sink
                task_status.started()
                await trio.sleep_forever()


async def _feed(name: str, sink: Sink, events: trio.MemoryReceiveChannel[LifecycleEvent]) -> None:
    try:
        async for event in events:
            await _record(name, sink, event)
    finally:
        with trio.move_on_after(CLOSE_S, shield=True):
            while True:
                try:
                    await _record(name, sink, events.receive_nowait())
                except trio.WouldBlock:
                    break


async def _record(name: str, sink: Sink, event: LifecycleEvent) -> None:
    try:
        await sink.record(event)
    except Exception:
        log.exception("sink %s failed on %s", name, type(event).__name__)
