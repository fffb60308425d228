"""A client that hides nothing: one connection, the answer's head as sent, each piece of the body with its time.

Client libraries reconnect, decode and buffer; what these tests are about would be lost in them. h11 reads the framing,
so an answer that is not HTTP/1.1 fails by itself. Every wait is bounded by `PATIENCE_S`.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import trio

PATIENCE_S = 10.0
"""Longer than anything here takes on a busy machine."""
PING = b": ping"
DONE = b"data: [DONE]"
COUNTS = {
    "context_length_exceeded": {"limit", "prompt", "requested"},
    "resume_window_lost": {"oldest", "last", "state"},
}
"""What some errors say beside the four."""


@dataclass(frozen=True)
class Head:
    """Status and headers, names in small letters."""

    status: int
    headers: list[tuple[str, str]]
    at: float

    def __getitem__(self, name: str) -> str | None:
        """The one header with that name; None without."""
        values = [value for found, value in self.headers if found == name]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    head: Head
    body: bytes

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, in the one envelope and nothing beside it."""
        assert self.head["content-type"] == "application/json"
        return checked_error(self.json)

    @property
    def text(self) -> str:
        """The text of the only choice."""
        [choice] = self.json["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]


@dataclass(frozen=True)
class Frame:
    """What stood before a blank line, and when it was whole."""

    raw: bytes
    at: float

    @property
    def is_ping(self) -> bool:
        return self.raw == PING

    @property
    def is_done(self) -> bool:
        return self.raw == DONE

    @property
    def json(self) -> Any:
        """The data. Without ids and event names a frame is exactly one `data:` line."""
        assert re.fullmatch(rb"data: [^\r\n]+", self.raw), self.raw
        assert len(self.raw) <= 64 * 1024
        return json.loads(self.raw[6:].decode("utf-8", "strict"))

    @property
    def text(self) -> str:
        """The text that it adds, of whatever choice; empty for frames that add none."""
        if self.is_ping or self.is_done:
            return ""
        choices = self.json.get("choices") or [{}]
        return choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""


@dataclass(frozen=True)
class Streamed:
    """A whole stream."""

    head: Head
    frames: list[Frame]

    @property
    def pings(self) -> list[Frame]:
        return [frame for frame in self.frames if frame.is_ping]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [frame.json for frame in self.frames if not frame.is_ping and not frame.is_done]

    @property
    def text(self) -> str:
        return "".join(frame.text for frame in self.frames)

    @property
    def reason(self) -> str:
        """The finish reason of the only choice, or the error's code, after checking that it ends exactly once."""
        *events, done = [frame for frame in self.frames if not frame.is_ping]
        assert done.is_done and not any(frame.is_done for frame in events)
        last = events[-1].json
        if "error" in last:
            assert not [reason for event in events[:-1] for reason in _reasons(event.json)]
            return checked_error(last)["code"]
        [reason] = [reason for event in events for reason in _reasons(event.json)]
        return reason

    @property
    def usage(self) -> dict[str, Any] | None:
        return self.chunks[-1].get("usage")


def _reasons(chunk: dict[str, Any]) -> list[str]:
    return [choice["finish_reason"] for choice in chunk["choices"] if choice["finish_reason"] is not None]


def checked_error(body: Any) -> dict[str, Any]:
    """The error in `body`, which must be the envelope."""
    assert list(body) == ["error"], body
    error = body["error"]
    counts = COUNTS.get(error.get("code"), set())
    assert set(error) == {"message", "type", "param", "code"} | counts, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    return error


class Wire:
    """One connection to the server, for one request after the other."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._h11 = h11.Connection(h11.CLIENT)
        self._rest = b""

    async def send(self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """Send a request; `body` is bytes, or something to send as JSON."""
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"Host": "localhost"} | ({"Content-Length": str(len(data))} if body is not None else {})
        encoded = [(name, value.encode("latin-1")) for name, value in (fields | (headers or {})).items()]
        request = h11.Request(method=method, target=target, headers=encoded)
        pieces = [self._h11.send(request), self._h11.send(h11.Data(data)), self._h11.send(h11.EndOfMessage())]
        await self.stream.send_all(b"".join(piece or b"" for piece in pieces))

    async def head(self) -> Head:
        """Wait for the answer's head."""
        with trio.fail_after(PATIENCE_S):
            event = await self._next()
        assert isinstance(event, h11.Response), event
        fields = [(name.decode(), value.decode()) for name, value in event.headers]
        return Head(event.status_code, fields, trio.current_time())

    async def piece(self) -> bytes | None:
        """The next piece of the body as it comes; None at its end."""
        with trio.fail_after(PATIENCE_S):
            event = await self._next()
        if isinstance(event, h11.EndOfMessage):
            return None
        assert isinstance(event, h11.Data), event
        return bytes(event.data)

    async def body(self) -> bytes:
        """All that is still to come of the body."""
        pieces = []
        while (piece := await self.piece()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    # `async for frame in wire`: the body as events. Not a generator, so that a test may stop anywhere.

    def __aiter__(self) -> Wire:
        return self

    async def __anext__(self) -> Frame:
        while (end := self._rest.find(b"\n\n")) < 0:
            piece = await self.piece()
            if piece is None:
                assert not self._rest, f"the stream ended within a frame: {self._rest!r}"
                raise StopAsyncIteration
            self._rest += piece
        frame, self._rest = Frame(self._rest[:end], trio.current_time()), self._rest[end + 2 :]
        return frame

    async def frames(self) -> list[Frame]:
        """All that are still to come."""
        return [frame async for frame in self]

    async def ask(self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """A request and its whole answer."""
        await self.send(method, target, body, headers)
        head = await self.head()
        return Answer(head, await self.body())

    async def open(self, target: str, body: Any) -> Head:
        """POST something that is to stream, and wait for the head."""
        await self.send("POST", target, body | {"stream": True})
        head = await self.head()
        assert head.status == 200
        return head

    async def until(self, tokens: int) -> list[Frame]:
        """Frames up to the one with so many deltas that have text."""
        seen: list[Frame] = []
        async for frame in self:
            seen.append(frame)
            if sum(bool(f.text) for f in seen) >= tokens:
                break
        return seen

    async def closed(self, within_s: float = PATIENCE_S) -> bytes:
        """Wait for the server's FIN; what came before it."""
        received = b""
        with trio.fail_after(within_s):
            while data := await self.stream.receive_some():
                received += data
        return received

    def close(self) -> None:
        """Leave, now."""
        self.stream.socket.close()

    async def _next(self) -> Any:
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                self._h11.receive_data(await self.stream.receive_some())
            elif not isinstance(event, h11.InformationalResponse):
                return event


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Wire]:
    """`async with connect(server.port) as wire:`"""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        yield Wire(stream)


async def ask(port: int, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    """A request on a connection of its own."""
    async with connect(port) as wire:
        return await wire.ask(method, target, body, headers)


async def post(port: int, target: str, body: Any) -> Answer:
    return await ask(port, "POST", target, body)


async def stream(port: int, target: str, body: Any) -> Streamed:
    """A stream, read to its end on a connection of its own."""
    async with connect(port) as wire:
        head = await wire.open(target, body)
        return Streamed(head, await wire.frames())


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} | fields


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt} | fields


BODIES = {CHAT: chat, COMPLETIONS: completion}
"""A body for each route that generates, from a prompt and other fields."""


def directive(**keys: Any) -> str:
    """What to put into a prompt for the synthetic engine to behave so."""
    return json.dumps({"synthetic": keys})


async def eventually(found: Callable[[], Any], within_s: float = 5.0) -> Any:
    """Look until `found` gives something: another process's files send no signal."""
    with trio.fail_after(within_s):
        while not (value := found()):
            await trio.sleep(0.002)
        return value


class Journal:
    """The server's log: the one line that it writes at the end of each stream."""

    _LINE = re.compile(
        r"(?P<id>\S+) (?P<route>/\S+) (?P<model>\S+) (?P<key>\S+): (?P<how>.+) in (?P<phase>\w+) by (?P<by>\w+); "
        r"(?P<prompt>\d+)\+(?P<generated>\d+) tokens, (?P<delivered>\d+) delivered, (?P<seconds>[\d.]+) s"
    )

    def __init__(self, folder: Path) -> None:
        self._file = folder / "log"

    async def ended(self, id: str) -> dict[str, str]:
        """How the stream ended; waits for the line."""
        return await eventually(lambda: self._find(id, "id"))

    async def ended_with(self, route: str, prompt: int) -> dict[str, str]:
        """The last stream on `route` with a prompt of so many tokens, for those whose id no client saw."""
        return await eventually(lambda: self._find(route, "route", prompt))

    def _find(self, value: str, group: str, prompt: int | None = None) -> dict[str, str] | None:
        for line in reversed(self._file.read_text().splitlines()):
            found = self._LINE.search(line)
            if found and found[group] == value and prompt in (None, int(found["prompt"])):
                return found.groupdict()
        return None


async def metric(port: int, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels, from `GET /metrics`."""
    page = await ask(port, "GET", "/metrics")
    assert page.status == 200
    values = []
    for line in page.body.decode().splitlines():
        found = re.fullmatch(rf"{name}(?:\{{(?P<labels>.*)\}})? (?P<value>\S+)", line)
        if found and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', found["labels"] or "")).items():
            values.append(float(found["value"]))
    assert values, f"{name} {labels} is not on the page"
    return sum(values)


async def until_metric(port: int, value: float, name: str, within_s: float = 5.0, **labels: str) -> None:
    """Wait until a metric has a value."""
    with trio.fail_after(within_s):
        while await metric(port, name, **labels) != value:
            await trio.sleep(0.002)
