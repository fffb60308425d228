"""Writing a stream as server-sent events.

One writer a connection: the response's body *is* the reader. What it returned last counts as accepted when it is asked
for the next piece, since the transport has then handed all of it to the kernel. Records that are ready go out in one
write; silence is filled with heartbeats, which touch no deadline of the stream.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import trio
from quart.wrappers.response import ResponseBody

from tokenflow.core.replay import Record
from tokenflow.core.types import Delta, FinishReason, Usage
from tokenflow.errors import TokenflowError
from tokenflow.service.records import Ended, StreamEvent
from tokenflow.service.stream import StreamReader

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}


class Encoder(Protocol):
    """What a dialect offers for a stream."""

    def start(self) -> bytes: ...
    def delta(self, index: int, delta: Delta) -> bytes: ...
    def end(self, reasons: tuple[FinishReason, ...], usage: Usage) -> bytes: ...
    def failure(self, error: TokenflowError) -> bytes: ...
    def ping(self) -> bytes: ...


def encode(encoder: Encoder, record: Record[StreamEvent]) -> bytes:
    """One record in a dialect."""
    event = record.event
    if isinstance(event, Delta):
        return encoder.delta(record.source, event)
    if isinstance(event, Ended):
        return encoder.end(event.reasons, event.usage)
    return encoder.failure(event.error)


class EventBody(ResponseBody):
    """The body of a streaming response.

    Args:
        reader: where the records come from; whoever opened it closes it.
        encoder: the dialect.
        heartbeat_s: the longest silence on this connection.
    """

    def __init__(self, reader: StreamReader, encoder: Encoder, heartbeat_s: float) -> None:
        self._reader = reader
        self._encoder = encoder
        self._heartbeat_s = heartbeat_s
        self._started = False
        self._handed_on = 0

    async def __aenter__(self) -> EventBody:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def __aiter__(self) -> EventBody:
        return self

    async def __anext__(self) -> bytes:
        if not self._started:
            self._started = True
            return self._encoder.start()  # also where it is empty: the headers go out with it
        if self._handed_on:
            self._reader.ack(self._handed_on)
            self._handed_on = 0
        with trio.move_on_after(self._heartbeat_s):
            records = await self._reader.read()
            if not records:
                raise StopAsyncIteration
            self._handed_on = records[-1].n
            return b"".join([encode(self._encoder, record) for record in records])
        return self._encoder.ping()
