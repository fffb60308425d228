"""Memory, as the operating system counts it for a real server: the replay logs keep to what is configured, also with a
thousand streams that nobody reads; and streams that come and go leave nothing behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from tests.e2e.conftest import Serve, Server
from tests.e2e.wire import (
    BODIES,
    COMPLETIONS,
    ask,
    completion,
    connect,
    directive,
    metric,
    post,
    stream,
    until_metric,
)

MIB = 1 << 20
TOTAL = 32 * MIB
TOKENS_PER_S = 20_000
"""Of all streams together: fewer than what the engine could, so that requests get their turns."""
STREAMS = 1000
COMING_AND_GOING, AT_ONCE, WARM_UP = 10_000, 20, 25
SEED = 20
PATIENT = {"idle_timeout_s": 600}
GENERATED = "tokenflow_engine_generated_tokens_total"
CONFIG = """
[server]
drain_s = 0

[limits]
max_waiting = 1000

[replay]
total_bytes = {total}
stream_bytes = {stream}
stream_records = 1_000_000

[models.m]
engine = "synthetic"
directives = true
slots = 1000
context_length = 1_000_000

[sinks.prometheus]
"""


def resident(server: Server) -> int:
    """Bytes of memory that the server's process has."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


async def leave(port: int, prompt: str, after: int = 0, **options: Any) -> str:
    """Ask for a stream, read so many tokens, and go; its id."""
    max_tokens = options.pop("max_tokens", 200)
    async with connect(port) as wire:
        await wire.send("POST", COMPLETIONS, completion(prompt, max_tokens=max_tokens, stream=True, **options))
        head = await wire.head()
        while after > 0:
            after -= (await wire.piece() or b"").count(b"data: ")
        wire.close()
    return head["x-request-id"] or ""


@pytest.mark.stress
@pytest.mark.parametrize("live", [False, True], ids=["ended", "live"])
async def test_a_thousand_detached_streams_keep_to_the_total(
    serve: Serve, share: Callable[[int], int], live: bool
) -> None:
    streams = share(STREAMS)
    each = TOTAL // streams  # so full logs alone are the total, and their streams come on top
    tokens = each // 200  # more than a log may hold
    plan = directive(tokens_per_s=TOKENS_PER_S / streams, **({"hang_at": tokens} if live else {}))
    kept = {"on_disconnect": "continue", "grace_s": 300, "retention_s": 300}
    with serve(CONFIG.format(total=TOTAL, stream=each)) as server:
        for i in range(10):
            await leave(server.port, f"warm up {i}", stream_options=kept | {"retention_s": 0})
        await until_metric(server.port, 2000, GENERATED)
        before = resident(server)
        for i in range(streams):
            await leave(
                server.port, f"stream {i} {plan}", max_tokens=tokens + live, stream_options=kept, timeouts=PATIENT
            )
        await until_metric(server.port, 2000 + streams * tokens, GENERATED, within_s=300)
        grown = resident(server) - before
        assert await metric(server.port, "tokenflow_active_streams") == (streams if live else 0)
        assert 0.8 * TOTAL < await metric(server.port, "tokenflow_replay_bytes") <= TOTAL
        assert grown <= 1.1 * TOTAL, f"{grown / MIB:.1f} MiB"


# --- streams that come and go -----------------------------------------------------------------------------------------


async def whole(port: int, dice: Random) -> None:
    route = dice.choice(list(BODIES))
    await post(port, route, BODIES[route](f"{dice.random()}", max_tokens=dice.randrange(1, 200)))


async def read(port: int, dice: Random) -> None:
    route = dice.choice(list(BODIES))
    await stream(port, route, BODIES[route](f"{dice.random()}", max_tokens=dice.randrange(1, 200)))


async def fail(port: int, dice: Random) -> None:
    await stream(port, COMPLETIONS, completion(directive(raise_at=dice.randrange(50)) + f"{dice.random()}"))


async def be_refused(port: int, dice: Random) -> None:
    assert (await post(port, COMPLETIONS, {"prompt": f"{dice.random()}", "n": 0})).status == 400


async def go(port: int, dice: Random) -> None:
    way = dice.choice(["cancel", "pause", "continue"])
    options = {"on_disconnect": way, "grace_s": dice.choice([0, 0.05]), "retention_s": 0}
    await leave(port, f"{dice.random()}", after=dice.choice([0, 1, 50]), stream_options=options)


async def cancel(port: int, dice: Random) -> None:
    options = {"on_disconnect": "continue", "grace_s": 10, "retention_s": 0}
    id = await leave(port, directive(hang_at=5) + f"{dice.random()}", stream_options=options)
    assert (await ask(port, "DELETE", f"/v1/streams/{id}")).status == 204


@pytest.mark.stress
async def test_ten_thousand_streams_that_come_and_go_leave_nothing(serve: Serve, share: Callable[[int], int]) -> None:
    dice, rounds = Random(SEED), share(COMING_AND_GOING) // AT_ONCE
    sizes = []
    with serve(CONFIG.format(total=TOTAL, stream=MIB)) as server:
        for _ in range(WARM_UP + rounds):
            async with trio.open_nursery() as nursery:
                for way in dice.choices([whole, read, fail, be_refused, go, cancel], k=AT_ONCE):
                    nursery.start_soon(way, server.port, Random(dice.random()))
            sizes.append(resident(server))
        await until_metric(server.port, 0, "tokenflow_active_streams")
        assert await metric(server.port, "tokenflow_replay_bytes") == 0
    grown = max(sizes) - max(sizes[:WARM_UP])
    assert grown <= 2 * MIB, [f"{size / MIB:.1f}" for size in sizes]
