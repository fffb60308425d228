"""Cases 1, 2, 3 and 6: clients that leave.

A slot that is free again is seen from outside by the next request having it: on a model with one slot, its first token
cannot come before the one that left is gone. How many tokens were made, the engine's own counter says on `/metrics`;
the log's line says what the stream made of it.
The scheduler's every step is covered in mock time by tests/service/test_cancel_everywhere.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate

from tests.e2e.wire import (
    BODIES,
    CHAT,
    COMPLETIONS,
    Journal,
    Wire,
    ask,
    completion,
    connect,
    directive,
    metric,
    post,
    stream,
    until_metric,
)

LEAVING_S = 0.25
"""From the client's FIN to the slot's being free; here the next request's whole round trip is in it too."""


async def assert_slot_free_within(port: int, seconds: float, since: float) -> None:
    answer = await post(port, COMPLETIONS, completion("next", model="one", max_tokens=1))
    assert answer.text == generate("next", 1)
    assert trio.current_time() - since <= seconds


async def made(port: int) -> float:
    """Tokens that the engine with one slot has sampled."""
    return await metric(port, "tokenflow_engine_generated_tokens_total", model="one")


@pytest.mark.parametrize("route", BODIES)
async def test_case_1_leaving_during_a_long_prefill(port: int, journal: Journal, route: str) -> None:
    before = await made(port)
    async with connect(port) as wire:
        head = await wire.open(route, BODIES[route](directive(prefill_ms=20_000), model="one"))
        await trio.sleep(0.5)  # the case's own second, scaled
        wire.close()
        await assert_slot_free_within(port, LEAVING_S, trio.current_time())
    ended = await journal.ended(head["x-request-id"] or "")
    assert (ended["how"], ended["phase"], ended["by"]) == ("499 client left", "prefill", "client")
    assert ended["generated"] == "0"
    assert await made(port) == before + 1, "the next request's token, and no other"


async def refused(port: int) -> bool:
    """Whether there is no place to wait. A request that has one leaves it again."""
    with trio.move_on_after(0.1):
        return (await post(port, COMPLETIONS, completion("is there room", model="one", max_tokens=1))).status == 503
    return False


async def test_case_2_one_that_waits_and_leaves_never_reaches_the_engine(port: int, journal: Journal) -> None:
    async with connect(port) as hog:
        await hog.open(COMPLETIONS, completion(directive(tokens_per_s=50), model="one"))
        await hog.until(tokens=1)
        waiting: list[tuple[Wire, str]] = []
        for _ in range(4):  # as many as there are places
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            head = await (wire := Wire(stream)).open(COMPLETIONS, completion("waits", model="one"))
            waiting.append((wire, head["x-request-id"] or ""))
        assert await refused(port)
        await until_metric(port, 4, "tokenflow_waiting_streams", model="one")
        for wire, _ in waiting:
            wire.close()
        await until_metric(port, 0, "tokenflow_waiting_streams", within_s=LEAVING_S, model="one")
        for _, id in waiting:
            ended = await journal.ended(id)
            assert (ended["how"], ended["phase"]) == ("499 client left", "queue")
            assert (ended["prompt"], ended["generated"]) == ("0", "0")
        assert not await refused(port), "their places are free, and the slot is still taken"
        hog.close()
        await assert_slot_free_within(port, LEAVING_S, trio.current_time())


@pytest.mark.parametrize("route", BODIES)
async def test_case_3_leaving_while_waiting_for_a_whole_answer(port: int, journal: Journal, route: str) -> None:
    body = BODIES[route](directive(tokens_per_s=100) + route, model="one", max_tokens=4000)
    async with connect(port) as wire:
        await wire.send("POST", route, body)
        await trio.sleep(0.5)  # the case's own second, scaled
        wire.close()
        await assert_slot_free_within(port, LEAVING_S, trio.current_time())
    prompt = {"messages": body["messages"]} if route == CHAT else {"prompt": body["prompt"]}
    count = (await post(port, "/v1/tokenize", prompt | {"model": "one"})).json["count"]
    ended = await journal.ended_with(route, count)
    assert (ended["how"], ended["phase"], ended["by"]) == ("499 client left", "decode", "client")
    assert 10 <= int(ended["generated"]) <= 600, "about half a second's worth of 4000, on a machine that may be busy"


async def cut_short(port: int, body: dict[str, Any], tokens: int) -> str:
    """Leave after so many tokens (0: after the headers); what was read."""
    async with connect(port) as wire:
        await wire.open(COMPLETIONS, body)
        text = "".join(frame.text for frame in await wire.until(tokens)) if tokens else ""
        wire.close()
        return text


@pytest.mark.parametrize(("model", "rounds"), [("one", 200), ("wide", 50)])
async def test_case_6_cancel_and_start_the_next_two_hundred_times(port: int, model: str, rounds: int) -> None:
    async def neighbour() -> None:
        """Shares the engine and its batches, and must not be disturbed either."""
        prompt = directive(tokens_per_s=300) + " the neighbour"
        while True:
            answer = await stream(port, COMPLETIONS, completion(prompt, model=model, max_tokens=50))
            assert answer.text == generate(prompt, 50)

    at_once = 0
    async with trio.open_nursery() as nursery:
        if model == "wide":
            nursery.start_soon(neighbour)
        for i in range(rounds):
            prompt = f"round {i}"
            async with connect(port) as next_one:
                read = await cut_short(port, completion(f"to be left in {prompt}", model=model), tokens=i % 4)
                left_at = trio.current_time()
                await next_one.send("POST", COMPLETIONS, completion(prompt, model=model, max_tokens=12))
                at_once += trio.current_time() - left_at < 0.01
                await next_one.head()
                assert json.loads(await next_one.body())["choices"][0]["text"] == generate(prompt, 12)
            assert generate(f"to be left in {prompt}", 64).startswith(read)
        nursery.cancel_scope.cancel()
    assert at_once >= 0.8 * rounds, "the next is to start within 10 ms, or this shows nothing"
    assert (await ask(port, "GET", "/health/ready")).status == 200
