"""A WebSocket client that hides nothing: frames as JSON, as they come, with the time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Message, Ping, Request, TextMessage

from tests.e2e.wire import PATIENCE_S, checked_error

PING = {"type": "ping"}


@dataclass(frozen=True)
class Said:
    """A generation, from its first frame to its last."""

    frames: list[dict[str, Any]]

    @property
    def text(self) -> str:
        return "".join(frame["delta"].get("content") or "" for frame in self.frames if "delta" in frame)

    @property
    def reason(self) -> str:
        """The finish reason or the error's code, after checking that every record came once, and one end, last."""
        first, *deltas, last = self.frames
        assert first.keys() == {"id", "stream", "n"}
        assert [frame["n"] for frame in self.frames] == list(range(first["n"], first["n"] + len(self.frames)))
        assert all("delta" in frame for frame in deltas)
        if "error" in last:
            return checked_error({"error": last["error"]})["code"]
        assert last["done"] is True
        return last["finish_reason"]

    @property
    def usage(self) -> dict[str, Any]:
        return self.frames[-1]["usage"]


class Talk:
    """One socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._ws = WSConnection(ConnectionType.CLIENT)

    async def open(self, target: str) -> None:
        await self._stream.send_all(self._ws.send(Request(host="localhost", target=target)))
        assert isinstance(await self._event(), AcceptConnection)

    async def send(self, frame: Any = None, **fields: Any) -> None:
        """A frame: text or bytes as they are, or fields as JSON."""
        data = json.dumps(fields) if frame is None else frame
        await self._stream.send_all(self._ws.send(Message(data)))

    async def get(self, *, pings: bool = False) -> Any:
        """The next frame; heartbeats only if they are wanted."""
        with trio.fail_after(PATIENCE_S):
            while (frame := await self._frame()) == PING and not pings:
                pass
        return frame

    async def begun(self) -> dict[str, Any]:
        """The first frame of a generation."""
        frame = await self.get()
        assert frame.keys() == {"id", "stream", "n"}, frame
        return frame

    async def until_end(self, *ids: str) -> dict[str, Said]:
        """What comes of the generations with these ids; no other is under way."""
        frames: dict[str, list[dict[str, Any]]] = {id: [] for id in ids}
        left = set(ids)
        while left:
            frame = await self.get()
            frames[frame["id"]].append(frame)
            if "done" in frame or "error" in frame:
                left.remove(frame["id"])
        return {id: Said(of_id) for id, of_id in frames.items()}

    async def say(self, body: dict[str, Any]) -> Said:
        """Generate, to the end."""
        await self.send(**{"action": "generate", "id": "say"} | body)
        return (await self.until_end("say"))["say"]

    async def refused(self, frame: Any = None, **fields: Any) -> dict[str, Any]:
        """Send a frame that is wrong; the error that answers it. The socket lives."""
        await self.send(frame, **fields)
        answer = await self.get()
        assert answer.keys() == {"id", "error"}, answer
        return checked_error({"error": answer["error"]})

    async def closed_with(self) -> int:
        """The code of the server's close frame, whatever comes before it."""
        with trio.fail_after(PATIENCE_S):
            while not isinstance(event := await self._event(), CloseConnection):
                pass
        return int(event.code)

    def close(self) -> None:
        """Leave, now."""
        self._stream.socket.close()

    async def _frame(self) -> Any:
        text = ""
        while True:
            event = await self._event()
            assert isinstance(event, TextMessage), event
            text += event.data
            if event.message_finished:
                return json.loads(text)

    async def _event(self) -> Any:
        while True:
            for event in self._ws.events():
                if not isinstance(event, Ping):
                    return event
                await self._stream.send_all(self._ws.send(event.response()))
            self._ws.receive_data(await self._stream.receive_some() or None)


@asynccontextmanager
async def talk(port: int, target: str = "/v1/ws") -> AsyncIterator[Talk]:
    """`async with talk(server.port) as socket:`"""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        socket = Talk(stream)
        with trio.fail_after(PATIENCE_S):
            await socket.open(target)
        yield socket


async def say(port: int, body: dict[str, Any]) -> Said:
    """A generation on a socket of its own."""
    async with talk(port) as socket:
        return await socket.say(body)
