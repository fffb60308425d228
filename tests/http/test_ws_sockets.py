"""`/v1/ws` on real sockets: what the kernel holds, what a close frame says, what a browser offers."""

from __future__ import annotations

import json
import socket as sockets
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import pytest
import trio
from tokenflow_synthetic.engine import open_synthetic
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Message, Ping, Pong, Request, TextMessage

from tests.service.conftest import Rig, open_rig
from tokenflow.config.model import AuthConfig, Config, KeyConfig
from tokenflow.core.lifecycle import Ended
from tokenflow.http.app import create_app
from tokenflow.http.serve import hypercorn_config
from tokenflow.http.transport import bind, serve

PATIENCE_S = 10.0


class Client:
    """One socket. It answers pings unless told not to."""

    def __init__(self, stream: trio.SocketStream, subprotocols: list[str]) -> None:
        self.stream = stream
        self.ws = WSConnection(ConnectionType.CLIENT)
        self._events: Any = iter(())
        self._offered = subprotocols
        self.pongs = True
        self.pings = 0
        self._text = ""

    async def shake_hands(self) -> AcceptConnection:
        request = Request(host="localhost", target="/v1/ws", subprotocols=self._offered)
        await self.stream.send_all(self.ws.send(request))
        event = await self.event()
        assert isinstance(event, AcceptConnection), event
        return event

    async def send(self, **fields: Any) -> None:
        await self.stream.send_all(self.ws.send(Message(json.dumps(fields))))

    async def event(self) -> Any:
        with trio.fail_after(PATIENCE_S):
            while True:
                for event in self._events:
                    if isinstance(event, Ping):
                        self.pings += 1
                        if self.pongs:
                            await self.stream.send_all(self.ws.send(event.response()))
                    elif not isinstance(event, Pong):
                        return event
                self.ws.receive_data(await self.stream.receive_some() or None)
                self._events = self.ws.events()

    async def get(self) -> Any:
        """The next frame as JSON."""
        while True:
            event = await self.event()
            assert isinstance(event, TextMessage), event
            self._text += event.data
            if event.message_finished:
                text, self._text = self._text, ""
                return json.loads(text)

    async def begun(self) -> str:
        while (frame := await self.get()).keys() != {"id", "stream", "n"}:
            pass
        return frame["stream"]

    async def end(self) -> Any:
        """The next frame that ends a generation."""
        while not ("stream" in (frame := await self.get()) and ("done" in frame or "error" in frame)):
            pass
        return frame

    async def closed_with(self) -> int:
        while not isinstance(event := await self.event(), CloseConnection):
            pass
        return event.code

    def reset(self) -> None:
        self.stream.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()


class Server:
    """A rig behind a real port."""

    def __init__(self, r: Rig, address: Any) -> None:
        self.r = r
        self.stop = trio.Event()
        self._address = address
        self._clients: list[Client] = []

    async def connect(self, *subprotocols: str, receive_buffer: int | None = None) -> Client:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, receive_buffer)
        await sock.connect(self._address)
        client = Client(trio.SocketStream(sock), list(subprotocols))
        self._clients.append(client)
        client.accepted = await client.shake_hands()
        return client

    def close(self) -> None:
        for client in self._clients:
            client.stream.socket.close()


@asynccontextmanager
async def serving(*, auth: AuthConfig | None = None, drain_s: float = 5.0, **options: Any) -> AsyncIterator[Server]:
    async with open_rig(server={"drain_s": drain_s}, **options) as r, trio.open_nursery() as nursery:
        config = r.service.config
        if auth is not None:
            config = Config(**{name: getattr(config, name) for name in Config.__slots__} | {"auth": auth})
            r.service.config = config
        listener = bind("127.0.0.1", 0, send_buffer=4096)
        server = Server(r, listener.getsockname())

        async def run(task_status: Any) -> None:
            await serve(
                create_app(r.service),
                hypercorn_config(config),
                listeners=[listener],
                shutdown_trigger=server.stop.wait,
                drain=r.service.drain,
                drain_s=drain_s + 0.25,
                stall_s=config.stream.stall_s,
                task_status=task_status,
            )

        await nursery.start(run)
        try:
            yield server
        finally:
            server.close()
            nursery.cancel_scope.cancel()


async def until(condition: Any) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.005)


async def ended(server: Server, stream: str) -> Any:
    """Its usage record, once it is there."""
    await until(lambda: any(event.id == stream for event in server.r.sink.events if isinstance(event, Ended)))
    return server.r.sink.ended(stream)


def made(server: Server, stream: str) -> int:
    return server.r.engine.stepper.made.get(stream, 0)


async def test_a_hundred_generations_on_one_socket() -> None:
    async with serving(slots=8, tokens_per_s=10_000, limits={"max_waiting": 200}) as server:
        client = await server.connect()
        for i in range(100):
            await client.send(action="generate", id=str(i), prompt=f"prompt {i}", max_tokens=5)
        ends = [await client.end() for _ in range(100)]
        assert {end["id"] for end in ends} == {str(i) for i in range(100)}
        assert {end["finish_reason"] for end in ends} == {"length"}


