"""A reader that stops reading, over server-sent events, with socket buffers of a few kilobytes.

    engine (counts what it made) -> log -> kernel's send buffer -> kernel's receive buffer -> client

The server runs in the test's own process, on the test's own loop, so that what the engine made and what the kernel
accepted can be read between two steps of any task, when neither can be in the midst of changing. The kernel is asked
itself: bytes acknowledged plus bytes not yet acknowledged is what it has accepted of a connection. The client reads the
whole stream in the end, so its bytes say how many whole events every number of accepted bytes was.

* At every moment made - accepted <= window + one step.
* A reader that reads on gets the right text, nothing lost, nothing twice.
* Streams beside stalled ones keep at least 95 % of their rate.
* A reader that takes nothing for `stall_s` is disconnected, and its slot is free.
"""

from __future__ import annotations

import fcntl
import json
import re
import select
import socket
import struct
import termios
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from time import monotonic
from typing import Any, TypeVar

import pytest
import trio
from hypercorn.config import Config as HypercornConfig
from tokenflow_synthetic import SyntheticConfig, SyntheticEngine, generate, open_synthetic

from tests.e2e.leaving import quantile
from tokenflow.api import EnginePlugin, LifecycleEvent, SinkPlugin
from tokenflow.config.model import Config, StreamConfig
from tokenflow.core.lifecycle import Ended
from tokenflow.engines.host import EngineHost
from tokenflow.http.app import create_app
from tokenflow.http.transport import bind, serve
from tokenflow.service.feeds import Feeds
from tokenflow.service.nested import alongside
from tokenflow.service.service import Service

SMALL_BUFFER = 4096
"""So that a client which does not read blocks the server after some 10 kB."""
SIOCOUTQ = termios.TIOCOUTQ
TCP_BYTES_ACKED = struct.Struct("=120xQ")
"""Where `tcpi_bytes_acked` is in Linux's `struct tcp_info`."""


R = TypeVar("R", bound="Reader")


class Listener(socket.socket):
    """Keeps the sockets that it accepted, so that the kernel can be asked about them."""

    accepted: dict[Any, socket.socket]

    def accept(self) -> tuple[socket.socket, Any]:
        sock, peer = super().accept()
        self.accepted[peer] = sock
        return sock, peer


class Reader:
    """A client that reads as much as it is told to, and keeps the bytes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.address = stream.socket.getsockname()
        self.raw = b""
        self.ended = False

    async def ask(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        await self.stream.send_all(head.encode() + data)

    async def read(self, at_least: int) -> None:
        """Read on until there are so many bytes more, or the stream has ended."""
        until = len(self.raw) + at_least
        while len(self.raw) < until and not self.ended:
            piece = await self.stream.receive_some(4096)
            self.raw += piece
            self.ended = not piece

    @property
    def id(self) -> str:
        found = re.search(rb"(?i)x-request-id: (\S+)", self.raw)
        assert found
        return found[1].decode()

    def events(self) -> list[tuple[int, dict[str, Any]]]:
        """The events so far, each with the number of bytes at which it was whole."""
        body, where = self._body()
        events = []
        for frame in re.finditer(rb"data: (\{.*\})\n\n", body):
            events.append((where[frame.end() - 1], json.loads(frame[1])))
        return events

    def _body(self) -> tuple[bytes, list[int]]:
        """The body without its chunks' frames; and for each byte of it, how many bytes of all it was the last of."""
        body, where, at = b"", [], self.raw.index(b"\r\n\r\n") + 4
        while (line := self.raw.find(b"\r\n", at)) >= 0:
            start, size = line + 2, int(self.raw[at:line], 16)
            piece = self.raw[start : start + size]
            body += piece
            where += range(start + 1, start + len(piece) + 1)
            at = start + size + 2
        return body, where

    def texts(self, n: int) -> list[str]:
        """The text of each choice, up to here."""
        texts = [""] * n
        for _, event in self.events():
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts


class Counter(Reader):
    """A reader that counts its tokens and keeps nothing."""

    tokens = 0

    async def count(self) -> None:
        while True:
            self.tokens += (await self.stream.receive_some(65536)).count(b"data: ")


