"""One accepted socket.

The strategy: one reader reads at all times, so that the client's leaving is always seen; everything that is sent goes
through one `Writer`, without waiting where the kernel takes it; and everything that ends a connection is synchronous,
so that no cancellation can come between the decision and the socket.

* `close` closes the socket and wakes whoever waits on it. A blocked sender needs no other signal.
* There is no timer task: the keep-alive timeout, the drain and the linger after a last response are all a deadline
  on the reader's cancel scope.
* A client that shuts down its sending side has left ("a FIN counts"), even if it still reads.
"""

import math
import select
import socket
import struct
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError
from hypercorn.trio.tcp_server import MAX_RECV
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, LifespanState
from hypercorn.utils import parse_socket_addr

from tokenflow.errors import first_error

from .asgi import AppTasks, ClientDisconnected
from .at_once import Direct
from .h2 import CorrectedH2Protocol
from .h11 import CorrectedH11Protocol
from .limits import Limits, Traffic
from .writer import Writer

# After the last response the client has this long to close. Closing first, with bytes of it unread, would send a
# reset, which can destroy the response on its way (RFC 9112 section 9.6).
LINGER_S = 1.0

# The most of a body that the kernel gathers before it wakes the reader. With more it does not see how fast the client
# could send, and keeps its window small: 64 KiB a round trip, and no longer what the network can do.
GATHER_BYTES = 4096

# What the network does, as opposed to what a bug does.
_NETWORK_ERRORS = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class _Received(threading.local):
    """Where the kernel puts what has come, before it is copied: one for all connections of a thread.

    `recv` takes as much memory each time and gives back what was too much, which leaves holes of that size: the heap
    grows for want of a whole one.
    """

    def __init__(self) -> None:
        self.view = memoryview(bytearray(MAX_RECV))


_received = _Received()


class CorrectedProtocolWrapper(ProtocolWrapper):
    """Chooses the protocol as Hypercorn does, of ours. `renew` is called where a connection begins anew, as HTTP/2."""

    protocol: CorrectedH11Protocol | CorrectedH2Protocol

    def __init__(
        self,
        *args: Any,
        stall_s: float,
        limits: Limits,
        traffic: Traffic,
        direct: Direct,
        renew: Callable[[], None],
    ) -> None:
        super().__init__(*args)
        self._ours: dict[str, Any] = {"stall_s": stall_s, "limits": limits, "traffic": traffic}
        self._renew = renew
        if isinstance(self.protocol, H2Protocol):
            self.protocol = self._h2()
        else:
            self.protocol = CorrectedH11Protocol(*self._arguments, **self._ours, direct=direct)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        client, server = self.client, self.server
        return self.app, self.config, self.context, self.task_group, self.state, self.ssl, client, server, self.send

    def _h2(self) -> CorrectedH2Protocol:
        return CorrectedH2Protocol(*self._arguments, **self._ours)

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as error:
            self.protocol = self._h2()
            self._renew()
            await self.protocol.initiate()
            await self.protocol.handle(RawData(error.data))
        except H2CProtocolRequiredError as error:
            self.protocol = self._h2()
            await self.protocol.initiate(error.headers, error.settings)
            if error.data:
                await self.protocol.handle(RawData(error.data))