async def test_a_socket_that_does_not_read_stops_its_generation_and_no_other() -> None:
    async with serving(slots=4, tokens_per_s=10_000, context_length=100_000, stream={"window": 8}) as server:
        stalled, other = await server.connect(receive_buffer=4096), await server.connect()
        await stalled.send(id="x" * 250, prompt="a prompt", max_tokens=50_000, logprobs=20)
        stream = await stalled.begun()
        before = -1
        with trio.fail_after(PATIENCE_S):
            while (now := made(server, stream)) != before:
                before = now
                await trio.sleep(0.3)
        await other.send(prompt="another", max_tokens=100)
        assert (await other.end())["finish_reason"] == "length"
        assert made(server, stream) == before < 400, "it takes no step while nothing is read"
        for _ in range(before):  # what was generated is all there, and reading sets it going again
            await stalled.get()
        await until(lambda: made(server, stream) > before)


async def test_a_thousand_records_for_a_thousand_of_credit_from_an_engine_in_a_thread() -> None:
    fast = {"tokens_per_s": 100_000, "context_length": 8192, "open_engine": open_synthetic}
    async with serving(**fast) as server:
        client = await server.connect()
        await client.send(id="a", prompt="a prompt", max_tokens=5000, credit=100)
        stream = await client.begun()
        for n in range(1, 1001):
            assert (await client.get())["n"] == n
            if n <= 900:
                await client.send(action="credit", id="a", n=1)
        await trio.sleep(0.3)
        assert made(server, stream) == 1000, "and never one more"
        await client.send(action="cancel", id="a")
        assert (await client.end())["usage"]["completion_tokens"] == 1000


@pytest.mark.parametrize("how", ["close frame", "FIN", "RST"])
async def test_however_the_client_leaves_its_slot_is_free(how: str) -> None:
    async with serving(slots=1) as server:
        client = await server.connect()
        await client.send(prompt="a prompt", max_tokens=5000)
        stream = await client.begun()
        await client.get()
        if how == "close frame":
            await client.stream.send_all(client.ws.send(CloseConnection(1000)))
        elif how == "FIN":
            await client.stream.send_eof()
        else:
            client.reset()
        left_at, steps = trio.current_time(), made(server, stream)
        assert (await ended(server, stream)).reason == "disconnected"
        assert trio.current_time() - left_at < 0.5
        assert made(server, stream) <= steps + 20


async def test_a_frame_too_big_is_closed_with_1009() -> None:
    async with serving() as server:
        client = await server.connect()
        await client.send(action="dance", x="x" * 1_000_000)
        assert (await client.get())["error"]["param"] == "action"
        await client.send(action="dance", x="x" * 1_048_576)
        assert await client.closed_with() == 1009


async def test_draining_is_1012() -> None:
    async with serving(drain_s=0.5) as server:
        idle, busy = await server.connect(), await server.connect()
        await busy.send(prompt='{"synthetic": {"hang_at": 3}}', max_tokens=50)
        await busy.begun()
        server.stop.set()
        began = trio.current_time()
        assert await idle.closed_with() == 1012
        assert trio.current_time() - began < 0.4
        assert (await busy.end())["error"]["code"] == "draining"
        assert await busy.closed_with() == 1012


async def test_who_has_lost_its_socket_comes_back_while_the_server_drains() -> None:
    async with serving(drain_s=3, tokens_per_s=20) as server:
        lost = await server.connect()
        await lost.send(prompt="x", max_tokens=50, stream_options={"on_disconnect": "pause"})
        stream = await lost.begun()
        await lost.get()
        server.stop.set()
        await server.r.service.drain_begun.wait()
        lost.reset()
        back, newcomer = await server.connect(), await server.connect()
        await newcomer.send(prompt="x", max_tokens=5)
        assert (await newcomer.get())["error"]["code"] == "draining"
        assert await newcomer.closed_with() == 1012
        await back.send(action="attach", id="b", stream=stream, after=1)
        assert (await back.end())["done"]
        assert await back.closed_with() == 1012


async def test_who_answers_no_ping_is_gone_and_who_does_stays(nursery: trio.Nursery) -> None:
    async with serving(stream={"heartbeat_s": 0.1, "stall_s": 0.3}) as server:
        dead, alive = await server.connect(), await server.connect()
        dead.pongs = False
        heartbeats = []

        @nursery.start_soon
        async def stay() -> None:
            for _ in range(6):
                heartbeats.append(await alive.get())

        await dead.send(prompt='{"synthetic": {"hang_at": 1}}', max_tokens=50)
        stream = await dead.begun()
        assert await dead.closed_with() == 1011
        assert (await ended(server, stream)).reason == "disconnected"
        await until(lambda: len(heartbeats) == 6)
        assert heartbeats == [{"type": "ping"}] * 6 and alive.pings >= 3


KEYS = AuthConfig(keys=(KeyConfig(name="me", sha256=sha256(b"secret/1").hexdigest()),))


async def test_a_key_as_a_browser_can_send_it() -> None:
    async with serving(auth=KEYS) as server:
        client = await server.connect("tokenflow", "openai-insecure-api-key.secret%2F1")
        assert client.accepted.subprotocol == "tokenflow", "the key is never echoed"
        await client.send(prompt="a prompt", max_tokens=2)
        assert (await client.end())["done"]
        client = await server.connect("tokenflow", "openai-insecure-api-key.wrong")
        assert (await client.get())["error"]["code"] == "invalid_api_key"
        assert await client.closed_with() == 1008
