"""FastAPI, with its own StreamingResponse or with sse-starlette's EventSourceResponse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from sse_starlette import EventSourceResponse

from bench.peers.engine import Engine
from bench.peers.words import DONE, ROLE, Stream, event, text


class Message(BaseModel):
    role: str
    content: str


class Asked(BaseModel):
    model: str
    messages: list[Message]
    stream: bool = False
    max_tokens: int


async def as_bytes(engine: Engine, asked: Asked) -> AsyncIterator[bytes]:
    stream = Stream()
    with engine.stream() as tokens:
        yield event(stream.chunk(ROLE))
        for _ in range(asked.max_tokens):
            yield event(stream.token(await tokens.get()))
    yield event(stream.chunk({}, "length"))
    yield DONE


async def as_events(engine: Engine, asked: Asked) -> AsyncIterator[dict[str, str]]:
    stream = Stream()
    with engine.stream() as tokens:
        yield {"data": text(stream.chunk(ROLE))}
        for _ in range(asked.max_tokens):
            yield {"data": text(stream.token(await tokens.get()))}
    yield {"data": text(stream.chunk({}, "length"))}
    yield {"data": "[DONE]"}


def create(tokens_per_s: float, *, sse_starlette: bool) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(engine.run())
        yield
        running.cancel()

    engine = Engine(tokens_per_s)
    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat(asked: Asked) -> Response:
        if sse_starlette:
            return EventSourceResponse(as_events(engine, asked), sep="\n")
        return StreamingResponse(as_bytes(engine, asked), media_type="text/event-stream")

    @app.websocket("/v1/ws")
    async def ws(websocket: WebSocket) -> None:
        await websocket.accept()
        asked = await websocket.receive_json()
        stream = Stream()
        with engine.stream() as tokens, suppress(WebSocketDisconnect):
            await websocket.send_text(text(stream.begun()))
            for n in range(1, asked["max_tokens"] + 1):
                await websocket.send_text(text(stream.frame(n, await tokens.get())))

    return app
