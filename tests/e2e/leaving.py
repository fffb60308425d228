"""A client that leaves, and three places to see what that did: the witness in the engine, the ledger, the next request.

The witness's times and the client's own are of one clock (see `watched`), so "after leaving" means after the very
moment before the system call by which the client left, not after the moment at which the server noticed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple

import h11
import trio

from tests.e2e.conftest import Server, serving

WAYS = ("fin", "rst", "half-close")
ROLES = ("victim", "hog", "probe", "page")


PATIENCE_S = 60.0
"""Longer than anything here takes on a busy machine."""


class Left(NamedTuple):
    """The last moment at which the client was still there, on both clocks."""

    monotonic: float
    wall: float


class Client:
    """One connection, and the ways to leave it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._h11 = h11.Connection(h11.CLIENT)

    async def send(
        self, role: str, method: str, target: str, body: dict[str, Any] | None = None, **headers: str
    ) -> None:
        """Send a request, as `role`; `_` in a header's name is `-`."""
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        data = b"" if body is None else json.dumps(body).encode()
        fields = [("Host", "localhost"), ("Authorization", f"Bearer {role}"), ("Content-Length", str(len(data)))]
        fields += [(name.replace("_", "-"), value) for name, value in headers.items()]
        request = h11.Request(method=method, target=target, headers=fields)
        pieces = [self._h11.send(request), self._h11.send(h11.Data(data)), self._h11.send(h11.EndOfMessage())]
        await self.stream.send_all(b"".join(piece or b"" for piece in pieces))

    async def complete(self, role: str, body: dict[str, Any]) -> None:
        """Send a request for a completion."""
        await self.send(role, "POST", "/v1/completions", body)

    async def answer(self) -> Any:
        """A whole answer, which is JSON."""
        await self.head()
        body = b""
        while (piece := await self.piece()) is not None:
            body += piece
        return json.loads(body)

    async def head(self) -> None:
        """Wait for the answer's head."""
        event = await self._next()
        assert isinstance(event, h11.Response) and event.status_code == 200, event

    async def piece(self) -> bytes | None:
        """The next piece of the body as it comes; None at its end."""
        event = await self._next()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def read(self, tokens: int) -> None:
        """Read a stream up to at least so many tokens, each an event of its own."""
        while tokens > 0:
            piece = await self.piece()
            assert piece is not None
            tokens -= piece.count(b"data: ")

    def leave(self, how: str) -> Left:
        """Leave now. Nothing in here waits, so nothing comes between reading the clock and leaving."""
        sock = self.stream.socket
        with suppress(BlockingIOError):
            while os.read(sock.fileno(), 65536):  # with bytes unread, close() would send a reset instead of a FIN
                pass
        if how == "rst":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left = Left(monotonic(), time())
        if how == "half-close":
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.close()
        return left

    async def _next(self) -> Any:
        with trio.fail_after(PATIENCE_S):
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                self._h11.receive_data(await self.stream.receive_some())
        return event


class Ledger:
    """The server's ledger, as it grows. Each role asks with a key of its own, so its records are told apart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._records: list[dict[str, Any]] = []
        self._by_role: dict[str, list[dict[str, Any]]] = {role: [] for role in ROLES}
        self._taken = dict.fromkeys(ROLES, 0)

    def records(self) -> list[dict[str, Any]]:
        """All of them so far."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")
        self._read += len(whole[0]) + len(whole[1])
        for line in whole[0].splitlines():
            record = json.loads(line)
            self._records.append(record)
            self._by_role[record["key"]].append(record)
        return self._records

    async def has_all(self, generated_tokens: int) -> None:
        """Wait until the records account for so many tokens: the file is written behind."""
        with trio.fail_after(PATIENCE_S):
            while sum(record["generated_tokens"] for record in self.records()) != generated_tokens:
                await trio.sleep(0.01)

    async def next(self, role: str) -> dict[str, Any]:
        """The record of the next stream that `role` asked for."""
        at = self._taken[role]
        self._taken[role] += 1
        with trio.fail_after(PATIENCE_S):
            while len(self._by_role[role]) <= at:
                await trio.sleep(0.002)  # another process's file sends no signal
                self.records()
        return self._by_role[role][at]


class Watched:
    """A server with a witness in its engine."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.ledger = Ledger(server.folder / "ledger.jsonl")

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        stream = await trio.open_tcp_stream("127.0.0.1", self.server.port)
        async with stream:
            yield Client(stream)

    async def page(self, until: Callable[[dict[str, Any]], bool] = lambda page: True) -> dict[str, Any]:
        """What the witness saw; asked again and again until it is as wanted."""
        with trio.fail_after(PATIENCE_S):
            while True:
                async with self.connect() as client:  # each on its own: servers end a connection that asks for ever
                    await client.send("page", "GET", "/metrics")
                    if until(page := await client.answer()):
                        return page


@contextmanager
def serving_watched(folder: Path, engine: str, options: str, more: str = "") -> Iterator[Watched]:
    """A server with that engine under a witness, a ledger, and a key for each role."""
    keys = "".join(
        f'[[auth.keys]]\nname = "{role}"\nsha256 = "{sha256(role.encode()).hexdigest()}"\n' for role in ROLES
    )
    plugin = Path(__file__).with_name("watched.py")
    config = f"""
{more}
{keys}
[plugins]
files = ["{plugin}"]
[models.m]
engine = "watched-{engine}"
{options}
[sinks.watched]
[sinks.ledger]
path = "ledger.jsonl"
"""
    with serving(folder, config) as server:
        yield Watched(server)


def record_time(record: dict[str, Any]) -> float:
    """When a ledger record was written, as Unix time."""
    return datetime.fromisoformat(record["at"]).timestamp()


def quantile(values: Sequence[float], q: float) -> float:
    """By nearest rank: the least value that a share `q` of all does not exceed."""
    return sorted(values)[math.ceil(q * len(values)) - 1]


def in_ms(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the greatest, in milliseconds."""
    return {
        "p50": round(quantile(values, 0.5) * 1000, 1),
        "p99": round(quantile(values, 0.99) * 1000, 1),
        "max": round(max(values) * 1000, 1),
    }
