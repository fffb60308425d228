"""Hostile clients against the whole application on real sockets: it serves on, leaks nothing, and logs no traceback."""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from time import perf_counter
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.http.hostile import BY_HAND, GOOD, Packet, mutants
from tests.service.conftest import open_rig
from tokenflow.http.app import create_app
from tokenflow.http.serve import hypercorn_config
from tokenflow.http.transport import Limits, bind, serve

CLIENTS = 8
"""Hostile ones at once."""
LEAVES = ("close", "half-close", "reset")


@asynccontextmanager
async def serving() -> AsyncIterator[Any]:
    """The application with the synthetic engine; its address."""
    at_once = {"grace_s": 0.05, "retention_s": 0.05}  # for what comes back, or does not
    async with open_rig(slots=8, limits={"max_waiting": 1000}, replay=at_once) as rig, trio.open_nursery() as nursery:
        listener = bind("127.0.0.1", 0)
        limits = Limits(header_timeout_s=0.5)

        async def run(task_status: Any) -> None:
            app, config = create_app(rig.service), hypercorn_config(rig.service.config)
            await serve(app, config, listeners=[listener], limits=limits, task_status=task_status)

        await nursery.start(run)
        yield listener.getsockname()
        with trio.fail_after(10):
            await rig.settle()
        nursery.cancel_scope.cancel()


async def attack(address: Any, packet: Packet, random: Random) -> None:
    """Send the packet, perhaps in pieces, perhaps look at the answer, and go in one of the ways to go."""
    with suppress(OSError, trio.BrokenResourceError):
        async with await trio.open_tcp_stream(*address) as stream:
            for piece in packet:
                await _send(stream, piece, random)
                await _look(stream, random)
            how = random.choice(LEAVES)
            if how == "half-close":
                await stream.send_eof()
                await _look(stream, random)
            elif how == "reset":
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _send(stream: trio.SocketStream, data: bytes, random: Random) -> None:
    if len(data) > 1 and random.random() < 0.2:
        at = random.randrange(1, len(data))
        await stream.send_all(data[:at])
        data = data[at:]
    await stream.send_all(data)


async def _look(stream: trio.SocketStream, random: Random) -> None:
    if random.random() < 0.7:
        with trio.move_on_after(0.01):
            await stream.receive_some()


async def well(address: Any) -> None:
    async with await trio.open_tcp_stream(*address) as stream:
        await stream.send_all(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with trio.fail_after(5):
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")


async def settled(tasks: int) -> None:
    with trio.fail_after(10):
        while trio.lowlevel.current_statistics().tasks_living > tasks:
            await trio.sleep(0.01)


@pytest.fixture
def clean(caplog: pytest.LogCaptureFixture) -> Any:
    """Nothing that was logged is a traceback, or the end of a connection by a fault of ours."""
    caplog.set_level(logging.WARNING)
    yield
    assert not faults(caplog)


def faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


async def test_by_hand(hostile_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    address, tasks = hostile_server
    for name, packet in BY_HAND.items():
        for seed in range(3):
            await attack(address, packet, Random(f"{name} {seed}"))
        await well(address)
        assert not faults(caplog), name
    await settled(tasks)


@pytest.fixture
async def hostile_server() -> AsyncIterator[Any]:
    async with serving() as address:
        await well(address)
        await wait_all_tasks_blocked(0.02)
        yield address, trio.lowlevel.current_statistics().tasks_living


PROTOCOLS = pytest.mark.parametrize("protocol", GOOD)


@PROTOCOLS
async def test_some_mutants(protocol: str, hostile_server: Any, clean: None) -> None:
    await fuzz(hostile_server, protocol, "some", 60)


@pytest.mark.stress
@PROTOCOLS
async def test_100_000_mutants(
    protocol: str,
    hostile_server: Any,
    clean: None,
    share: Callable[[int], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    packets, began = share(100_000), perf_counter()
    await fuzz(hostile_server, protocol, "many", packets)
    figures = {"test": "fuzz", "protocol": protocol, "packets": packets, "seed": f"{protocol} many"}
    with capsys.disabled():
        print("\n" + json.dumps(figures | {"seconds": round(perf_counter() - began, 1)}))


async def fuzz(server: Any, protocol: str, seed: str, packets: int) -> None:
    address, tasks = server
    random = Random(f"{protocol} {seed}")
    left, source = iter(range(packets)), mutants(protocol, random)

    async def client(number: int) -> None:
        own = Random(f"{protocol} {seed} {number}")
        for _ in left:
            await attack(address, next(source), own)

    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            nursery.start_soon(client, number)
    await settled(tasks)
    await well(address)
