"""WebSocket: Hypercorn's stream, with what it forgets.

* Compression is declined: it costs 100 KiB a connection, and tokens are too short to gain from it.
* A ping is answered or the connection ends. Hypercorn pings, and never looks for the pong.
* A client that breaks the protocol, or sends too much, is told why in a close frame, and the application hears of it
  at once. Messages are measured in bytes, as they arrive: Hypercorn counts characters.
* The reader never waits for a client that does not read: pongs and last words are sent by tasks of their own, and the
  application hears of a close before the client is answered. So a client's leaving is always seen.
* A list in the handshake may be in several lines. Hypercorn knows the last line of each.
* Bytes that come before the handshake's answer are a 400 that also ends the application's call.
"""

from collections import deque
from dataclasses import replace
from typing import Any

import trio
from hypercorn.protocol.events import Body, Data, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.ws_stream import ASGIWebsocketState, WSStream
from hypercorn.typing import WebsocketAcceptEvent
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

from .asgi import error_body

# That wait to be sent. A client that reads none of them has the newest ones kept (RFC 6455 section 5.5.3).
_PONGS_MAX = 64
_MESSAGES = {
    400: "The WebSocket handshake is not valid, or it was followed by data before it was answered.",
    403: "The WebSocket was refused.",
}
_LISTS = (b"connection", b"sec-websocket-protocol", b"sec-websocket-extensions")


def _joined(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """With one line for each list, in the place of its first (RFC 9110 section 5.3)."""
    lines: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        lines.setdefault(name, []).append(value)
    joined = []
    for name, value in headers:
        if name not in _LISTS:
            joined.append((name, value))
        elif name in lines:
            joined.append((name, b", ".join(lines.pop(name))))
    return joined


class CorrectedWSStream(WSStream):
    """One WebSocket. Arguments as Hypercorn's, and `pong_s`: how long a client may take to answer a ping."""

    def __init__(self, *args: Any, pong_s: float) -> None:
        super().__init__(*args)
        self._pong_s = pong_s
        self._heard = trio.Event()
        self._gone = trio.Event()
        self._parts: list[Any] = []  # of one message: all text or all bytes
        self._part_bytes = 0
        self._pongs: deque[bytes] = deque(maxlen=_PONGS_MAX)
        self._ponging = False

    async def handle(self, event: Event) -> None:
        if isinstance(event, Body | Data):
            await self._receive(event.data)
            return
        if isinstance(event, StreamClosed):
            self._gone.set()
        if isinstance(event, Request):
            event = replace(event, headers=_joined(event.headers))
        await super().handle(event)
        if isinstance(event, StreamClosed) and self.handshake.accepted:
            vars(self.connection._proto).pop("_parse_more", None)  # it has in it what has it
        if isinstance(event, Request) and self.closed:  # refused, and nobody else would end the connection
            await self.send(StreamClosed(stream_id=self.stream_id))

    async def _receive(self, data: bytes) -> None:
        self._heard.set()
        if self.closed:
            return
        if self.handshake.accepted:
            self.connection.receive_data(data)
            await self._handle_events()
        elif self.state is ASGIWebsocketState.HANDSHAKE:  # RFC 6455 section 4.1: a client waits for the answer
            self.state = ASGIWebsocketState.HTTPCLOSED
            await self._send_error_response(400)
            await self.send(StreamClosed(stream_id=self.stream_id))

    async def _handle_events(self) -> None:
        for event in self.connection.events():
            if self.closed:
                return
            if isinstance(event, Message):
                await self._gather(event)
            elif isinstance(event, Ping):
                await self._answer(event)
            elif isinstance(event, CloseConnection):
                await self._answer_close(event)

    async def _gather(self, event: Message[Any]) -> None:
        if event.data:  # a client may send any number of empty fragments
            self._parts.append(event.data)
        self._part_bytes += len(event.data.encode() if isinstance(event.data, str) else event.data)
        if self._part_bytes > self.config.websocket_max_message_size:
            await self._close(CloseReason.MESSAGE_TOO_BIG, f"over {self.config.websocket_max_message_size} bytes")
        elif event.message_finished:
            parts, self._parts, self._part_bytes = self._parts, [], 0
            is_text = isinstance(event, TextMessage)
            message = {"bytes": None if is_text else b"".join(parts), "text": "".join(parts) if is_text else None}
            assert self.app_put is not None
            await self.app_put({"type": "websocket.receive", **message})

    async def _answer(self, ping: Ping) -> None:
        self._pongs.append(self._framed(ping.response()))
        if not self._ponging:
            self._ponging = True
            self.task_group.spawn(self._send_pongs)
            await trio.lowlevel.cancel_shielded_checkpoint()  # the pong is before whatever answers what comes after

    async def _answer_close(self, event: CloseConnection) -> None:
        if self.connection.state is ConnectionState.OPEN:  # not the client's close, but wsproto's finding
            await self._close(event.code, event.reason)
        else:
            await self._end(event.response())

    async def _close(self, code: int, reason: str | None) -> None:
        """Say why, and be done: the connection ends without waiting for the client's own close frame."""
        await self._end(CloseConnection(code=code, reason=reason))

    async def _end(self, last: CloseConnection) -> None:
        """The application hears of it at once; the client gets what is being sent, `last`, and the end."""
        frame = self._framed(last)
        await self.handle(StreamClosed(stream_id=self.stream_id))
        self.task_group.spawn(self._send_end, frame)

    def _framed(self, event: Pong | CloseConnection) -> bytes:
        """Nothing, where a close frame has been sent before."""
        try:
            return self.connection.send(event)
        except LocalProtocolError:
            return b""

    async def _send_end(self, last: bytes) -> None:
        await self.send(Data(stream_id=self.stream_id, data=last))
        await self.send(StreamClosed(stream_id=self.stream_id))

    async def _send_pongs(self) -> None:
        try:
            while self._pongs:
                await self.send(Data(stream_id=self.stream_id, data=self._pongs.popleft()))
        finally:
            self._ponging = False

    async def _send_pings(self) -> None:
        """Ping at intervals. Any sign of life answers: a client deep in a backlog may not have come to the ping."""
        assert self.config.websocket_ping_interval is not None
        while True:
            with trio.move_on_after(self.config.websocket_ping_interval):
                await self._gone.wait()
                return
            self._heard = trio.Event()
            await self._send_wsproto_event(Ping())
            with trio.move_on_after(self._pong_s) as patience:
                await self._heard.wait()
            if patience.cancelled_caught and not self.closed:
                await self._close(CloseReason.INTERNAL_ERROR, "no pong")

    @property
    def connected(self) -> bool:
        """Messages may be sent."""
        return self.state is ASGIWebsocketState.CONNECTED and self.connection.state is ConnectionState.OPEN

    async def _accept(self, message: WebsocketAcceptEvent) -> None:
        self.handshake.extensions = None
        await super()._accept(message)

    async def _send_error_response(self, status_code: int) -> None:
        body = error_body(status_code, _MESSAGES.get(status_code, "The server failed; its log says why."))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if status_code == 400:
            headers.append((b"sec-websocket-version", b"13"))  # RFC 6455 section 4.4
        await self.send(Response(stream_id=self.stream_id, status_code=status_code, headers=headers))
        await self.send(Body(stream_id=self.stream_id, data=body))
        await self.send(EndBody(stream_id=self.stream_id))
