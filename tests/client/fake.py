"""A server as a transport: a log of records written by the real encoder, connections that end where the test says.

Bytes are counted within a connection's body. After the last planned cut connections are whole. Nothing here waits, so
with a mock clock the only time that passes is the client's own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random

import httpx2
import trio

from tokenflow.client import Client
from tokenflow.core.types import Delta, Usage
from tokenflow.dialects.openai_chat import ChatEncoder

ID = "tf-0123456789abcdef"
URL = "http://server:1"
HELLO = [{"role": "user", "content": "hello"}]
USAGE = Usage(prompt=3, completion=7)
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}


@dataclass(frozen=True)
class Cut:
    """A connection's end after so many bytes of its body."""

    after: int
    how: Exception | None = None
    """What the transport raises; None is an orderly end of the body."""
    hang: bool = False
    """Say nothing more instead, for ever."""


class Body(httpx2.AsyncByteStream):
    """A body in pieces of a size, and how it ends."""

    def __init__(self, data: bytes, cut: Cut | None, piece: int) -> None:
        self.data = data if cut is None else data[: cut.after]
        self.cut = cut
        self.piece = piece
        self.closed = False
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self.data), self.piece):
            self.sent = at + self.piece
            yield self.data[at : at + self.piece]
        if self.cut is None:
            return
        if self.cut.hang:
            await trio.sleep_forever()
        if self.cut.how is not None:
            raise self.cut.how

    async def aclose(self) -> None:
        self.closed = True


Answer = httpx2.Response | Exception | Callable[[], httpx2.Response]


@dataclass
class Server(httpx2.AsyncBaseTransport):
    """One stream, and whoever asks for it.

    Args:
        texts: a record each.
        cuts: of the first connections that get events, in their order.
        instead: what to answer to the first requests instead, in their order; None answers as usual.
        piece: bytes that arrive at once.
        numbered: events have ids, and the stream can be come back to.
        end: the last record; None for one that goes well.
        overlap: records that are sent again when it is come back to.
    """

    texts: list[str]
    cuts: list[Cut] = field(default_factory=list)
    instead: list[Answer | None] = field(default_factory=list)
    piece: int = 1 << 20
    numbered: bool = True
    end: bytes | None = None
    overlap: int = 0
    requests: list[httpx2.Request] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)

    def client(self, **options: object) -> Client:
        return Client(URL, transport=self, **{"random": Random(1)} | options)

    @property
    def log(self) -> list[str]:
        """The requests, as `METHOD path last-event-id`."""
        return [
            f"{request.method} {request.url.path} {request.headers.get('last-event-id', '')}".rstrip()
            for request in self.requests
        ]

    def json(self, at: int = 0) -> dict:
        return json.loads(self.requests[at].content)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        self.times.append(trio.current_time())
        if request.method == "DELETE":
            return httpx2.Response(204)
        planned = self.instead.pop(0) if self.instead else None
        if isinstance(planned, Exception):
            raise planned
        if planned is not None:
            return planned if isinstance(planned, httpx2.Response) else planned()
        after = int((request.headers.get("last-event-id") or ":0").rpartition(":")[2])
        return self.events(max(0, after - self.overlap) if after else 0)

    def events(self, after: int = 0) -> httpx2.Response:
        """The answer that has the records after one."""
        body = Body(self.transcript(after), self.cuts.pop(0) if self.cuts else None, self.piece)
        self.bodies.append(body)
        return httpx2.Response(200, headers=EVENTS | {"X-Request-Id": ID}, stream=body)

    def transcript(self, after: int = 0) -> bytes:
        """What a connection gets that nothing happens to."""
        encoder = ChatEncoder(ID, "m", 1, True)
        frames = [encoder.start()] if not after else []
        for n, text in enumerate(self.texts, 1):
            if n > after:
                frames.append(encoder.delta(0, Delta(text), event_id=self._event_id(n)) + encoder.ping(ids=True))
        last = len(self.texts) + 1
        frames.append(self.end or encoder.end(["stop"], USAGE, event_id=self._event_id(last)))
        return b"".join(frames)

    def _event_id(self, n: int) -> str | None:
        return f"{ID}:{n}" if self.numbered else None
