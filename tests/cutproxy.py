"""A TCP proxy that cuts: between a client and a real server, after exactly so many bytes downstream.

    async with cutting(server.port, [Cut(700), Cut(1200, "rst")]) as proxy:
        …                       # talk to proxy.port
    assert [c.ended for c in proxy.log] == ["fin", "rst", "client"]

The plan is by connection, in the order in which they arrive; connections beyond it are passed through. A cut counts
bytes from the server to the client (heads count too) and passes on exactly that many, whatever pieces they came in;
then it ends both sides, and `log` says what each connection carried and how it ended. Nothing is random and nothing
waits for time. A client that closes its sending side has left.

Ways to be cut:
    fin   an orderly close: the client reads an end
    rst   a reset: the client's read fails, and what it had not read may be lost
    die   nothing more comes, and nothing is closed; the server's side is reset, as when its machine has gone
    half  the downstream side ends, the upstream side goes on to be read: the server sees nothing of it
    keep  nothing more comes, and the server's side stays open and unread: a reader that stalls
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import trio

How = Literal["fin", "rst", "die", "half", "keep"]


@dataclass(frozen=True)
class Cut:
    """After `after` bytes downstream; None is never."""

    after: int | None
    how: How = "fin"


@dataclass
class Connection:
    """What one connection carried."""

    up: bytearray = field(default_factory=bytearray)
    """What the client sent."""
    down: bytearray = field(default_factory=bytearray)
    """What was passed on to it."""
    ended: str | None = None
    """How: one of the cuts, `client` or `server` for who closed first, `refused`; None while it lives."""


@dataclass
class CutProxy:
    """A running proxy."""

    port: int
    target: int
    plan: list[Cut]
    refuse: bool = False
    """Reset every new connection at once, as where nobody listens."""
    log: list[Connection] = field(default_factory=list)

    async def _serve(self, client: trio.SocketStream) -> None:
        connection = Connection()
        self.log.append(connection)
        cut = self.plan.pop(0) if self.plan else Cut(None)
        if self.refuse:
            connection.ended = "refused"
            _reset(client)
            return
        async with client:
            try:
                server = await trio.open_tcp_stream("127.0.0.1", self.target)
            except OSError:
                connection.ended = "refused"
                _reset(client)
                return
            async with server:
                await _carry(connection, client, server, cut)


async def _carry(connection: Connection, client: trio.SocketStream, server: trio.SocketStream, cut: Cut) -> None:
    if cut.after == 0 and cut.how in ("fin", "rst"):  # at once: nothing of what it asks is read
        connection.ended = cut.how
        await _end(client, server, cut.how)
        return
    async with trio.open_nursery() as nursery:

        async def upstream() -> None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async for data in client:
                    connection.up += data
                    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # it may be dead already
                        await server.send_all(data)
            connection.ended = connection.ended or "client"
            nursery.cancel_scope.cancel()

        async def downstream() -> None:
            if await _downstream(connection, client, server, cut):
                await _end(client, server, cut.how)
            else:
                connection.ended = connection.ended or "server"
            if connection.ended in ("fin", "rst", "server"):
                nursery.cancel_scope.cancel()

        nursery.start_soon(upstream)
        nursery.start_soon(downstream)


async def _downstream(connection: Connection, client: trio.SocketStream, server: trio.SocketStream, cut: Cut) -> bool:
    """Pass on until the cut; whether it came to that."""
    try:
        while cut.after is None or len(connection.down) < cut.after:
            data = await server.receive_some(65_536)
            if not data:
                return False
            data = data if cut.after is None else data[: cut.after - len(connection.down)]
            await client.send_all(data)
            connection.down += data
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return False
    connection.ended = cut.how
    return True


async def _end(client: trio.SocketStream, server: trio.SocketStream, how: How) -> None:
    if how == "rst":
        _reset(client)
    elif how == "die":
        _reset(server)
    elif how == "half":
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await client.send_eof()
            while await server.receive_some(65_536):
                pass


def _reset(stream: trio.SocketStream) -> None:
    """Close with a reset (SO_LINGER of zero, socket(7))."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@asynccontextmanager
async def cutting(target: int, plan: Sequence[Cut] = ()) -> AsyncIterator[CutProxy]:
    """A proxy in front of 127.0.0.1:`target`, until the block ends; that ends its connections."""
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy = CutProxy(listener.socket.getsockname()[1], target, list(plan))
        nursery.start_soon(trio.serve_listeners, proxy._serve, [listener])
        yield proxy
        nursery.cancel_scope.cancel()
