"""Real sockets on loopback: `serving` starts a server in the test's nursery, `connect` gives a client of it.

`TRANSPORT=stock pytest tests/http/transport` runs the same tests against Hypercorn's own worker: those that say in
their docstring what stock does must then fail (under `timeout`, for some hang for ever, which is what they are about).
"""

import logging
import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import h11
import pytest
import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app

from tokenflow.http.transport import bind, serve

STOCK = os.environ.get("TRANSPORT") == "stock"

# Small enough that a client which does not read blocks the server after some 10 KiB.
SMALL_BUFFER = 4096

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class Client:
    """One connection: raw bytes out, h11 events in, and three ways to leave."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.h11 = h11.Connection(h11.CLIENT)
        self.send = stream.send_all

    async def get(self, path: str = "/", headers: str = "") -> None:
        await self.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())

    async def response(self) -> tuple[h11.Response, bytes]:
        """Read one whole response. Fails if the connection ends within it."""
        if self.h11.our_state is h11.DONE:
            self.h11.start_next_cycle()
        if self.h11.our_state is h11.IDLE:  # h11 insists on a request; what was really sent does not matter
            self.h11.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
            self.h11.send(h11.EndOfMessage())
        head, body = None, b""
        with trio.fail_after(5):
            while True:
                event = self.h11.next_event()
                if event is h11.NEED_DATA:
                    self.h11.receive_data(await self.stream.receive_some())
                elif isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    assert head is not None
                    return head, body
                else:
                    assert isinstance(event, h11.InformationalResponse), event

    async def wait_closed(self, seconds: float = 2) -> bytes:
        """Wait for the server's FIN or RST; returns what came before it."""
        received = b""
        with trio.fail_after(seconds):
            try:
                while data := await self.stream.receive_some():
                    received += data
            except trio.BrokenResourceError:
                pass
        return received

    async def leave(self, how: str) -> None:
        sock = self.stream.socket
        if how == "half-close":
            sock.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.stream.aclose()


@pytest.fixture
def config(caplog: pytest.LogCaptureFixture) -> Config:
    config = Config()
    config.errorlog = logging.getLogger("transport-under-test")
    return config


@pytest.fixture
def app_of() -> Callable[[App], App]:
    """Make a whole ASGI application of what handles one request, by adding a lifespan."""

    def app_of(handler: App) -> App:
        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] != "lifespan":
                await handler(scope, receive, send)
                return
            for stage in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{stage}"
                await send({"type": f"lifespan.{stage}.complete"})

        return app

    return app_of


@pytest.fixture
def ends_on_disconnect() -> Callable[[App], App]:
    """Wrap a handler as Quart-Trio does: `http.disconnect` cancels it, also the one that ends every response."""

    def wrap(handler: App) -> App:
        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            passed_on, receive_passed_on = trio.open_memory_channel[Any](math.inf)
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def listen() -> None:
                    while (message := await receive())["type"] != "http.disconnect":
                        passed_on.send_nowait(message)
                    nursery.cancel_scope.cancel()

                await handler(scope, receive_passed_on.receive, send)
                nursery.cancel_scope.cancel()

        return app

    return wrap


@pytest.fixture
async def serving(nursery: trio.Nursery, config: Config, app_of: Any) -> Any:
    """`await serving(handler, **options of serve)` starts a server and returns its address."""

    async def start(handler: App, *, listener: socket.socket | None = None, **options: Any) -> Any:
        listener = listener or bind("127.0.0.1", 0, send_buffer=options.pop("send_buffer", None))
        address = listener.getsockname()
        if STOCK:
            config.graceful_timeout = options.pop("drain_s", 3)
            for ours in "stall_s", "drain", "limits", "traffic":
                options.pop(ours, None)
            run = partial(worker_serve, wrap_app(app_of(handler), 2**16, "asgi"), config, **options)
            run = partial(run, sockets=Sockets([], [listener], []))
        else:
            run = partial(serve, app_of(handler), config, listeners=[listener], **options)

        async def run_and_tell(*, task_status: Any) -> None:
            await run(task_status=task_status)
            start.returned.set()

        await nursery.start(run_and_tell)
        return address

    start.returned = trio.Event()
    return start


@pytest.fixture
async def connect() -> Any:
    """`await connect(address)` opens a connection, closed at the test's end."""
    clients: list[Client] = []

    async def connect(address: Any, *, receive_buffer: int | None = None) -> Client:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client = Client(trio.SocketStream(sock))
        clients.append(client)
        await sock.connect(address)
        return client

    yield connect
    for client in clients:
        client.stream.socket.close()


@pytest.fixture
async def connect_small(serving: Any, connect: Any) -> Any:
    """A server of a handler and a client with buffers so small that not reading soon blocks."""

    async def connect_small(handler: App, **options: Any) -> Client:
        address = await serving(handler, send_buffer=SMALL_BUFFER, **options)
        return await connect(address, receive_buffer=SMALL_BUFFER)

    return connect_small
