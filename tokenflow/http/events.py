"""Writing a stream as server-sent events.

One writer a connection: the response's body *is* the reader. What it returned last counts as accepted when it is asked
for the next piece, since the transport has then handed all of it to the kernel. Records that are ready go out in one
write; silence is filled with heartbeats, which touch no deadline of the stream.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, runtime_checkable

import trio
from quart.wrappers.response import ResponseBody

from tokenflow.core.replay import Record
from tokenflow.core.types import Delta, FinishReason, Usage
from tokenflow.errors import ResumeWindowLost, TokenflowError
from tokenflow.service.records import Ended, StreamEvent
from tokenflow.service.stream import StreamReader

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}


class Encoder(Protocol):
    """What a dialect offers for a stream. `event_id`, where ids are on, is the record's."""

    def start(self) -> bytes: ...
    def delta(self, index: int, delta: Delta, *, event_id: str | None = None) -> bytes: ...
    def end(self, reasons: tuple[FinishReason, ...], usage: Usage, *, event_id: str | None = None) -> bytes: ...
    def failure(self, error: TokenflowError, *, event_id: str | None = None) -> bytes: ...
    def ping(self, *, ids: bool = False) -> bytes: ...


@runtime_checkable
class Opening(Protocol):
    """A dialect whose stream opens with a frame that only says its id."""

    def open(self) -> bytes: ...


class EventBody(ResponseBody):
    """The body of a streaming response.

    Args:
        reader: where the records come from; whoever opened it closes it.
        encoder: the dialect.
        heartbeat_s: the longest silence on this connection.
        event_id: the stream's id, where events carry one; None where they do not.
    """

    def __init__(
        self, reader: StreamReader, encoder: Encoder, heartbeat_s: float, *, event_id: str | None = None
    ) -> None:
        self._reader = reader
        self._encoder = encoder
        self._heartbeat_s = heartbeat_s
        self._event_id = event_id
        self._started = self._lost = False
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
            return self._start()  # also where it is empty: the headers go out with it
        if self._lost:
            raise StopAsyncIteration
        if self._handed_on:
            self._reader.ack(self._handed_on)
            self._handed_on = 0
        with trio.move_on_after(self._heartbeat_s):
            try:
                records = await self._reader.read()
            except ResumeWindowLost as exc:  # too slow for what the log may hold: told by name, and that was all
                self._lost = True
                return self._encoder.failure(exc)
            if not records:
                raise StopAsyncIteration
            self._handed_on = records[-1].n
            return b"".join([self._encode(record) for record in records])
        return self._encoder.ping(ids=self._event_id is not None)

    def _start(self) -> bytes:
        if self._reader.n:
            return b""  # it comes back: its first event is the one after its last
        if self._event_id is not None and isinstance(self._encoder, Opening):
            return self._encoder.open()
        return self._encoder.start()

    def _encode(self, record: Record[StreamEvent]) -> bytes:
        event = record.event
        id = None if self._event_id is None else f"{self._event_id}:{record.n}"
        if isinstance(event, Delta):
            return self._encoder.delta(record.source, event, event_id=id)
        if isinstance(event, Ended):
            return self._encoder.end(event.reasons, event.usage, event_id=id)
        return self._encoder.failure(event.error, event_id=id)
