"""SIGTERM, on a real process: who comes is told to go elsewhere, who lives goes on, and then it ends, always in time.

at once             /health/ready is 503, idle connections close, new work is a 503 that ends its connection
for `drain_s`       live streams go on, and whoever loses the connection to one can come back to it
at `drain_s`        what still lives gets an error that says to come back; a WebSocket is closed with 1012
`drain_s` + 2 s     the process has ended, with exit code 0, whatever its clients or its engine do
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from tokenflow_synthetic import generate
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Event, Message, Request, TextMessage

from tests.e2e.conftest import Serve, Server, serving
from tests.e2e.wire import (
    CHAT,
    COMPLETIONS,
    PATIENCE_S,
    Answer,
    Frame,
    Streamed,
    ask,
    chat,
    completion,
    connect,
    directive,
)
from tokenflow.core.sse import Event as ServerSentEvent
from tokenflow.core.sse import Parser

DRAIN_S = 1.5
MARGIN_S = 2.0
MODEL = """
[models.m]
engine = "synthetic"
directives = true
slots = 200
"""
ENDLESS = directive(tokens_per_s=20)
FLOOD = json.dumps(completion("hello", stream=True, max_tokens=8000)).encode()


def draining(drain_s: float) -> str:
    return f"[server]\ndrain_s = {drain_s}\n{MODEL}"


def terminate(server: Server) -> float:
    """SIGTERM; when it was sent."""
    server.process.send_signal(signal.SIGTERM)
    return trio.current_time()


async def noticed(server: Server) -> None:
    with trio.fail_after(PATIENCE_S):
        while "draining" not in server.log:
            await trio.sleep(0.002)  # another process's file sends no signal


async def ended(server: Server, began: float, drain_s: float, *, left_behind: bool = False, exit_code: int = 0) -> None:
    code = await trio.to_thread.run_sync(server.process.wait, drain_s + PATIENCE_S)
    assert (code, trio.current_time() - began < drain_s + MARGIN_S) == (exit_code, True), trio.current_time() - began
    assert "Traceback" not in server.log
    assert ("has not closed in time" in server.log) is left_behind


async def test_everyone_hears_of_it_in_time(serve: Serve) -> None:
    """Clients of every kind, side by side. Each tells when it is under way, and then what must become of it."""
    with serve(draining(DRAIN_S)) as server:
        async with trio.open_nursery() as clients:
            for client in (idle, short, long, whole, socketed, returning, newcomer):
                await clients.start(client, server)
            began = terminate(server)
        assert DRAIN_S < trio.current_time() - began < DRAIN_S + 1
        await ended(server, began, DRAIN_S)


async def idle(server: Server, task_status: trio.TaskStatus[None]) -> None:
    async with connect(server.port) as wire:
        assert (await wire.ask("GET", "/health/ready")).status == 200
        task_status.started()
        await noticed(server)
        assert await wire.closed(within_s=0.5) == b"", "between two requests it is closed at once"


async def short(server: Server, task_status: trio.TaskStatus[None]) -> None:
    async with connect(server.port) as wire:
        head = await wire.open(CHAT, chat(ENDLESS, max_tokens=15))
        task_status.started()
        assert Streamed(head, await wire.frames()).reason == "length"
        assert await wire.closed(within_s=0.5) == b""


async def long(server: Server, task_status: trio.TaskStatus[None]) -> None:
    async with connect(server.port) as wire:
        head = await wire.open(CHAT, chat(ENDLESS))
        task_status.started()
        await noticed(server)
        began = trio.current_time()
        assert Streamed(head, await wire.frames()).reason == "draining"
        assert DRAIN_S - 0.2 < trio.current_time() - began < DRAIN_S + 0.5
        assert await wire.closed(within_s=0.5) == b""


async def whole(server: Server, task_status: trio.TaskStatus[None]) -> None:
    async with connect(server.port) as wire:
        await wire.send("POST", COMPLETIONS, completion(ENDLESS))
        task_status.started()
        answer = Answer(await wire.head(), await wire.body())
    assert (answer.status, answer.error["code"]) == (503, "draining")
    assert (answer.head["retry-after"], answer.head["connection"]) == ("1", "close")


async def socketed(server: Server, task_status: trio.TaskStatus[None]) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        connection = WSConnection(ConnectionType.CLIENT)

        async def event() -> Event:
            with trio.fail_after(PATIENCE_S):
                while (found := next(connection.events(), None)) is None:
                    connection.receive_data(await stream.receive_some() or None)
            return found

        await stream.send_all(connection.send(Request(host="localhost", target="/v1/ws")))
        assert isinstance(await event(), AcceptConnection)
        await stream.send_all(connection.send(Message(json.dumps(completion(ENDLESS)))))
        assert isinstance(await event(), TextMessage)
        task_status.started()
        said = []
        while isinstance(frame := await event(), TextMessage):
            said.append(json.loads(frame.data))
    assert said[-1]["error"]["code"] == "draining"
    assert isinstance(frame, CloseConnection) and frame.code == 1012


async def returning(server: Server, task_status: trio.TaskStatus[None]) -> None:
    """Who loses the connection to a stream comes back to it, on a new connection, and reads it to its end."""
    async with connect(server.port) as wire:
        body = completion(ENDLESS, max_tokens=20, stream_options={"on_disconnect": "pause"})
        await wire.open(COMPLETIONS, body)
        read = _events([await anext(wire) for _ in range(5)])
    task_status.started()
    await noticed(server)
    last = read[-1].id or ""
    async with connect(server.port) as wire:
        sse = {"Accept": "text/event-stream", "Last-Event-ID": last}
        await wire.send("GET", f"/v1/streams/{last.partition(':')[0]}", headers=sse)
        head = await wire.head()
        assert (head.status, head["connection"]) == (200, "close")
        read += _events(await wire.frames())
    chunks = [json.loads(event.data) for event in read if event.data != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == generate(ENDLESS, 20)


def _events(frames: list[Frame]) -> list[ServerSentEvent]:
    return Parser().feed(b"".join(frame.raw + b"\n\n" for frame in frames))


async def newcomer(server: Server, task_status: trio.TaskStatus[None]) -> None:
    """New work is refused, on a connection that was there and has asked for nothing yet, and on a new one."""
    async with connect(server.port) as early:
        task_status.started()
        await noticed(server)
        for probe in ("/health", "/health/ready"):
            ready = await ask(server.port, "GET", probe)
            assert (ready.status, ready.json["reason"]) == (503, "draining")
        async with connect(server.port) as late:
            for wire in early, late:
                refused = await wire.ask("POST", CHAT, chat("hello"))
                assert (refused.status, refused.error["code"]) == (503, "draining")
                assert (refused.head["retry-after"], refused.head["connection"]) == ("1", "close")
                assert await wire.closed(within_s=1.0) == b""
    assert (await ask(server.port, "GET", "/health/live")).status == 200


@contextmanager
def stalled(server: Server, count: int) -> Iterator[None]:
    """So many clients, each with a receive buffer of a few kB and a flood of tokens that it never reads."""
    readers = [socket.socket() for _ in range(count)]
    try:
        for reader in readers:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(FLOOD)
            reader.sendall(head + FLOOD)
        yield
    finally:
        for reader in readers:
            reader.close()


async def all_live(server: Server, count: int) -> None:
    with trio.fail_after(PATIENCE_S):
        while len((await ask(server.port, "GET", "/v1/streams")).json["data"]) < count:
            await trio.sleep(0.05)


async def test_a_hundred_readers_that_stopped_reading_delay_nothing(serve: Serve) -> None:
    with serve(draining(0.5)) as server, stalled(server, 100):
        await all_live(server, 100)
        await ended(server, terminate(server), 0.5)


async def test_a_terminal_that_closes_ends_it_as_gently_and_may_say_so_twice(serve: Serve) -> None:
    with serve(draining(DRAIN_S)) as server:
        async with connect(server.port) as wire:
            head = await wire.open(CHAT, chat(ENDLESS))
            server.process.send_signal(signal.SIGHUP)
            await noticed(server)
            server.process.send_signal(signal.SIGHUP)
            began = trio.current_time()
            assert Streamed(head, await wire.frames()).reason == "draining"
            assert trio.current_time() - began > DRAIN_S / 2
        await ended(server, began, DRAIN_S)


async def test_a_second_signal_ends_at_once(serve: Serve) -> None:
    with serve(draining(30)) as server, stalled(server, 10):
        await all_live(server, 10)
        terminate(server)
        await noticed(server)
        await ended(server, terminate(server), 0)


async def test_who_lives_at_the_second_signal_is_told_too(serve: Serve) -> None:
    answers: list[Answer] = []
    with serve(draining(30).replace("slots = 200", "slots = 2")) as server:
        async with connect(server.port) as wire, trio.open_nursery() as nursery:
            head = await wire.open(CHAT, chat(ENDLESS))

            async def whole_answer() -> None:
                answers.append(await ask(server.port, "POST", COMPLETIONS, completion(ENDLESS)))

            for _ in range(2):  # the second one waits for a slot
                nursery.start_soon(whole_answer)
            await all_live(server, 3)
            terminate(server)
            await noticed(server)
            began = terminate(server)
            assert Streamed(head, await wire.frames()).reason == "draining"
        assert [answer.status for answer in answers] == [503, 503]
        await ended(server, began, 0)
        assert "client left" not in server.log


async def test_an_engine_that_hangs_delays_nothing_and_everyone_is_told(serve: Serve) -> None:
    ledger = '[sinks.ledger]\npath = "ledger.jsonl"\n'
    with serve(draining(0.3).replace("slots = 200", "slots = 1") + ledger) as server:
        async with connect(server.port) as wire, connect(server.port) as waiting:
            head = await wire.open(COMPLETIONS, completion(directive(wedge_at=1)))
            await wire.until(1)
            waiting_head = await waiting.open(COMPLETIONS, completion("hello"))
            began = terminate(server)
            assert Streamed(head, await wire.frames()).reason == "draining"
            assert Streamed(waiting_head, await waiting.frames()).reason == "draining"
            await ended(server, began, 0.3, left_behind=True)
        lines = [json.loads(line) for line in (server.folder / "ledger.jsonl").read_text().splitlines()]
        assert {(line["reason"], line["code"], line["generated_tokens"]) for line in lines} == {
            ("error", "draining", 1),
            ("error", "draining", 0),
        }


FRAGILE = """
from contextlib import asynccontextmanager
from dataclasses import dataclass
import trio
from tokenflow.api import EngineError, EngineInfo, EngineLost, EnginePlugin, engine_from_generator, hookimpl

