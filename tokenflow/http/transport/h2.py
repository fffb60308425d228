"""HTTP/2, where a send returns when the kernel has everything, and one stream's trouble is its own.

Hypercorn gives bytes to a buffer of each stream and a task that sends from them by priority. The buffers grow without
bound where a client's flow control window is closed, and the tree of priorities can be broken from outside. Here there
is neither: whoever sends waits for the window, writes one frame, and queues for the next with all others, so streams
take turns frame by frame (RFC 9113 deprecates priorities).

* The reader never waits: not for an application that does not take its request's body, which its own window bounds, nor
  for the kernel to take an acknowledgement. So a stream's reset and the client's leaving are always seen.
* A window that stays closed for `stall_s` ends its stream, and no other.
* Going away (draining, or after enough requests) refuses new streams and lets those that live end.
"""

import sys
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.events import Event as H2Event
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import (
    Body,
    Data,
    EndBody,
    EndData,
    InformationalResponse,
    Request,
    Response,
    StreamClosed,
)
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import AppWrapper
from hypercorn.utils import filter_pseudo_headers
from hyperframe.frame import Frame, GoAwayFrame

from .asgi import ClientDisconnected, error_body, for_server
from .limits import BY_STATUS, RESETS_WITHIN_S, Limits, Traffic
from .refusals import MESSAGES, refusal
from .ws import CorrectedWSStream

if TYPE_CHECKING:
    from h2._typing import Buffer  # the library's own word for bytes of any kind

# What the client may make us say (acknowledgements, resets) and then not read.
OWED_MAX = 64 * 1024
FRAME_HEADER = 9
SPARE_S = 1.0
"""For so long the rest of a request that has been answered already is taken and thrown away."""


class Overflow(OSError):
    """The client has us answer, and reads no answers. It is cut off."""


class _Connection(H2Connection):
    """The library's, with what it makes of a stream too many, of a frame too long, and of a client that goes away."""

    @property
    def open_inbound_streams(self) -> int:
        # To the library one too many is the connection's end, and all streams with it. `_request` refuses it alone.
        super().open_inbound_streams  # noqa: B018  # forgets closed streams
        return 0

    def receive_data(self, data: "Buffer") -> list[H2Event]:
        events = super().receive_data(data)
        if len(self.incoming_buffer._data) > self.max_inbound_frame_size + FRAME_HEADER:
            # The library gathers a frame, of up to 16 MiB, before it looks at its length.
            self.close_connection(ErrorCodes.FRAME_SIZE_ERROR)
            raise ProtocolError("a frame longer than was agreed")
        return events

    def _stream_is_closed_by_reset(self, stream_id: int) -> bool:
        # Asked where the library handles the error that says so. The frames that it came through hold it, and all else.
        if (error := sys.exception()) is not None:
            error.__traceback__ = None
        return super()._stream_is_closed_by_reset(stream_id)

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[H2Event]]:
        # The library would send nothing more. But who goes away may wait for the streams there are (section 6.8).
        return [], [ConnectionTerminated()]


class _Exchange:
    """A request and its response, as far as HTTP/2 is concerned."""

    def __init__(self, *, request_ended: bool) -> None:
        self.request_ended = request_ended
        self.response_ended = False
        self.inbox: deque[tuple[StreamEvent, int]] = deque()
        """Parts of the request that the application has yet to take, and what each took of the window."""
        self.delivering = False


