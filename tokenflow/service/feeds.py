"""Sinks, fed: each by a task of its own through a bounded memory channel, so that none can slow or break a stream."""

from __future__ import annotations

import logging
import traceback
from contextlib import AsyncExitStack, suppress
from typing import Any

import trio

from tokenflow.api import LifecycleEvent, MetricsSink, Sink, SinkPlugin

log = logging.getLogger("tokenflow.sinks")

BACKLOG = 4096
"""Records that may wait for one sink; about a megabyte."""
TOGETHER = 32
"""Records that a sink is given before others have a turn."""
KINDS = 32
"""Kinds of failure of one sink that are logged, each once: a broken one must not flood the log."""
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
                feeds = [self._feed(name, sink) for name, sink in opened]
                for feed in feeds:
                    nursery.start_soon(feed.run)
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    for feed in feeds:
                        feed.finish()

    def _feed(self, name: str, sink: Sink) -> _Feed:
        send, receive = trio.open_memory_channel[LifecycleEvent](BACKLOG)
        self._channels[name] = send
        if self.metrics is None and isinstance(sink, MetricsSink):
            self.metrics = sink
        return _Feed(name, sink, send, receive)


class _Feed:
    """One sink and the task that feeds it."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        send: trio.MemorySendChannel[LifecycleEvent],
        receive: trio.MemoryReceiveChannel[LifecycleEvent],
    ) -> None:
        self._name = name
        self._sink = sink
        self._send = send
        self._receive = receive
        self._patience = trio.CancelScope(shield=True)  # a record that is being written is written
        self._failures: set[tuple[str, str, int]] = set()

    def finish(self) -> None:
        """Nothing more comes: what is there may take `CLOSE_S`."""
        self._send.close()
        self._patience.deadline = trio.current_time() + CLOSE_S

    async def run(self) -> None:
        with self._patience:
            async for event in self._receive:
                await self._record(event)
                with suppress(trio.WouldBlock, trio.EndOfChannel):
                    for _ in range(TOGETHER):  # what has come meanwhile, without a turn of the event loop for each
                        await self._record(self._receive.receive_nowait())

    async def _record(self, event: LifecycleEvent) -> None:
        try:
            await self._sink.record(event)
        except Exception as exc:
            *_, (frame, line) = traceback.walk_tb(exc.__traceback__)
            kind = (type(exc).__qualname__, frame.f_code.co_filename, line)  # what it says may be new each time
            if kind not in self._failures and len(self._failures) < KINDS:
                self._failures.add(kind)
                log.exception(
                    "sink %s failed on %s; this failure is not logged again", self._name, type(event).__name__
                )
