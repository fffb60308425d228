"""HTTP/1.1, with pipelining that does not blind the reader and with requests refused that nobody should see.

Hypercorn parks the reader as soon as bytes of a next request arrive during a response, and then sees neither FIN nor
RST. Here the reader goes on: h11 itself keeps those bytes in its buffer, up to a limit, and parsing is taken up again,
in a task of its own, when the response has ended.
"""

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import h11
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import H2Error
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Request, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import H11SendableEvent
from hyperframe.exceptions import HyperframeError

from .asgi import error_body, for_server
from .at_once import Direct
from .limits import BY_STATUS, Limits, Traffic
from .refusals import MESSAGES, refusal
from .ws import CorrectedWSStream

_BASE64URL = re.compile(rb"[A-Za-z0-9_-]*")


class PipelineOverflow(OSError):
    """The client sent more than it may beyond the request that is being answered. It is cut off."""


class _Pause(Exception):
    """Raised where Hypercorn would park the reader."""


class _PauseInsteadOfParking:
    """Stands in for the event that Hypercorn waits for when h11 is PAUSED."""

    async def clear(self) -> None: ...

    async def set(self) -> None: ...

    async def wait(self) -> None:
        raise _Pause

    def is_set(self) -> bool:
        return True


class _Connection(h11.Connection):
    """h11's, for which bytes after a connection's last request are a fault of that request. They are nobody's."""

    body_bytes = 0
    """Of the body that is coming in, if its length was said: what is still to come."""

    def next_event(self) -> Any:
        if self.their_state is h11.MUST_CLOSE and self.trailing_data[0]:
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            raise error.with_traceback(None)  # noqa: B904  # it is the same; frames that it came through hold it
        if isinstance(event, h11.Request):
            self.body_bytes = sum(int(value) for name, value in event.headers if name == b"content-length")
        elif isinstance(event, h11.Data):
            self.body_bytes = max(0, self.body_bytes - len(event.data))
        return event