class CorrectedH2Protocol(H2Protocol):
    """One connection. Arguments as Hypercorn's, and `stall_s`: how long a client may take nothing of what is sent."""

    def __init__(self, *args: Any, stall_s: float, limits: Limits, traffic: Traffic) -> None:
        super().__init__(*args)
        self._stall_s = stall_s
        self._limits = limits
        self._traffic = traffic
        self.let_go()
        self.connection = _Connection(H2Configuration(client_side=False, header_encoding=None))
        self.connection.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: self.config.h2_max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: self.config.h2_max_header_list_size,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 1,
            },
        )
        self._exchanges: dict[int, _Exchange] = {}
        self._outbox = b""  # frames that are ready, in their order
        self._answering = False
        self._window_changed = trio.lowlevel.ParkingLot()
        self._spared = 0
        self._going_away = False
        self._idle = True  # as was last said
        self._resets: deque[float] = deque(maxlen=limits.max_resets)

    def let_go(self) -> None:
        """Nothing is read or sent any more: take the library's connection apart, whose tables hold what holds them."""
        vars(self.connection).clear()

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        if headers is None:
            self.connection.initiate_connection()
        else:  # upgraded from HTTP/1.1: stream 1 is its request, which has come whole
            self.connection.initiate_upgrade_connection(settings)
        await self._flush()
        if headers is not None:
            self._request(RequestReceived(stream_id=1, headers=headers), ended=True)
            self._take(1, EndBody(stream_id=1), 0)
            await self._update()

    # --- what the client sends ----------------------------------------------------------------------------------------

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            try:
                events = self.connection.receive_data(event.data)
            except ProtocolError:
                self._traffic.refused["malformed"] += 1
                await self._break_off()
            else:
                await self._handle_events(events)
        elif isinstance(event, Closed):
            self.closed = True
            self._window_changed.unpark_all()
            await self._close_streams()

    async def _handle_events(self, events: list[H2Event]) -> None:
        for event in events:
            if isinstance(event, RequestReceived):
                self._request(event, ended=event.stream_ended is not None)
            elif isinstance(event, DataReceived):
                self._take(event.stream_id, Body(event.stream_id, event.data), event.flow_controlled_length)
            elif isinstance(event, StreamEnded):
                self._take(event.stream_id, EndBody(event.stream_id), 0)
            elif isinstance(event, StreamReset):
                await self._end(event.stream_id)
                if self._resets_too_often():
                    await self._be_calm()
                    return
            elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
                self._window_changed.unpark_all()
            elif isinstance(event, ConnectionTerminated):  # it opens no more streams, and waits for those there are
                self._going_away = True
        await self._update()
        self._answer()

    def _request(self, event: RequestReceived, *, ended: bool) -> None:
        stream_id = event.stream_id
        if self._going_away or len(self._exchanges) >= self._limits.max_streams:
            self._traffic.refused["streams"] += not self._going_away
            self._reset(stream_id, ErrorCodes.REFUSED_STREAM)  # for sure not begun: safe to repeat
            return
        pseudo = {name: value for name, value in event.headers if name.startswith(b":")}
        headers = filter_pseudo_headers(event.headers)
        method, path = pseudo[b":method"].upper(), pseudo.get(b":path", b"")
        if (status := self._refusal(method, path, pseudo, headers)) is not None:
            with suppress(ProtocolError):  # it has been reset in the same breath
                self._refuse(stream_id, status, with_body=method != b"HEAD", ended=ended)
            return
        if not ended and method != b"CONNECT" and self._awaits_continue(headers):
            with suppress(ProtocolError):  # as above
                self.connection.send_headers(stream_id, [(b":status", b"100")])
        self._exchanges[stream_id] = _Exchange(request_ended=ended)
        self._take(stream_id, Request(stream_id, headers, "2", method.decode(), path, self.connection_state), 0)
        self.keep_alive_requests += 1
        if self.context.terminated.is_set() or self.keep_alive_requests >= self.config.keep_alive_max_requests:
            self._refuse_more()

    def _refusal(
        self, method: bytes, path: bytes, pseudo: dict[bytes, bytes], headers: list[tuple[bytes, bytes]]
    ) -> int | None:
        if method == b"CONNECT" and pseudo.get(b":protocol") != b"websocket":
            return 501
        if not path.startswith(b"/") and path != b"*":
            return 400  # RFC 9113 section 8.3.1: whose it is, `:authority` says
        return refusal(method, path, headers, self._limits)

    def _awaits_continue(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Its body comes only when asked for (RFC 9110 section 10.1.1), and is not too long to ask for it."""
        length = max((int(value) for name, value in headers if name == b"content-length"), default=0)
        expected = {value.lower() for name, value in headers if name == b"expect"}
        return b"100-continue" in expected and length <= self._limits.max_body_bytes

    def _refuse(self, stream_id: int, status: int, *, with_body: bool, ended: bool) -> None:
        self._traffic.refused[BY_STATUS[status]] += 1
        body = error_body(status, MESSAGES[status]) if with_body else b""
        headers = [(b":status", b"%d" % status), (b"content-type", b"application/json")]
        self.connection.send_headers(stream_id, headers + self.config.response_headers("h2"))
        if len(body) > self.connection.local_flow_control_window(stream_id):
            body = b""
        self.connection.send_data(stream_id, body, end_stream=True)
        if not ended:
            self._spare(stream_id)

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        with suppress(ProtocolError):  # closed already
            self.connection.reset_stream(stream_id, code)

    def _stream(self, stream_id: int, app: AppWrapper, *, is_websocket: bool) -> HTTPStream | CorrectedWSStream:
        arguments = (
            app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            stream_id,
        )
        if is_websocket:
            return CorrectedWSStream(*arguments, pong_s=self._stall_s)
        return HTTPStream(*arguments)

    def _take(self, stream_id: int, event: StreamEvent, credit: int) -> None:
        """A part of a request, for its application, when it takes it: only then may the client send so much more."""
        exchange = self._exchanges.get(stream_id)
        if exchange is None or (isinstance(event, Body) and not event.data):  # of empty ones there could be any number
            self._acknowledge(stream_id, credit)
            return
        exchange.request_ended |= isinstance(event, EndBody)
        exchange.inbox.append((event, credit))
        if not exchange.delivering:
            exchange.delivering = True
            self.task_group.spawn(self._deliver, stream_id, exchange)

    async def _deliver(self, stream_id: int, exchange: _Exchange) -> None:
        while exchange.inbox:
            event, credit = exchange.inbox.popleft()
            if self._exchanges.get(stream_id) is exchange:
                await self._hand_over(stream_id, event)
            self._acknowledge(stream_id, credit)
            await self._flush()
        exchange.delivering = False

    async def _hand_over(self, stream_id: int, event: StreamEvent) -> None:
        if isinstance(event, Request):
            app = for_server if event.raw_path == b"*" else self.app
            self.streams[stream_id] = self._stream(stream_id, app, is_websocket=event.method == "CONNECT")
        stream = self.streams[stream_id]
        if isinstance(event, EndBody) and isinstance(stream, CorrectedWSStream):
            await self._end(stream_id)  # a half-closed socket is a client that has left
        else:
            await stream.handle(event)

    def _resets_too_often(self) -> bool:
        """To begin a stream costs the server more than its client, who has none to wait for (CVE-2023-44487)."""
        self._resets.append(now := trio.current_time())
        return len(self._resets) == self._limits.max_resets and now - self._resets[0] < RESETS_WITHIN_S

    async def _be_calm(self) -> None:
        self._traffic.refused["resets"] += 1
        self.connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
        await self._break_off()

    async def _break_off(self) -> None:
        """Everything ends here. The applications hear of it first: the kernel may not take the last frame for long."""
        await self._close_streams()
        await self._flush()
        await self.send(Closed())

    def _acknowledge(self, stream_id: int, credit: int) -> None:
        with suppress(ProtocolError):  # the connection is closed
            self.connection.acknowledge_received_data(credit, stream_id)

    # --- what is sent -------------------------------------------------------------------------------------------------

    async def stream_send(self, event: StreamEvent) -> None:
        try:
            if isinstance(event, Response | InformationalResponse):
                status = [(b":status", b"%d" % event.status_code)]
                headers = status + event.headers + self.config.response_headers("h2")
                self.connection.send_headers(event.stream_id, headers)
                await self._flush()
            elif isinstance(event, Body | Data):
                await self._send_body(event.stream_id, event.data)
            elif isinstance(event, EndBody | EndData):
                self.connection.end_stream(event.stream_id)
                if (exchange := self._exchanges.get(event.stream_id)) is not None:
                    exchange.response_ended = True
                await self._flush()
            elif isinstance(event, StreamClosed):
                await self._close_response(event.stream_id)
        except ProtocolError as error:  # the stream or the connection has been closed meanwhile
            raise ClientDisconnected(f"the client has reset the stream: {error}") from error

    async def _send_body(self, stream_id: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            if stream_id not in self._exchanges:
                raise ClientDisconnected("the client has left within a send")
            room = self.connection.local_flow_control_window(stream_id)
            if room <= 0:
                await self._wait_window(stream_id)
                continue
            piece = rest[: min(room, self.connection.max_outbound_frame_size)]
            self.connection.send_data(stream_id, bytes(piece))
            rest = rest[len(piece) :]
            await self._flush()

    async def _wait_window(self, stream_id: int) -> None:
        # Shielded, as a send on HTTP/1.1 is: whoever sends has all of it sent, or nothing more.
        with trio.move_on_after(self._stall_s, shield=True):
            while stream_id in self._exchanges and self.connection.local_flow_control_window(stream_id) <= 0:
                await self._window_changed.park()
            return
        self._reset(stream_id, ErrorCodes.CANCEL)
        await self._flush()
        await self._end(stream_id)
        raise ClientDisconnected(f"the client took nothing for {self._stall_s} s")

    async def _close_response(self, stream_id: int) -> None:
        """The application is done with the stream. Where one side has not ended, the client is to know that it has."""
        exchange = self._exchanges.get(stream_id)
        if isinstance(self.streams.get(stream_id), CorrectedWSStream) and exchange and not exchange.response_ended:
            await self.stream_send(EndData(stream_id))  # its close frame has been sent
        if exchange is not None and not exchange.response_ended:
            self._reset(stream_id, ErrorCodes.INTERNAL_ERROR)
            await self._flush()
        elif exchange is not None and not exchange.request_ended:
            self._spare(stream_id)
        await self._end(stream_id)

    def _spare(self, stream_id: int) -> None:
        """The response is whole, the request is not: take what is on its way, and soon ask for no more of it.

        RFC 9113 section 8.1 allows to ask at once; but many a client that still sends then throws the response away.
        """
        if self._spared < self._limits.max_streams:
            self._spared += 1
            self.task_group.spawn(self._spare_later, stream_id)
        else:
            self._reset(stream_id, ErrorCodes.NO_ERROR)

    async def _spare_later(self, stream_id: int) -> None:
        with trio.move_on_after(SPARE_S):
            while not self.closed:
                await self._window_changed.park()
        self._spared -= 1
        if not self.closed:
            self._reset(stream_id, ErrorCodes.NO_ERROR)
            await self._flush()

    async def _end(self, stream_id: int) -> None:
        """Nothing more comes or goes on that stream: its application hears of it."""
        await self._close_stream(stream_id)
        await self._update()

    async def _close_streams(self) -> None:
        for stream_id in list(self._exchanges):
            await self._close_stream(stream_id)

    async def _close_stream(self, stream_id: int) -> None:
        # Nothing in here may be a checkpoint: see `CorrectedH11Protocol._maybe_recycle`.
        self._exchanges.pop(stream_id, None)
        self._window_changed.unpark_all()
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            await stream.handle(StreamClosed(stream_id=stream_id))

    async def _update(self) -> None:
        """Say whether anything is going on here; where nothing is and nothing may come, close the connection."""
        if self.closed:
            return
        if self._going_away and not self._exchanges:
            await self._flush()
            await self.send(Closed())
        elif self._idle is bool(self._exchanges):
            self._idle = not self._idle
            await self.send(Updated(idle=self._idle))

    def go_away(self) -> None:
        """No further streams on this connection; those that live go on, and then it ends."""
        self._refuse_more()
        self.task_group.spawn(self._update)

    async def end(self) -> None:
        """As `go_away`, of a connection on which nothing is going on: when this returns, the kernel has the GOAWAY."""
        self._refuse_more()
        await self._update()

    def _refuse_more(self) -> None:
        if self._going_away or self.closed:
            return
        self._going_away = True
        # Not the library's `close_connection`, after which it sends nothing more for any stream.
        last = self.connection.highest_inbound_stream_id
        self._outbox += self.connection.data_to_send() + GoAwayFrame(0, last_stream_id=last).serialize()
        self._answer()

    def _answer(self) -> None:
        """Have what the reader has to say sent, by a task of its own."""
        self._outbox += self.connection.data_to_send()
        if len(self._outbox) > OWED_MAX:
            raise Overflow(f"over {OWED_MAX} bytes of answers that the client does not read")
        if self._outbox and not self._answering:
            self._answering = True
            self.task_group.spawn(self._send_answers)

    async def _send_answers(self) -> None:
        try:
            while self._outbox:
                await self._flush()
        finally:
            self._answering = False

    async def _flush(self) -> None:
        data = self._outbox + self.connection.data_to_send()
        self._outbox = b""
        if data:
            await self.send(RawData(data))
