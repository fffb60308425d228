"""`GET /v1/ws`: many generations on one WebSocket.

    one task reads frames, and follows each before it reads the next
    one task for each generation reads its stream and writes frames, through the one `Socket`
    one task fills silence, one waits for the drain

All are in one nursery, which Quart cancels when the client leaves; each generation's task then closes its reader, and
that is the disconnect which its request chose a meaning for. A record is acknowledged when the kernel has its frame.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass

import trio
from quart import Response, websocket
from quart.wrappers import Websocket
from quart_trio import QuartTrio

from tokenflow.core.replay import Record
from tokenflow.core.types import Delta
from tokenflow.dialects.websocket import (
    PING,
    PONG,
    Attach,
    ClientFrame,
    Credit,
    Encoder,
    Generate,
    Ping,
    Steer,
    parse,
    read,
    refused,
    said_id,
)
from tokenflow.errors import (
    Forbidden,
    InvalidRequest,
    Misdirected,
    NotFound,
    Overloaded,
    ResumeWindowLost,
    TokenflowError,
    Unauthorized,
    first_error,
)
from tokenflow.http.auth import websocket_key
from tokenflow.http.connection import at_end
from tokenflow.http.pages import Pages
from tokenflow.http.transport import ClientDisconnected
from tokenflow.http.websocket import SUBPROTOCOL, Socket
from tokenflow.service.reader import StreamReader
from tokenflow.service.records import Ended, StreamEvent
from tokenflow.service.service import Service
from tokenflow.service.stream import Stream

log = logging.getLogger("tokenflow.http")

PATH = "/v1/ws"
MAX_GENERATIONS = 128
"""At once on one socket."""
COME_BACK_S = 1.0
"""For the first frame of a socket that is opened while the server drains."""

BAD_KEY, FAULT, DRAINING = 1008, 1011, 1012
"""Close codes (RFC 6455 section 7.4.1, and IANA's registry of later ones)."""


def register(app: QuartTrio, service: Service) -> None:
    pages = Pages(service.config.http, open_to_all=not service.config.auth.keys)

    @app.get(PATH)
    async def no_handshake() -> Response:
        raise InvalidRequest("This is a WebSocket; ask for an upgrade to it (RFC 6455).", code="upgrade_required")

    @app.websocket(PATH)
    async def ws() -> None:
        await _ungrouped(talk)

    async def talk() -> None:
        client: Websocket = websocket._get_current_object()  # type: ignore[attr-defined]  # werkzeug's proxies have it
        await client.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in client.requested_subprotocols else None)
        socket = Socket(client, service.config.stream.heartbeat_s, PING)
        try:
            try:
                pages.check(client.headers)
                key = websocket_key(client, service.config.auth)
            except (
                Forbidden,
                Misdirected,
                Unauthorized,
            ) as exc:  # a browser sees no status of a refused handshake, but a close code
                await socket.send(refused(None, exc))
                await socket.close(BAD_KEY, exc.code)
            else:
                session = Session(service, key, socket)
                at_end(session.close)
                await session.run(client)
        except* ClientDisconnected:
            pass
        except* Exception as group:
            log.error("websocket failed", exc_info=group)
            with suppress(ClientDisconnected):
                await socket.close(FAULT, "internal_error")


