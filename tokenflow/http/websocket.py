"""One WebSocket on the application's side: what Quart-Trio's needs put right, and one place where frames are written.

Whoever has a frame waits for its turn, and a send returns when the kernel has the frame: so frames are never torn, a
client that does not read holds up everything for it and nothing else, and what was sent may be acknowledged.
"""

from __future__ import annotations

from typing import Any

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, WebsocketReceiveEvent
from quart.wrappers import Websocket
from quart_trio.asgi import TrioASGIWebsocketConnection

from tokenflow.http.connection import Ending
from tokenflow.http.transport import direct

SUBPROTOCOL = "tokenflow"
"""Answered where it is offered: a browser that offers any must be answered one."""


class WebsocketConnection(TrioASGIWebsocketConnection):
    """Quart-Trio's, which takes an empty binary message too, sends no signals for every frame, and gives back what it
    held."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        self._ending = Ending()
        try:
            await super().__call__(receive, send)
        finally:
            self._ending.come()

    async def handle_messages(self, nursery: trio.Nursery, receive: ASGIReceiveCallable) -> None:  # type: ignore[override]  # Quart-Trio's signature
        while True:
            event = await receive()
            if event["type"] == "websocket.receive":
                await self.send_channel.send(_content(event))
            elif event["type"] == "websocket.disconnect":
                break
        nursery.cancel_scope.cancel()
        self._ending.come()

    async def send_data(self, send: ASGISendCallable, data: str | bytes) -> None:
        is_text = isinstance(data, str)
        message: Any = {"type": "websocket.send", "text": data if is_text else None, "bytes": None if is_text else data}
        await send(message)


def _content(event: WebsocketReceiveEvent) -> str | bytes:
    data = event.get("bytes")
    return data if data is not None else event["text"] or ""


class Socket:
    """The writing end, for many tasks.

    Args:
        websocket: Quart's.
        heartbeat_s: the longest silence.
        heartbeat: the frame that ends one.
    """

    def __init__(self, websocket: Websocket, heartbeat_s: float, heartbeat: str) -> None:
        self._websocket = websocket
        self._direct = direct(websocket.scope)
        self._heartbeat_s = heartbeat_s
        self._heartbeat = heartbeat
        self._turn = trio.Lock()
        self._written_at = trio.current_time()

    async def send(self, frame: str) -> None:
        """Wait for a turn, then until the kernel has `frame`.

        Raises:
            ClientDisconnected: there is nobody to have it.
        """
        async with self._turn:
            await self._write(frame)

    async def _write(self, frame: str) -> None:
        await self._websocket.send(frame)
        self._written_at = trio.current_time()

    @property
    def ready(self) -> bool:
        """Nobody writes or waits to, and the client keeps up: `send_nowait` may be used."""
        return self._direct is not None and not self._turn.locked() and self._direct.ready

    def send_nowait(self, frames: list[str]) -> bool:
        """Only while `ready`. True: the kernel has them all. False: a part is held, and `flush` waits for it."""
        assert self._direct is not None
        self._written_at = trio.current_time()
        return self._direct.send_nowait(frames)

    async def flush(self) -> None:
        """Wait until the kernel has what was held. Raises as `send` does."""
        assert self._direct is not None
        await self._direct.flush()

    async def beat(self) -> None:
        """Fill silence, until cancelled."""
        while True:
            await trio.sleep_until(self._written_at + self._heartbeat_s)
            async with self._turn:
                if trio.current_time() >= self._written_at + self._heartbeat_s:
                    await self._write(self._heartbeat)

    async def close(self, code: int, reason: str) -> None:
        """Say goodbye, after what is being written."""
        async with self._turn:
            await self._websocket.close(code, reason)
