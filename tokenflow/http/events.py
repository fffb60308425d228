"""Writing a stream as server-sent events.

The response's body *is* the reader, in two gaits. To a client that keeps up, each record is written by the task that
made it, through the connection's `Direct`. Whatever the kernel does not take at once is waited for here, in the
request's own task, which then hands on what has come meanwhile, in one piece, until the client has caught up. Either
way a record counts as accepted when the kernel has all of it. Silence is filled with heartbeats, which touch no
deadline of the stream.
"""

from __future__ import annotations

from types import TracebackType

import trio
from quart.wrappers.response import ResponseBody

from tokenflow.core.replay import Record
from tokenflow.core.types import Delta
from tokenflow.dialects.encoder import Encoder
from tokenflow.errors import ResumeWindowLost
from tokenflow.http.transport import Direct
from tokenflow.service.reader import StreamReader
from tokenflow.service.records import Ended, StreamEvent

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}


class EventBody:
    """The body of a streaming response.

    Args:
        reader: where the records come from; whoever opened it closes it.
        encoder: the dialect.
        heartbeat_s: the longest silence on this connection.
        event_id: the stream's id, where events carry one; None where they do not.
        direct: how the connection is written to from other tasks, if it can be.
    """

    def __init__(
        self,
        reader: StreamReader,
        encoder: Encoder,
        heartbeat_s: float,
        *,
        event_id: str | None = None,
        direct: Direct | None = None,
    ) -> None:
        self._reader = reader
        self._encoder = encoder
        self._heartbeat_s = heartbeat_s
        self._event_id = event_id
        self._direct = direct
        self._started = self._lost = False
        self._handed_on = 0  # n of what was returned last: the transport has it when it asks for more
        self._wrote = True  # and there was something in it: the headers, if nothing else
        self._written_at = 0.0

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
        if self._handed_on > self._reader.n:
            self._reader.ack(self._handed_on)
        if self._wrote:
            self._written_at = trio.current_time()
        while trio.current_time() < self._written_at + self._heartbeat_s:  # it may have been written to meanwhile
            with trio.CancelScope(deadline=self._written_at + self._heartbeat_s):
                try:
                    records = await self._reader.read(self)
                except ResumeWindowLost as exc:  # too slow for what the log may hold: told by name, and that was all
                    self._lost = True
                    return self._encoder.failure(exc)
                if not records:
                    raise StopAsyncIteration
                self._handed_on = records[-1].n
                data = self._encode_all(records)
                self._wrote = bool(data)
                return data
        self._wrote = True
        return self._encoder.ping(ids=self._event_id is not None)

    # --- at once: see `AtOnce` ---

    def write(self, records: list[Record[StreamEvent]]) -> bool | None:
        if self._direct is None or not self._direct.ready:
            return None
        data = self._encode_all(records)
        if not data:
            return True
        self._written_at = records[-1].at
        return self._direct.send_nowait(data)

    async def flush(self) -> None:
        assert self._direct is not None
        await self._direct.flush()
        self._written_at = trio.current_time()

    def _start(self) -> bytes:
        if self._reader.n:
            return b""  # it comes back: its first event is the one after its last
        return self._encoder.start(ids=self._event_id is not None)

    def _encode_all(self, records: list[Record[StreamEvent]]) -> bytes:
        if len(records) == 1:
            return self._encode(records[0])
        return b"".join([self._encode(record) for record in records])

    def _encode(self, record: Record[StreamEvent]) -> bytes:
        event = record.event
        if self._event_id is None and isinstance(event, Delta):
            return self._encoder.delta(record.source, event)
        id = None if self._event_id is None else f"{self._event_id}:{record.n}"
        if isinstance(event, Delta):
            return self._encoder.delta(record.source, event, event_id=id)
        if isinstance(event, Ended):
            return self._encoder.end(event.reasons, event.usage, event_id=id)
        return self._encoder.failure(event.error, event_id=id)


ResponseBody.register(EventBody)  # not inherited: compiled, with an interpreted base, it would get a `__dict__`