async def _ungrouped(talk: Callable[[], Awaitable[None]]) -> None:
    """Run what raises no groups but of Cancelled. Quart's frames would hold a group, and be held by it."""
    cancelled: BaseException | None = None
    try:
        await talk()
    except BaseExceptionGroup as group:
        cancelled = first_error(group)
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled  # as a group would be


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One stream as this socket reads it."""

    id: str
    """The client's own, or the stream's."""
    stream: Stream
    reader: StreamReader
    encoder: Encoder
    socket: Socket

    def frame(self, record: Record[StreamEvent]) -> str:
        event = record.event
        if isinstance(event, Delta):
            return self.encoder.delta(record.n, record.source, event)
        if isinstance(event, Ended):
            return self.encoder.end(record.n, event.reasons, event.usage)
        return self.encoder.failure(record.n, event.error)

    # At once: see `AtOnce`.

    def write(self, records: list[Record[StreamEvent]]) -> bool | None:
        return self.socket.send_nowait([self.frame(record) for record in records]) if self.socket.ready else None

    async def flush(self) -> None:
        await self.socket.flush()


class Session:
    """One client's socket, from its key to its end."""

    def __init__(self, service: Service, key: str, socket: Socket) -> None:
        self._service = service
        self._key = key
        self._socket = socket
        self._names: dict[str, Generation] = {}  # by the client's id and by the stream's
        self._ended: deque[str] = deque(maxlen=4 * MAX_GENERATIONS)  # names that a frame on its way may still say
        self._live: set[Generation] = set()
        self._quiet = trio.Event()
        self._followed = trio.Event()  # a frame, the first

    async def run(self, client: Websocket) -> None:
        """Serve until the client leaves (which cancels this) or the server drains."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._socket.beat)
                self._nursery.start_soon(self._leave_on_drain)
                with suppress(ClientDisconnected):
                    while True:
                        await self._take(await client.receive())
                        self._followed.set()
                self._nursery.cancel_scope.cancel()
        finally:
            del self._nursery  # which has what ended it, whose frames have this

    def close(self) -> None:
        """The client has left, and so has every reader, also where a frame still waits for the kernel to take it."""
        for generation in tuple(self._live):
            generation.reader.close()

    async def _leave_on_drain(self) -> None:
        if self._service.drain_begun.is_set():  # who comes now may have lost another socket, and come back to a stream
            with trio.move_on_after(COME_BACK_S):
                await self._followed.wait()
        await self._service.drain_begun.wait()
        while self._live:
            self._quiet = trio.Event()
            await self._quiet.wait()
        await self._socket.close(DRAINING, "draining")
        self._nursery.cancel_scope.cancel()

    # --- frames from the client -------------------------------------------------------------------------------------

    async def _take(self, data: str | bytes) -> None:
        """Follow one frame, or say why not: then nothing has changed, and the socket lives."""
        id = None
        try:
            fields = read(data)
            id = said_id(fields)
            await self._follow(parse(fields))
        except TokenflowError as exc:
            await self._socket.send(refused(id, exc))
        except ClientDisconnected:
            raise
        except Exception as exc:
            log.error("a websocket's frame failed", exc_info=exc)
            await self._socket.send(refused(id, TokenflowError("The server failed on this frame; its log says why.")))

    async def _follow(self, frame: ClientFrame) -> None:
        match frame:
            case Generate():
                await self._generate(frame)
            case Attach():
                self._attach(frame)
            case Steer():
                if (generation := self._find(frame.id)) is not None:
                    _steer(generation.stream, frame)
            case Credit():
                if (generation := self._find(frame.id)) is not None:
                    generation.reader.allow(frame.n)
            case Ping():
                await self._socket.send(PONG)

    async def _generate(self, frame: Generate) -> None:
        self._check_room(frame.id)
        stream, reader = await self._service.open(frame.request, key=self._key, route=PATH)
        if frame.credit is not None:
            reader.allow(frame.credit)  # no checkpoint since: the engine has not begun
        self._begin(frame.id, stream, reader, after=0)

    def _attach(self, frame: Attach) -> None:
        self._check_room(frame.id, frame.stream)
        stream = self._service.stream(frame.stream, self._key)
        reader = stream.attach(frame.after, credit=frame.credit)
        if reader.at_end:  # it has everything; so that it hears of something, it hears of the end again
            reader.close()
            reader = stream.attach(frame.after - 1)
        self._begin(frame.id, stream, reader, frame.after)

    def _check_room(self, *names: str | None) -> None:
        if len(self._live) >= MAX_GENERATIONS:
            raise Overloaded(
                f"This socket has {MAX_GENERATIONS} generations, and more it cannot; open another.",
                code="too_many_generations",
                retry_after_s=1.0,
            )
        for name in names:
            if name in self._names:
                raise InvalidRequest("There is a generation of that id on this socket.", param="id", code="id_in_use")

    def _find(self, name: str) -> Generation | None:
        """The generation of that name; None for one that has just ended, which a client may not know yet."""
        if name not in self._names and name not in self._ended:
            raise NotFound("There is no generation of that id on this socket.", param="id", code="stream_not_found")
        return self._names.get(name)

    # --- frames to the client ---------------------------------------------------------------------------------------

    def _begin(self, id: str | None, stream: Stream, reader: StreamReader, after: int) -> None:
        named = id or stream.identity.id
        generation = Generation(named, stream, reader, Encoder(named, stream.identity.id), self._socket)
        self._names[named] = self._names[stream.identity.id] = generation
        self._live.add(generation)
        self._nursery.start_soon(self._deliver, generation, after)

    async def _deliver(self, generation: Generation, after: int) -> None:
        reader = generation.reader
        with closing(reader):
            try:
                await self._socket.send(generation.encoder.begun(after))
                await self._read(generation)
            except ResumeWindowLost as exc:
                self._forget(generation)
                await self._socket.send(generation.encoder.failure(generation.reader.n, exc))
            finally:
                self._forget(generation)
                self._live.discard(generation)
                if not self._live:
                    self._quiet.set()

    async def _read(self, generation: Generation) -> None:
        reader = generation.reader
        while records := await reader.read(generation):
            for record in records:
                if not isinstance(record.event, Delta):
                    self._forget(generation)  # before it is told: told, the client may use its id again at once
                await self._socket.send(generation.frame(record))
                reader.ack(record.n)

    def _forget(self, generation: Generation) -> None:
        for name in (generation.id, generation.stream.identity.id):
            if self._names.get(name) is generation:
                del self._names[name]
                self._ended.append(name)


def _steer(stream: Stream, frame: Steer) -> None:
    match frame.action:
        case "cancel":
            stream.cancel("client")
        case "pause":
            stream.pause()
        case "resume":
            stream.resume()