class Connection:
    """One client's connection. `run` returns when it is closed and every application on it has ended."""

    __slots__ = (
        "_direct",
        "_finished",
        "_fresh",
        "_h11",
        "_idle",
        "_in_head",
        "_limits",
        "_peer",
        "_reading",
        "_sock",
        "_stall_s",
        "_state",
        "_task_group",
        "_tls",
        "_traffic",
        "_wake_at",
        "_writer",
        "app",
        "config",
        "context",
        "protocol",
    )

    protocol: CorrectedProtocolWrapper
    _task_group: AppTasks

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        state: LifespanState,
        sock: socket.socket,
        tls: trio.SSLStream[trio.SocketStream] | None,
        *,
        stall_s: float,
        limits: Limits,
        traffic: Traffic,
    ) -> None:
        self.app = app
        self.config = config
        self.context = context
        self._state = state
        self._sock = sock
        self._tls = tls
        self._writer = Writer(sock, tls, stall_s)
        self._stall_s = stall_s
        self._limits = limits
        self._traffic = traffic
        self._reading = trio.CancelScope()
        self._wake_at = 1  # bytes: the kernel wakes the reader when it has so many, and at the client's end
        self._idle = True
        self._fresh = True
        self._in_head = False
        self._finished = False
        self._peer: tuple[str, int] | None = None
        self._h11: CorrectedH11Protocol | None = None  # also after a change to HTTP/2, and then nothing is sent on it

    async def run(self) -> None:
        # One bad packet must not end the worker: whatever happens here stays here.
        try:
            await self._serve()
        except* _NETWORK_ERRORS:
            pass
        except* Exception as group:
            await self.config.log.error("connection from %s dropped: %s", self._peer, _where(group))
        finally:
            self.close()

    async def _serve(self) -> None:
        alpn_protocol = await self._handshake()
        self._peer = parse_socket_addr(self._sock.family, self._sock.getpeername())
        self._direct = Direct(self._writer, self._reset, self.flush)
        self._task_group = AppTasks(self._watch_hangup, self._direct)
        async with self._task_group:
            self.protocol = CorrectedProtocolWrapper(
                self.app,
                self.config,
                self.context,
                self._task_group,
                ConnectionState(self._state),
                self._tls is not None,
                self._peer,
                parse_socket_addr(self._sock.family, self._sock.getsockname()),
                self.protocol_send,
                alpn_protocol,
                stall_s=self._stall_s,
                limits=self._limits,
                traffic=self._traffic,
                direct=self._direct,
                renew=self._expect_request,
            )
            if isinstance(self.protocol.protocol, CorrectedH11Protocol):
                self._h11 = self.protocol.protocol
            self._expect_request()
            await self.protocol.initiate()
            try:
                with suppress(*_NETWORK_ERRORS):
                    with self._reading:
                        await self._read_data()
                    if self._reading.cancelled_caught:
                        await self._end()
            finally:
                await self._leave()  # also cancelled: who waits in a shield for the client waits for this
        self._h11 = None
        if isinstance(self.protocol.protocol, CorrectedH2Protocol):
            self.protocol.protocol.let_go()
        del self.protocol, self._task_group, self._direct  # each has this in it, and would keep it and be kept

    async def _handshake(self) -> str | None:
        if self._tls is None:
            return "http/1.1"
        with trio.fail_after(self.config.ssl_handshake_timeout):
            await self._tls.do_handshake()
        protocol: str | None = self._tls.selected_alpn_protocol()
        return protocol

    async def _read_data(self) -> None:
        while data := await self._receive():
            if not self._finished:
                await self.protocol.handle(RawData(data))
                self._watch_head()
                self._await_body()

    async def _receive(self) -> bytes:
        """What has come next; nothing at the end. The kernel is asked when it says so: before, it has most often none.

        Raises:
            OSError, trio.BrokenResourceError, trio.ClosedResourceError: the connection is broken, or closed by us.
        """
        if self._tls is not None:
            return bytes(await self._tls.receive_some(MAX_RECV))
        while self._sock.fileno() != -1:
            await trio.lowlevel.wait_readable(self._sock)
            with suppress(BlockingIOError):
                count = self._sock.recv_into(_received.view)
                return bytes(_received.view[:count])
        return b""

    def _watch_head(self) -> None:
        """A head that has begun must come to its end, however slowly the rest comes in."""
        protocol = self.protocol.protocol
        in_head = self._idle and isinstance(protocol, CorrectedH11Protocol) and protocol.in_head
        if in_head and not self._in_head and not self._fresh:
            self._reading.deadline = trio.current_time() + self._limits.header_timeout_s
        self._in_head = in_head

    def _await_body(self) -> None:
        """Have the kernel gather a body that comes in small pieces: thousands that drip would wake this for each."""
        protocol, wanted = self.protocol.protocol, 0
        if not self._finished and self._tls is None and isinstance(protocol, CorrectedH11Protocol):
            wanted = protocol.body_bytes
        self._set_wake_at(max(1, min(wanted, GATHER_BYTES)))

    def _set_wake_at(self, count: int) -> None:
        if count != self._wake_at:
            self._wake_at = count
            with suppress(OSError):  # it is closed
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    async def _end(self) -> None:
        """The end is ours. Over TLS the client is told so: without, it can't tell it from a cut (RFC 8446, 6.1).

        So it is over HTTP/2: what it sends in this moment was not processed, and it may send it again.
        """
        has_lingered = self._finished
        if not has_lingered:
            await self._say_why()
        with trio.move_on_after(LINGER_S):
            if self._tls is not None:
                await self._unwrap(self._tls)
            elif self._finished and not has_lingered:
                await self._read_data()

    async def _say_why(self) -> None:
        protocol = self.protocol.protocol
        if isinstance(protocol, CorrectedH2Protocol):
            await protocol.end()
        elif self._in_head:
            await protocol.refuse(408)

    async def _unwrap(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        """Send a close_notify and the FIN, and read to the client's, whatever else comes."""
        transport = stream.transport_stream
        self._writer.close()
        with suppress(trio.BrokenResourceError, trio.BusyResourceError):
            await stream.unwrap()
        self._sock.shutdown(socket.SHUT_WR)
        while await transport.receive_some(MAX_RECV):
            pass

    async def _leave(self) -> None:
        """The client is gone: wake a blocked sender, tell the applications."""
        self.close()
        await self.protocol.handle(Closed())
        self._task_group.disconnect()

    async def _watch_hangup(self) -> None:
        """Look for a FIN or RST while the reader waits for an application to take the request's body."""
        await _wait_hangup(self._sock)
        await self._leave()

    def close(self, *, reset: bool = False) -> None:
        """Close the socket and wake whoever waits on it. `reset` also discards what the kernel has yet to send."""
        if self._sock.fileno() == -1:
            return
        if reset:
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()
        trio.lowlevel.notify_closing(self._sock)
        self._sock.close()

    @property
    def busy(self) -> bool:
        """A request is being answered, or has come and is not read yet."""
        return not self._idle or _has_bytes(self._sock)

    def drain(self) -> None:
        """The server is stopping: no other request on this connection. Between requests, close it now.

        One that has never asked for anything still may: its client must be told, or it would only see a reset.
        """
        if self._fresh:
            return
        if isinstance(self.protocol.protocol, CorrectedH2Protocol):
            self.protocol.protocol.go_away()
        elif not self.busy:
            self._reading.cancel()

    def close_unless_busy(self) -> None:
        """The server stops accepting: whoever has asked for nothing by now came for nothing."""
        if not self.busy:
            self._reading.cancel()

    # From here on: what the protocol asks for.

    async def protocol_send(self, event: Event) -> None:
        """Carry out what the protocol asks for. For `RawData` the kernel has all of it when this returns."""
        if isinstance(event, RawData):
            if event.data:  # the end of a body whose length was said has no bytes
                await self._write(event.data)
        elif isinstance(event, Closed):
            self._finish()
            await self.protocol.handle(Closed())
        elif isinstance(event, Updated):
            self._set_idle(event.idle)

    def _expect_request(self) -> None:
        """The first one."""
        self._idle = self._fresh = True
        self._reading.deadline = trio.current_time() + self._limits.header_timeout_s

    def _set_idle(self, idle: bool) -> None:
        self._idle = idle
        self._fresh = False
        if self._finished:
            return
        if idle and self.context.terminated.is_set():
            self._finish()
        else:
            timeout_s = self.config.keep_alive_timeout if idle else math.inf
            self._reading.deadline = trio.current_time() + timeout_s
            self._in_head = False
            self._watch_head()  # of the next request's head a part may be there

    def _finish(self) -> None:
        """Everything is said: send a FIN, then wait a little for the client's. Over TLS the reader does both."""
        self._finished = True
        if self._tls:
            self._reading.cancel()
            return
        self._set_wake_at(1)  # what still comes is to be read: see LINGER_S
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._reading.deadline = trio.current_time() + LINGER_S

    async def _write(self, data: bytes) -> None:
        await self._sent(self._writer.write(data))

    async def _sent(self, sending: Awaitable[None]) -> None:
        try:
            await sending
        except _NETWORK_ERRORS as error:
            self.close(reset=True)
            await self._leave()
            raise ClientDisconnected(f"the client left or stopped reading: {error!r}") from error

    def _reset(self) -> None:
        self.close(reset=True)  # which the reader sees, and tells the application

    async def flush(self) -> None:
        """Return when the kernel has everything that was to be sent by now, a response's head too."""
        head = b"" if self._h11 is None else self._h11.take_head()
        await self._sent(self._writer.write(head) if head else self._writer.flush())


def _has_bytes(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


async def _wait_hangup(sock: socket.socket) -> None:
    """Return once the peer has shut down its side, even if bytes before the FIN are still unread."""
    if not hasattr(select, "EPOLLRDHUP"):
        await trio.sleep_forever()  # not Linux: seen when the application reads on
    if sock.fileno() == -1:
        return
    with select.epoll() as epoll:
        epoll.register(sock, select.EPOLLRDHUP)
        await trio.lowlevel.wait_readable(epoll.fileno())


def _where(error: BaseException) -> str:
    """Name the first exception and its line, but nothing of what the client sent: it may hold a key."""
    error = first_error(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}"