@dataclass(frozen=True, kw_only=True)
class Fragile:
    slots: int = 4
    load_s: float = 0.0
    falls_after_s: float = 1e9
    close_s: float = 0.0

opened = set()

@asynccontextmanager
async def open_fragile(config):
    if config in opened:
        raise EngineLost("The card fell off the bus.")
    opened.add(config)
    await trio.sleep(config.load_s)
    touched = trio.Event()

    async def fall():
        with trio.move_on_after(config.falls_after_s):
            await touched.wait()
        raise EngineError("An illegal memory access.")

    async def touch(prompt, request):
        yield prompt[0]
        touched.set()
        raise EngineError("An illegal memory access.")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fall)
        try:
            yield engine_from_generator(touch, info=EngineInfo(model="fragile", context_length=4096, slots=4))
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(config.close_s)

@hookimpl
def register_engines():
    return [EnginePlugin(name="fragile", config=Fragile, open=open_fragile)]
"""


def fragile(folder: Path, drain_s: float, lost: str = "", other: str = "") -> str:
    """A configuration with two engines of which each can be opened once."""
    (folder / "fragile.py").write_text(FRAGILE)
    models = f'[models.lost]\nengine = "fragile"\n{lost}\n[models.other]\nengine = "fragile"\nslots = 5\n{other}\n'
    return f'{draining(drain_s)}\n[plugins]\nfiles = ["fragile.py"]\n{models}'


async def test_an_engine_that_is_lost_ends_the_process_as_a_signal_does_and_with_exit_code_1(
    serve: Serve, tmp_path: Path
) -> None:
    with serve(fragile(tmp_path, DRAIN_S)) as server:
        async with connect(server.port) as wire, connect(server.port) as other:
            head = await wire.open(COMPLETIONS, completion(ENDLESS, model="m"))
            broken = await other.open(COMPLETIONS, completion("hello", model="lost"))
            assert Streamed(broken, await other.frames()).reason == "engine_error"
            await noticed(server)
            began = trio.current_time()
            assert Streamed(head, await wire.frames()).reason == "draining"
        await ended(server, began, DRAIN_S, exit_code=1)
        assert "model lost: its engine is lost to this process: The card fell off the bus." in server.log
        assert server.log.splitlines()[-1] == (
            "tokenflow: The engine of model 'lost' cannot be opened again in this process; see its log."
        )


async def test_a_signal_meanwhile_ends_it_at_once_and_it_still_says_that_it_failed(
    serve: Serve, tmp_path: Path
) -> None:
    with serve(fragile(tmp_path, 30, "falls_after_s = 0.2", "close_s = 10.0")) as server:
        await noticed(server)
        await ended(server, terminate(server), 0, exit_code=1, left_behind=True)


def test_an_engine_that_is_lost_while_another_loads_ends_the_process_at_once(tmp_path: Path) -> None:
    config = fragile(tmp_path, 30, "falls_after_s = 0.2", "load_s = 60.0")
    with pytest.raises(AssertionError, match="cannot be opened again in this process"), serving(tmp_path, config):
        pass
    assert "has not closed in time" not in (tmp_path / "log").read_text()
