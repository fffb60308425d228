"""Case 12: a pooled connection that was idle for as long as pools keep theirs is there when it is used again."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest
import trio

from tests.e2e.wire import connect

IDLE_S = (6, 30, 59)


@pytest.mark.stress
async def test_case_12_a_connection_that_was_idle_for_a_minute(port: int, share: Callable[[int], int]) -> None:
    async with trio.open_nursery() as nursery:
        for idle_s in IDLE_S:
            nursery.start_soon(use_twice, port, share(idle_s))


async def use_twice(port: int, idle_s: float) -> None:
    pool = httpx2.Limits(max_connections=1, keepalive_expiry=None)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=pool) as client:
        addresses = []
        for pause_s in (0, idle_s, idle_s / 10):
            await trio.sleep(pause_s)
            answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
            assert answer.status_code == 200
            addresses.append(answer.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(set(addresses)) == 1, "it is the same connection"


async def test_a_connection_has_no_number_of_requests(port: int) -> None:
    """Hypercorn's own limit is a thousand, and a client with one request on its way at that moment loses it."""
    async with connect(port) as wire:
        for _ in range(1100):
            assert (await wire.ask("GET", "/health/live")).status == 200
