"""Quart-Trio, as its documentation has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from quart import Response, request, websocket
from quart_trio import QuartTrio

from bench.peers.engine import ROOM, Batch
from bench.peers.words import DONE, ROLE, Stream, event, text


class TrioEngine(Batch):
    """The shared engine, for Trio."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__(tokens_per_s, trio.WouldBlock)
        self._wanted = trio.Event()

    @contextmanager
    def stream(self) -> Iterator[trio.MemoryReceiveChannel[str]]:
        send, receive = trio.open_memory_channel[str](ROOM)
        self._wanted.set()
        with self.joined(send.send_nowait):
            yield receive

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            due = trio.current_time()
            while self.busy:
                due += self.tick_s
                await trio.sleep_until(due if self.tick_s else 0)
                self.tick()
            self._wanted = trio.Event()


def create(tokens_per_s: float) -> QuartTrio:
    app = QuartTrio(__name__)
    engine = TrioEngine(tokens_per_s)

    @app.before_serving
    async def start() -> None:
        app.nursery.start_soon(engine.run)

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        response = Response(answer(await request.get_json()), content_type="text/event-stream")
        response.timeout = None
        return response

    async def answer(asked: Any) -> AsyncIterator[bytes]:
        stream = Stream()
        with engine.stream() as tokens:
            yield event(stream.chunk(ROLE))
            for _ in range(asked["max_tokens"]):
                yield event(stream.token(await tokens.receive()))
        yield event(stream.chunk({}, "length")) + DONE

    @app.websocket("/v1/ws")
    async def ws() -> None:
        asked = await websocket.receive_json()
        stream = Stream()
        with engine.stream() as tokens:
            await websocket.send(text(stream.begun()))
            for n in range(1, asked["max_tokens"] + 1):
                await websocket.send(text(stream.frame(n, await tokens.receive())))

    return app
