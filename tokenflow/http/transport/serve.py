"""The server: binding, the lifespan, the accept loop and the drain.

Three nurseries, from the outside in: the lifespan, which outlives all; the connections; the accept loops, which end
first. Draining runs through them from the inside out, and takes `drain_s` plus at most `MARGIN_S`:

    idle connections close, `drain` is called                           at once
    connections finish what they do; the port stays open                until that and `drain` end, up to drain_s
    accept loops end; connections that came since finish                up to drain_s
    sockets still open are reset, which every application notices       drain_s
    applications that still run are cancelled                           drain_s + half of MARGIN_S
    the lifespan's shutdown                                             up to drain_s + MARGIN_S

The port stays open so that who asks anew is told to go elsewhere, in an answer that ends its connection, and so that
who lost the connection to something that still lives can come back to it.
"""

import math
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from http import HTTPStatus
from itertools import count

import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ASGIFramework, ASGISendEvent, LifespanState
from hypercorn.utils import LifespanFailureError, repr_socket_addr, wrap_app

from .asgi import error_body
from .connection import LINGER_S, Connection
from .limits import Limits, Traffic

MARGIN_S = 1.0
_UNSENT_BYTES = 16 * 1024
_ACCEPT_RETRY_S = 0.1
_ACCEPTS_PER_CHECKPOINT = 16
# So many refused connections are given a moment to read why; more are just closed.
_TURNED_AWAY_MAX = 256


def bind(
    host: str,
    port: int,
    *,
    backlog: int = 2048,
    stall_s: float = 30.0,
    keepalive_s: float = 15.0,
    send_buffer: int | None = None,
) -> socket.socket:
    """Take `host`:`port`, for `serve` to accept on. Clients that connect before it does wait in the backlog.

    Args:
        stall_s: How long the kernel keeps a connection whose peer acknowledges nothing.
        keepalive_s: After such a silence the kernel asks whether the peer is still there.
        send_buffer: SO_SNDBUF of every connection; the kernel's own choice if None.

    Raises:
        OSError: The port is busy, or the host not ours. Listening at once, and without SO_REUSEPORT, makes sure.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address, family=family, backlog=backlog)
    listener.setblocking(False)
    # Accepted sockets inherit all of these.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # A client that does not read keeps so little of its answers in the kernel, and is behind that much sooner.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Ends what a dead peer leaves in the kernel's buffer, also after the socket is closed.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
    # A peer that is cut off from the network says nothing, and where nothing is sent to it nothing is unacknowledged.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(keepalive_s)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    return listener


async def serve(
    app: ASGIFramework,
    config: Config,
    *,
    listeners: Sequence[socket.socket] | None = None,
    shutdown_trigger: Callable[[], Awaitable[object]] = trio.sleep_forever,
    drain: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint,
    drain_s: float = 30.0,
    stall_s: float = 30.0,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    traffic: Traffic | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until `shutdown_trigger` returns, then drain. Starts with the list of the URLs it serves.

    Args:
        listeners: Sockets from `bind`; if None, `config.bind` is bound here.
        drain: Called when draining begins. The port stays open until it returns and all that was being answered when
            it was called has been.
        drain_s: How long that may take. `serve` returns within `MARGIN_S` after that.
        stall_s: A client that takes nothing of what is sent for this long is cut off.
        limits: How much clients may take. Of `config`'s own limits only those count that are not here.
        traffic: Where to count; nowhere if None.

    Raises:
        LifespanFailureError: The application did not start; the message is its own.
        OSError: `listeners` is None and a port is busy.
    """
    if listeners is None:
        listeners = [bind(*_host_port(address)) for address in config.bind]
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")
    state: LifespanState = {}
    lifespan = _Lifespan(wrapped, config, state)
    worker = _Worker(wrapped, _limited(config, limits), state, stall_s, limits, traffic or Traffic())
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            if lifespan.failure is None:
                await worker.run(listeners, shutdown_trigger, drain, drain_s, task_status)
                with trio.move_on_at(worker.drained_by):
                    await lifespan.wait_for_shutdown()
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup:
        if lifespan.failure is not None:
            raise lifespan.failure from None
        raise
    finally:
        for listener in listeners:
            listener.close()


class _Lifespan(Lifespan):
    """Hypercorn's, which tells its nursery of a failed start-up but not the task that waits for it."""

    failure: LifespanFailureError | None = None

    async def asgi_send(self, message: ASGISendEvent) -> None:
        try:
            await super().asgi_send(message)
        except LifespanFailureError as error:
            self.failure = error
            raise