class CorrectedH11Protocol(H11Protocol):
    """One connection. Arguments as Hypercorn's, and ours; `stall_s` is also how long a pong may take."""

    def __init__(self, *args: Any, stall_s: float, limits: Limits, traffic: Traffic, direct: Direct) -> None:
        super().__init__(*args)
        self.connection.__class__ = _Connection  # Hypercorn made it, and to make another takes as long again
        self._pong_s = stall_s
        self._limits = limits
        self._traffic = traffic
        self.can_read = _PauseInsteadOfParking()
        self._parsing: trio.Event | None = None  # set when the reader, or the task that takes up held bytes, is done
        self._is_head = False
        self._head = b""  # of a response: it goes out with the first piece of the body
        self._without_end = False  # the response begun has no end in sight
        self._direct = direct
        self._closed = False

    async def handle(self, event: Event) -> None:
        if isinstance(event, Closed):
            self._closed, self._without_end = True, False
            self._direct.close()
        elif self.connection.their_state is h11.MUST_CLOSE:
            return  # RFC 9112 section 9.6: nothing follows that request
        await super().handle(event)
        if isinstance(event, RawData) and len(self.connection.trailing_data[0]) > self._limits.max_pipelined_bytes:
            self._traffic.refused["pipelined"] += 1
            raise PipelineOverflow(f"more than {self._limits.max_pipelined_bytes} bytes sent during a response")

    @property
    def in_head(self) -> bool:
        """A part of a request's head has come, and not the rest."""
        return self.connection.our_state is h11.IDLE and bool(self.connection.trailing_data[0])

    @property
    def body_bytes(self) -> int:
        """How much of a body whose length was said is still to come."""
        return self.connection.body_bytes if isinstance(self.connection, _Connection) else 0

    async def _handle_events(self) -> None:
        while self._parsing is not None:
            await self._parsing.wait()
        if self._closed:
            return  # a request begun now would never hear that its client has left
        self._parsing = done = trio.Event()
        try:
            await super()._handle_events()
        except _Pause:
            pass
        finally:
            self._parsing = None
            done.set()

    async def _maybe_recycle(self) -> None:
        # Nothing in here may be a checkpoint: an application that ends itself on `http.disconnect`, as Quart-Trio's
        # does, would be cancelled before the connection is closed or its keep-alive timer started.
        await super()._maybe_recycle()
        if self.connection.our_state is h11.IDLE and self.connection.trailing_data[0]:
            self.task_group.spawn(self._handle_events)

    async def _check_protocol(self, event: h11.Request) -> None:
        # A change to HTTP/2 is the connection's first request or none. Later it may be a held one, parsed by a task
        # that cannot replace the protocol; the upgrade is then ignored, as RFC 9110 section 7.8 allows.
        # So is one with settings that do not hold (RFC 7540 section 3.2.1), or for a target that HTTP/2 has not.
        h2c = event.target.startswith(b"/") and _asks_for_h2c(event)
        preface = event.method == b"PRI" and not event.headers  # with an Upgrade, Hypercorn would obey that
        if self.keep_alive_requests == 0 and (preface or h2c):
            await super()._check_protocol(event)

    async def _create_stream(self, request: h11.Request) -> None:
        self._is_head = request.method == b"HEAD"
        headers = _with_host_of(request.target, list(request.headers))
        if (status := refusal(request.method, request.target, headers, self._limits)) is not None:
            await self.refuse(status)
            return
        assert isinstance(self.connection, h11.Connection)
        if self.body_bytes > self._limits.max_body_bytes:  # RFC 9110 section 10.1.1: the answer may come without a 100
            self.connection.client_is_waiting_for_100_continue = False
        app = for_server if request.target == b"*" else self.app
        arguments = app, self.config, self.context, self.task_group, self.ssl, self.client, self.server
        if _asks_for_websocket(headers, request.method):
            stream = CorrectedWSStream(*arguments, self.stream_send, STREAM_ID, pong_s=self._pong_s)
            self._direct.websocket = stream
            self.connection = H11WSConnection(self.connection)
            self.stream = stream
        else:
            self.stream = HTTPStream(*arguments, self.stream_send, STREAM_ID)
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=headers,
                http_version=request.http_version.decode(),
                method=request.method.decode().upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and event.status_code >= 200 and self._is_last:
            event.headers.append((b"connection", b"close"))
        await super().stream_send(event)

    @property
    def _is_last(self) -> bool:
        """The client should not wait for another answer: it is draining, this request has not come to its end, or was
        for a WebSocket."""
        their_state, is_websocket = self.connection.their_state, isinstance(self.connection, H11WSConnection)
        return self.context.terminated.is_set() or their_state is h11.SEND_BODY or is_websocket

    async def refuse(self, status: int) -> None:
        """Answer a request that is not one, and be done with this connection."""
        await self._send_error_response(status)
        await self.send(Closed())

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        try:
            data = self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state is h11.ERROR:
                return  # it broke off in the middle of what is being answered
            raise
        if isinstance(event, h11.Response) and isinstance(self.connection, h11.Connection):
            self._head = data
            # As h11 will frame it: RFC 9112 section 6.
            self._without_end = (
                not self._is_head
                and self.connection.their_http_version != b"1.0"
                and all(name != b"content-length" for name, _ in event.headers)
            )
            return
        if isinstance(event, h11.EndOfMessage):
            self._without_end = False
        await self.send(RawData(self.take_head() + data))

    def take_head(self) -> bytes:
        """The response's head, where it has not gone out yet, for who sends it now."""
        head, self._head = self._head, b""
        self._direct.open_ended = self._without_end
        return head

    async def _send_error_response(self, status_code: int) -> None:
        self._traffic.refused[BY_STATUS.get(status_code, "malformed")] += 1
        body = error_body(status_code, MESSAGES.get(status_code) or HTTPStatus(status_code).phrase)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        without_body = self._is_head and self.connection.our_state is not h11.IDLE
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        if not without_body:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _with_host_of(target: bytes, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A target in absolute form says whose it is, and a Host beside it counts for nothing (RFC 9112 section 3.2.2)."""
    if target.startswith(b"/") or b"://" not in target:
        return headers
    authority = target.split(b"/", 3)[2]
    return [(b"host", authority), *[header for header in headers if header[0] != b"host"]]


def _asks_for_websocket(headers: list[tuple[bytes, bytes]], method: bytes) -> bool:
    # Of several Upgrades the last counts, and without the spaces that only a `str` strips.
    upgrade = [value.decode("latin-1").strip().lower() for name, value in headers if name == b"upgrade"]
    if upgrade[-1:] != ["websocket"] or method.upper() != b"GET":
        return False
    return "upgrade" in _connection_tokens(headers)


def _connection_tokens(headers: Iterable[tuple[bytes, bytes]]) -> set[str]:
    connection = b",".join([value for name, value in headers if name == b"connection"])
    return {token.strip().lower() for token in connection.decode("latin-1").split(",")}


def _asks_for_h2c(request: h11.Request) -> bool:
    # Without the Connection it may be what a proxy has passed on, unasked (RFC 9110 section 7.8).
    return (
        request.http_version == b"1.1"
        and any(name == b"upgrade" and value.strip().lower() == b"h2c" for name, value in request.headers)
        and {"upgrade", "http2-settings"} <= _connection_tokens(request.headers)
        and _settings_hold(request)
    )


def _settings_hold(request: h11.Request) -> bool:
    values = [value for name, value in request.headers if name == b"http2-settings"]
    if len(values) != 1 or not _BASE64URL.fullmatch(values[0]):
        return False
    tried = H2Connection(H2Configuration(client_side=False))
    try:
        tried.initiate_upgrade_connection(values[0])
    except (ValueError, H2Error, HyperframeError):
        return False
    finally:
        vars(tried).clear()  # its tables hold what holds them
    return True
