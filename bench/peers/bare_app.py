"""A bare ASGI application, without any framework: for uvicorn and granian."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from bench.peers.engine import Engine
from bench.peers.words import DONE, ROLE, Stream, event, text

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


class App:
    def __init__(self, tokens_per_s: float) -> None:
        self._engine = Engine(tokens_per_s)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(receive, send)
        else:
            await self._chat(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        running = asyncio.create_task(self._engine.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        running.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _chat(self, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await send(START)
        answering = asyncio.create_task(self._answer(orjson.loads(body), send))
        leaving = asyncio.create_task(left(receive, "http.disconnect"))
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, leaving):
            task.cancel()

    async def _answer(self, asked: Any, send: Send) -> None:
        stream = Stream()
        with self._engine.stream() as tokens:
            await send(piece(event(stream.chunk(ROLE))))
            for _ in range(asked["max_tokens"]):
                await send(piece(event(stream.token(await tokens.get()))))
        await send(piece(event(stream.chunk({}, "length")) + DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _websocket(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        asked = orjson.loads((await receive())["text"])
        answering = asyncio.create_task(self._frames(asked, send))
        await left(receive, "websocket.disconnect")
        answering.cancel()

    async def _frames(self, asked: Any, send: Send) -> None:
        stream = Stream()
        with self._engine.stream() as tokens:
            await send({"type": "websocket.send", "text": text(stream.begun())})
            for n in range(1, asked["max_tokens"] + 1):
                await send({"type": "websocket.send", "text": text(stream.frame(n, await tokens.get()))})


def piece(body: bytes) -> Any:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def left(receive: Receive, how: str) -> None:
    while (await receive())["type"] != how:
        pass


def create() -> App:
    """For granian, whose worker is a process of its own that imports this."""
    return App(float(os.environ["TOKENS_PER_S"]))