class _Worker:
    """The accept loops, the connections they open, and the drain that ends both."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        state: LifespanState,
        stall_s: float,
        limits: Limits,
        traffic: Traffic,
    ) -> None:
        self._app = app
        self._config = config
        self._state = state
        self._stall_s = stall_s
        self._limits = limits
        self._traffic = traffic
        self._addresses: Counter[str] = Counter()
        self._turned_away = 0
        self._ssl_context = config.create_ssl_context()
        self._context = WorkerContext(None)
        self._live: set[Connection] = set()
        self._ended = trio.lowlevel.ParkingLot()
        self.drained_by = math.inf

    async def run(
        self,
        listeners: Sequence[socket.socket],
        shutdown_trigger: Callable[[], Awaitable[object]],
        drain: Callable[[], Awaitable[object]],
        drain_s: float,
        task_status: trio.TaskStatus[list[str]],
    ) -> None:
        async with trio.open_nursery() as outer:
            outer.start_soon(self._reset_when_cancelled)
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(self._accept, listener, connections)
                    task_status.started([self._url(listener) for listener in listeners])
                    await shutdown_trigger()
                    self.drained_by = trio.current_time() + drain_s + MARGIN_S
                    outer.start_soon(self._cut_off, drain_s, connections)
                    with trio.move_on_after(drain_s):
                        await self._drain(drain)
                    accepting.cancel_scope.cancel()
                for connection in list(self._live):
                    connection.close_unless_busy()
            outer.cancel_scope.cancel()  # all connections have ended: no need to cut any off

    async def _drain(self, drain: Callable[[], Awaitable[object]]) -> None:
        await self._context.terminated.set()
        answering = {connection for connection in self._live if connection.busy}
        for connection in list(self._live):
            connection.drain()
        await drain()
        while answering & self._live:
            await self._ended.park()

    async def _accept(self, listener: socket.socket, connections: trio.Nursery) -> None:
        failing = False
        with listener:
            for accepted in count():
                if accepted % _ACCEPTS_PER_CHECKPOINT == 0:
                    await trio.lowlevel.checkpoint()
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(listener)
                    continue
                except ConnectionAbortedError:
                    continue  # the client gave up first
                except OSError as error:  # out of files or memory, most likely: others' ending will free some
                    if not failing:
                        await self._config.log.error("cannot accept, trying again: %s", error)
                    failing = True
                    await trio.sleep(_ACCEPT_RETRY_S)
                    continue
                failing = False
                sock.setblocking(False)
                if (status := self._refusal(address[0])) is None:
                    connections.start_soon(self._connect, sock, address[0])
                else:
                    connections.start_soon(self._turn_away, sock, status)

    def _refusal(self, address: str) -> int | None:
        per_address = self._limits.max_connections_per_address
        if self._traffic.connections >= self._limits.max_connections:
            reason, status = "connections", 503
        elif per_address is not None and self._addresses[address] >= per_address:
            reason, status = "address", 429
        else:
            self._traffic.connections += 1  # here, not in the task: many may be accepted before one begins
            self._addresses[address] += 1
            return None
        self._traffic.refused[reason] += 1
        return status

    async def _connect(self, sock: socket.socket, address: str) -> None:
        tls: trio.SSLStream[trio.SocketStream] | None = None
        if self._ssl_context is not None:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
            tls = trio.SSLStream(stream, self._ssl_context, server_side=True, https_compatible=True)
        connection = Connection(
            self._app,
            self._config,
            self._context,
            self._state.copy(),
            sock,
            tls,
            stall_s=self._stall_s,
            limits=self._limits,
            traffic=self._traffic,
        )
        self._live.add(connection)
        try:
            await connection.run()
        finally:
            self._live.discard(connection)
            self._ended.unpark_all()
            self._traffic.connections -= 1
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    async def _turn_away(self, sock: socket.socket, status: int) -> None:
        """Say why without reading, and give the client a moment to take it, for as many as can be afforded."""
        with trio.socket.from_stdlib_socket(sock) as client:
            if self._ssl_context is not None or self._turned_away >= _TURNED_AWAY_MAX:
                return
            self._turned_away += 1
            try:
                with trio.move_on_after(LINGER_S), suppress(OSError):
                    await client.send(_FULL[status])
                    client.shutdown(socket.SHUT_WR)
                    while await client.recv(4096):
                        pass
            finally:
                self._turned_away -= 1

    async def _cut_off(self, drain_s: float, connections: trio.Nursery) -> None:
        await trio.sleep(drain_s)
        self._reset_all()
        await trio.sleep(MARGIN_S / 2)
        connections.cancel_scope.cancel()

    async def _reset_when_cancelled(self) -> None:
        """A send to a client that does not read is shielded: only its socket's end ends it."""
        try:
            await trio.sleep_forever()
        finally:
            self._reset_all()

    def _reset_all(self) -> None:
        for connection in list(self._live):
            connection.close(reset=True)

    def _url(self, listener: socket.socket) -> str:
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{repr_socket_addr(listener.family, listener.getsockname())}"


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _limited(config: Config, limits: Limits) -> Config:
    """`config` with what Hypercorn's own protocols are to know of `limits`."""
    config = copy(config)
    config.h11_max_incomplete_size = limits.max_header_bytes
    config.h2_max_concurrent_streams = limits.max_streams
    config.ssl_handshake_timeout = limits.header_timeout_s
    return config


def _full(status: int, message: str) -> bytes:
    body = error_body(status, message)
    reason = HTTPStatus(status).phrase.encode()
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d" % (status, reason, len(body))
    return head + b"\r\nretry-after: 1\r\nconnection: close\r\n\r\n" + body


_FULL = {
    429: _full(429, "There are too many connections from your address; close some, or use them for more."),
    503: _full(503, "The server has as many connections as it may have. Try again later."),
}