class Rig:
    """An open server."""

    def __init__(self, service: Service, listener: Listener, ended: list[Ended]) -> None:
        self.service = service
        self.listener = listener
        self.ended = ended

    @property
    def engine(self) -> SyntheticEngine:
        engine = self.service.model("").engine
        assert isinstance(engine, SyntheticEngine)
        return engine

    @asynccontextmanager
    async def ask(self, prompt: str, kind: type[R] = Reader, **fields: Any) -> AsyncIterator[R]:
        """Ask for a stream, with small buffers at both ends."""
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        await sock.connect(self.listener.getsockname())
        async with trio.SocketStream(sock) as stream:
            reader = kind(stream)
            await reader.ask({"prompt": prompt, "stream": True, **fields})
            yield reader

    def accepted(self, reader: Reader) -> int:
        """Bytes that the kernel has accepted for `reader`. Exact, for nothing is sent while this runs."""
        sock = self.listener.accepted[reader.address]
        while True:
            queued = self._queued(sock)
            (acked,) = TCP_BYTES_ACKED.unpack_from(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
            if queued == self._queued(sock):  # no acknowledgement came between the two
                return int(queued + acked)

    def is_full(self, reader: Reader) -> bool:
        """The kernel would accept nothing more for `reader`."""
        sock = self.listener.accepted.get(reader.address)
        return sock is not None and not select.select([], [sock], [], 0)[1]

    def _queued(self, sock: socket.socket) -> int:
        (queued,) = struct.unpack("i", fcntl.ioctl(sock, SIOCOUTQ, b"\0" * 4))
        return int(queued)


class Ledger:
    """A sink that keeps the usage records."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []

    async def record(self, event: LifecycleEvent) -> None:
        if isinstance(event, Ended):
            self.ended.append(event)


@asynccontextmanager
async def open_rig(*, window: int = 64, stall_s: float = 30.0, **engine: Any) -> AsyncIterator[Rig]:
    """`async with open_rig(window=…, stall_s=…, tokens_per_s=…, slots=…) as rig:`"""
    plugin = EnginePlugin(name="synthetic", config=SyntheticConfig, open=open_synthetic)
    ledger = Ledger()

    @asynccontextmanager
    async def open_ledger(options: None) -> AsyncIterator[Ledger]:
        yield ledger

    feeds = Feeds({"ledger": (SinkPlugin(name="ledger", config=type(None), open=open_ledger), None)})
    config = Config(stream=StreamConfig(window=window, stall_s=stall_s))
    service = Service(config, {"m": EngineHost("m", plugin, SyntheticConfig(**engine))}, feeds)
    bound = bind("127.0.0.1", 0, stall_s=stall_s, send_buffer=SMALL_BUFFER)
    listener = Listener(fileno=bound.detach())
    listener.accepted = {}
    listener.setblocking(False)
    with listener:
        async with alongside(service.run), trio.open_nursery() as nursery:
            run = partial(serve, create_app(service), HypercornConfig(), listeners=[listener], stall_s=stall_s)
            await nursery.start(run)
            yield Rig(service, listener, ledger.ended)
            nursery.cancel_scope.cancel()


async def until(condition: Callable[[], object]) -> None:
    """Look until it holds: a kernel's buffers and an engine's thread send no signal."""
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.001)


# --- the window -----------------------------------------------------------------------------------------------------


class Watch(trio.abc.Instrument):
    """Notes (tokens made, bytes accepted) around every step of every task: between two, the server can send nothing."""

    def __init__(self, rig: Rig, reader: Reader) -> None:
        self._rig = rig
        self._reader = reader
        self.seen: set[tuple[int, int]] = set()

    def look(self) -> None:
        made = self._rig.engine.stepper.made
        sock = self._rig.listener.accepted.get(self._reader.address)
        if made and sock is not None and sock.fileno() != -1:
            accepted = self._rig.accepted(self._reader)
            self.seen.add((next(reversed(made.values())), accepted))  # made is read last: it can only have grown

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.look()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.look()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("window", [1, 8, 64])
@pytest.mark.parametrize("seed", [1, 2])
async def test_the_engine_is_never_further_ahead_than_the_window(window: int, n: int, seed: int) -> None:
    random = Random(f"{window} {n} {seed}")
    tokens = 300
    async with open_rig(window=window, slots=2) as rig:
        async with rig.ask("ahead", n=n, max_tokens=tokens, seed=seed) as reader:
            watch = Watch(rig, reader)
            trio.lowlevel.add_instrument(watch)
            try:
                while not reader.ended:
                    await reader.read(random.randrange(1, 20_000))
                    await until(lambda: rig.engine.loop.parked == rig.engine.loop.held)
            finally:
                trio.lowlevel.remove_instrument(watch)
        assert reader.texts(n) == [generate("ahead", tokens, seed=seed + i) for i in range(n)]
        ahead = furthest_ahead(watch.seen, reader)
    assert ahead <= max(window, n) + n, "beyond the window and a step"
    assert ahead >= max(1, window // n), "it never stalled, so this has shown nothing"


def furthest_ahead(seen: set[tuple[int, int]], reader: Reader) -> int:
    """The most tokens by which the engine was ahead of what the kernel had accepted."""
    assert max(accepted for _, accepted in seen) <= len(reader.raw) + 1, "a FIN counts as a byte"
    whole_at = [at for at, event in reader.events() if any(choice["text"] for choice in event["choices"])]
    return max(made - bisect_right(whole_at, accepted) for made, accepted in seen)


# --- those beside it ------------------------------------------------------------------------------------------------


NORMAL, STALLED = 8, 4
ENDLESS = {"max_tokens": 10_000_000}
PIECE_S = 0.1
MOST = 7
KEPT = 0.95


@pytest.mark.parametrize(("tokens_per_s", "turns", "pieces"), [(200, 6, 6), (None, 9, 4)], ids=["paced", "unpaced"])
async def test_streams_beside_stalled_ones_keep_their_rate(
    tokens_per_s: float | None, turns: int, pieces: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same streams with and without stalled ones beside them, in turns, in one run.

    The machine drifts by more than what is looked for. So each turn is compared with the one beside it, and the median
    over all pairs counts; where that does not settle it, there are more of them.
    """
    async with (
        open_rig(slots=NORMAL + STALLED, context_length=20_000_000, tokens_per_s=tokens_per_s) as rig,
        AsyncExitStack() as stack,
        trio.open_nursery() as nursery,
    ):
        counters = [await stack.enter_async_context(rig.ask(f"normal {i}", Counter, **ENDLESS)) for i in range(NORMAL)]
        for counter in counters:
            nursery.start_soon(counter.count)
        await until(lambda: all(counter.tokens > 50 for counter in counters))
        ratios: list[float] = []
        for i in range(MOST * turns):
            rates: dict[bool, float] = {}
            for stalled in (False, True) if i % 2 else (True, False):
                async with beside(rig, STALLED if stalled else 0):
                    rates[stalled] = quantile([await measure(counters) for _ in range(pieces)], 0.5) / NORMAL
            ratios.append(rates[True] / rates[False])
            ratio = quantile(ratios, 0.5)
            if (i + 1) % turns == 0 and ratio >= KEPT:
                break
        nursery.cancel_scope.cancel()
    with capsys.disabled():
        figures = {"test": "beside stalled", "tokens_per_s": tokens_per_s, "normal": NORMAL, "stalled": STALLED}
        figures |= {"turns": i + 1, "alone": round(rates[False], 1), "beside": round(rates[True], 1)}
        print("\n" + json.dumps(figures | {"ratio": round(ratio, 3)}))
    assert ratio >= KEPT


@asynccontextmanager
async def beside(rig: Rig, stalled: int) -> AsyncIterator[None]:
    """So many streams whose readers do not read, beside the normal ones."""
    readers: list[Reader] = []
    async with AsyncExitStack() as stack:
        for i in range(stalled):
            readers.append(await stack.enter_async_context(rig.ask(f"stalled {i}", **ENDLESS)))
        await until(lambda: rig.engine.loop.held == NORMAL + stalled and all(map(rig.is_full, readers)))
        yield
        await until(lambda: all(map(rig.is_full, readers)))  # the client's kernel may have taken a little more
    await until(lambda: rig.engine.loop.held == NORMAL)


async def measure(counters: list[Counter]) -> float:
    """Tokens a second, of all streams together, for a short while."""
    before, began = sum(counter.tokens for counter in counters), monotonic()
    await trio.sleep(PIECE_S)
    return (sum(counter.tokens for counter in counters) - before) / (monotonic() - began)


# --- how it ends ----------------------------------------------------------------------------------------------------


async def test_a_reader_that_takes_nothing_is_disconnected() -> None:
    stall_s = 0.5
    async with open_rig(stall_s=stall_s, slots=1) as rig:
        async with rig.ask("stalled", max_tokens=8000) as reader:
            await reader.read(1000)
            await until(lambda: rig.ended)
            [record] = rig.ended
            assert (record.reason, record.by, record.phase) == ("disconnected", "client", "decode")
            assert stall_s <= record.duration_s <= stall_s + 1
            assert record.generated_tokens <= record.delivered_tokens + 64 + 1
            assert rig.engine.loop.held == 0
            with pytest.raises(trio.BrokenResourceError):  # not a FIN: it would look like a whole answer
                await reader.read(1_000_000)
        async with rig.ask("the next", max_tokens=5) as following:
            await following.read(1_000_000)
            assert following.texts(1) == [generate("the next", 5)]
