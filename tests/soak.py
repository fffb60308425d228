"""Does it stay as it is? Half an hour of every kind of client on a real server, and how its memory grows meanwhile.

    make soak                      thirty minutes
    make soak ARGS=--minutes=16    as many as you have, above those that warming up takes

Clients read to the end or leave in every way, over HTTP/1.1, HTTP/2 and WebSocket, come back to streams, ask wrongly,
and send hostile packets, some two or three hundred a second. The server's resident memory is read every second; the
slope is a line through the second half of the readings, and only those after `WARM_CLIENTS`. Until then the allocator's
pools fill, in ever smaller steps, to the most that was ever needed at once. That is no leak: after a quarter of an hour
memory stands still. Prints JSON, every minute's memory too; fails above `SLOPE_MIB_PER_H`.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import linear_regression
from typing import NamedTuple

import click
import trio

from tests.e2e.conftest import Server, serving
from tests.e2e.wire import COMPLETIONS, ask, completion, connect, directive, metric
from tests.http import hostile

SLOPE_MIB_PER_H = 1.0
WARM_CLIENTS = 100_000
WARM_READINGS = 60
CLIENTS = 6
CONFIG = """
[replay]
retention_s = 5
grace_s = 2
[models.m]
engine = "synthetic"
directives = true
slots = 8
[sinks.prometheus]
"""
PACED = directive(tokens_per_s=2000)


async def reads(server: Server, random: Random) -> None:
    async with connect(server.port) as wire:
        await wire.open(COMPLETIONS, completion(PACED, max_tokens=random.randrange(1, 60)))
        await wire.body()


async def asks_for_the_whole(server: Server, random: Random) -> None:
    await ask(server.port, "POST", COMPLETIONS, completion(PACED, max_tokens=random.randrange(1, 60)))


async def leaves(server: Server, random: Random) -> None:
    async with connect(server.port) as wire:
        await wire.open(COMPLETIONS, completion(PACED, max_tokens=4000))
        await wire.until(random.randrange(1, 20))
        if random.random() < 0.5:
            wire.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def comes_back(server: Server, random: Random) -> None:
    body = completion(PACED, max_tokens=30, stream_options={"on_disconnect": "pause"})
    async with connect(server.port) as wire:
        id = (await wire.open(COMPLETIONS, body))["x-request-id"]
        for _ in range(random.randrange(1, 10)):
            await anext(wire)
    answer = await ask(server.port, "GET", f"/v1/streams/{id}", headers={"Accept": "text/event-stream"})
    assert answer.status == 200


async def asks_wrongly(server: Server, random: Random) -> None:
    body = random.choice((b"{", b'{"prompt": 3}', b"x" * 100_000, b'{"prompt": "a", "n": 99}'))
    assert (await ask(server.port, "POST", COMPLETIONS, body)).status in (400, 413)


async def is_hostile(server: Server, random: Random) -> None:
    """Also the clients of HTTP/2 and WebSocket, some of whose packets are left as they were."""
    protocol = random.choice(list(hostile.GOOD))
    good = random.random() < 0.5
    packet = random.choice(hostile.GOOD[protocol]) if good else next(hostile.mutants(protocol, random))
    with suppress(OSError, trio.BrokenResourceError):
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            for piece in packet:
                await stream.send_all(piece)
                with trio.move_on_after(0.05):
                    await stream.receive_some()


KINDS: list[Callable[[Server, Random], Awaitable[None]]] = [
    *(reads, asks_for_the_whole, leaves, comes_back, asks_wrongly, is_hostile),
]


class Reading(NamedTuple):
    seconds: float
    mib: float
    clients: int
    """That have come and gone."""


async def soak(server: Server, minutes: float, counts: Counter[str]) -> list[Reading]:
    """Run all kinds of clients for so long; a reading each second."""
    readings: list[Reading] = []

    async def client(random: Random) -> None:
        while True:
            kind = random.choice(KINDS)
            await kind(server, random)
            counts[kind.__name__] += 1

    with trio.move_on_after(minutes * 60):
        async with trio.open_nursery() as nursery:
            for n in range(CLIENTS):
                nursery.start_soon(client, Random(f"soak {n}"))
            began = trio.current_time()
            while True:
                await trio.sleep(1)
                seconds = trio.current_time() - began
                readings.append(Reading(seconds, resident_mib(server.process.pid), counts.total()))
    return readings


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def slope_mib_per_h(readings: list[Reading]) -> float:
    """Of a line through what was read once the server was warm. ClickException if there is too little of that."""
    warm = [reading for reading in readings[len(readings) // 2 :] if reading.clients >= WARM_CLIENTS]
    if len(warm) < WARM_READINGS:
        raise ValueError(
            f"too short: {len(warm)} readings after {WARM_CLIENTS} clients, and {WARM_READINGS} are needed"
        )
    return linear_regression([r.seconds for r in warm], [r.mib for r in warm]).slope * 3600


@click.command()
@click.option("--minutes", type=float, default=30.0, show_default=True)
def main(minutes: float) -> None:
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), CONFIG) as server:
        readings = trio.run(soak, server, minutes, counts)
        slope = slope_mib_per_h(readings)
        figures = {
            "test": "soak",
            "minutes": minutes,
            "clients": dict(counts),
            "rss_mib_by_minute": [round(reading.mib, 1) for reading in readings[::60]],
            "slope_mib_per_h": round(slope, 2),
            "connections_at_the_end": trio.run(metric, server.port, "tokenflow_open_connections"),
            "tracebacks": server.log.count("Traceback"),
        }
    print(json.dumps(figures))
    sys.exit(slope > SLOPE_MIB_PER_H or figures["tracebacks"] > 0)


if __name__ == "__main__":
    main()
