"""Cases 7, 8 and 9: silence, in every phase, at a fifth of a second's heartbeat.

That deadlines and heartbeats hold to the tick is shown in mock time by tests/http/test_events.py and
tests/service/test_stream.py; here it is what arrives on a socket, and when.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate

from tests.cases.conftest import HEARTBEAT_S
from tests.e2e.wire import BODIES, COMPLETIONS, Wire, completion, connect, directive, post

HEADERS_S = 0.2
LATE_S = 0.15
"""How late a busy machine may make something that a timer does."""


@asynccontextmanager
async def slot_taken(port: int, taken: bool) -> AsyncIterator[None]:
    """While this lasts, the one slot is held by somebody else."""
    if not taken:
        yield
        return
    async with connect(port) as hog:
        await hog.open(COMPLETIONS, completion(directive(hang_at=1), model="one"))
        await hog.until(tokens=1)
        yield
        hog.close()


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("route", BODIES)
async def test_case_7_headers_come_at_once(port: int, route: str, waiting: bool) -> None:
    async with slot_taken(port, waiting), connect(port) as wire:
        began = trio.current_time()
        head = await wire.open(route, BODIES[route](directive(prefill_ms=20_000), model="one"))
        assert head.at - began <= HEADERS_S
        wire.close()


async def silence(wire: Wire, pings: int) -> list[float]:
    """The times of so many heartbeats in a row, after whatever comes first."""
    times: list[float] = []
    async for frame in wire:
        times = [*times, frame.at] if frame.is_ping else [frame.at]
        if len(times) > pings:
            return times
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("phase", ["waiting", "prefill", "between tokens"])
@pytest.mark.parametrize("route", BODIES)
async def test_case_8_a_heartbeat_each_interval(port: int, route: str, phase: str) -> None:
    plan: dict[str, Any] = {"hang_at": 2} if phase == "between tokens" else {"prefill_ms": 20_000}
    async with slot_taken(port, phase == "waiting"), connect(port) as wire:
        await wire.open(route, BODIES[route](directive(**plan), model="one"))
        times = await silence(wire, pings=3)
        gaps = [b - a for a, b in pairwise(times)]
        assert all(HEARTBEAT_S - 0.05 <= gap <= HEARTBEAT_S + LATE_S for gap in gaps), gaps
        wire.close()


@pytest.mark.parametrize("route", BODIES)
async def test_case_9_a_heartbeat_postpones_no_deadline(port: int, route: str) -> None:
    body = BODIES[route](directive(hang_at=1), model="one", timeouts={"idle_timeout_s": 0.9})
    async with connect(port) as wire:
        await wire.open(route, body)
        *before, error, done = await wire.frames()
        [token] = [frame for frame in before if frame.text]
        assert error.json["error"]["code"] == "idle_timeout" and done.is_done
        assert 0.85 <= error.at - token.at <= 0.9 + LATE_S
        assert sum(frame.is_ping for frame in before) >= 3
    answer = await post(port, COMPLETIONS, completion("next", model="one", max_tokens=2))
    assert answer.text == generate("next", 2), "and the slot is free"
