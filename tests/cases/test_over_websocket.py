"""Cases 1, 2, 6 to 9, 20 and 21 over WebSocket. The others' files ask it beside the other ways in; 3 has no streams."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate

from tests.cases.conftest import HEARTBEAT_S
from tests.cases.test_crowds import REFUSED_S, twenty_health_checks
from tests.cases.test_leaving import LEAVING_S, assert_slot_free_within, made
from tests.cases.test_silence import HEADERS_S, LATE_S, slot_taken
from tests.e2e.talk import PING, Talk, talk
from tests.e2e.wire import Journal, ask, completion, directive, until_metric

ONE = {"model": "one"}


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_case_1_leaving_during_a_long_prefill(port: int, journal: Journal, how: str) -> None:
    before = await made(port)
    async with talk(port) as socket:
        await socket.send(id="a", prompt=directive(prefill_ms=20_000), **ONE)
        begun = await socket.begun()
        await trio.sleep(0.3)
        left_at = trio.current_time()
        if how == "cancel":
            await socket.send(action="cancel", id="a")
            end = (await socket.get())["finish_reason"]
            assert end == "cancelled"
        else:
            socket.close()
        await assert_slot_free_within(port, LEAVING_S, left_at)
    ended = await journal.ended(begun["stream"])
    assert (ended["how"], ended["phase"]) == ("cancelled" if how == "cancel" else "499 client left", "prefill")
    assert ended["generated"] == "0"
    assert await made(port) == before + 1, "the next request's token, and no other"


async def test_case_2_one_that_waits_and_leaves_never_reaches_the_engine(port: int, journal: Journal) -> None:
    async with slot_taken(port, True):
        async with talk(port) as socket, talk(port) as beside:
            for i in range(3):
                await socket.send(id=f"{i}", prompt="waits", **ONE)
            waiting = [(await socket.begun())["stream"] for _ in range(3)]
            await beside.send(id="x", prompt="waits too", **ONE)
            waiting.append((await beside.begun())["stream"])
            assert (await socket.refused(prompt="is there room", **ONE))["code"] == "queue_full"
            await socket.send(action="cancel", id="0")
            assert (await socket.get())["finish_reason"] == "cancelled"
            await until_metric(port, 3, "tokenflow_waiting_streams", within_s=LEAVING_S, model="one")
            socket.close()
            await until_metric(port, 1, "tokenflow_waiting_streams", within_s=LEAVING_S, model="one")
            beside.close()
        await until_metric(port, 0, "tokenflow_waiting_streams", within_s=LEAVING_S, model="one")
        for id in waiting:
            ended = await journal.ended(id)
            assert (ended["phase"], ended["prompt"], ended["generated"]) == ("queue", "0", "0")


@pytest.mark.parametrize(("model", "rounds"), [("one", 60), ("wide", 30)])
async def test_case_6_cancel_and_start_the_next(port: int, model: str, rounds: int) -> None:
    """On one socket, the next one's frame right behind the cancel's."""
    async with talk(port) as socket:
        for i in range(rounds):
            prompt = f"round {i}"
            await socket.send(id="left", prompt=f"to be left in {prompt}", model=model)
            frames = [await socket.begun()]
            frames += [await socket.get() for _ in range(i % 4)]
            await socket.send(action="cancel", id="left")
            await socket.send(id="next", prompt=prompt, model=model, max_tokens=12)
            said = await socket.until_end("left", "next")
            assert (said["next"].text, said["next"].reason) == (generate(prompt, 12), "length")
            assert said["left"].frames[-1]["finish_reason"] == "cancelled"
            read = "".join(frame["delta"]["content"] for frame in (*frames[1:], *said["left"].frames[:-1]))
            assert generate(f"to be left in {prompt}", 4000).startswith(read)


@pytest.mark.parametrize("waiting", [False, True])
async def test_case_7_it_says_at_once_that_it_has_begun(port: int, waiting: bool) -> None:
    async with slot_taken(port, waiting), talk(port) as socket:
        began = trio.current_time()
        await socket.send(prompt=directive(prefill_ms=20_000), **ONE)
        await socket.begun()
        assert trio.current_time() - began <= HEADERS_S
        socket.close()


@pytest.mark.parametrize("phase", ["nothing", "waiting", "prefill", "between tokens"])
async def test_case_8_a_heartbeat_each_interval(port: int, phase: str) -> None:
    plan: dict[str, Any] = {"hang_at": 2} if phase == "between tokens" else {"prefill_ms": 20_000}
    async with slot_taken(port, phase == "waiting"), talk(port) as socket:
        if phase != "nothing":
            await socket.send(prompt=directive(**plan), **ONE)
            await socket.begun()
        times = await silence(socket, pings=3)
        gaps = [b - a for a, b in pairwise(times)]
        assert all(HEARTBEAT_S - 0.05 <= gap <= HEARTBEAT_S + LATE_S for gap in gaps), gaps
        socket.close()


async def silence(socket: Talk, pings: int) -> list[float]:
    """The times of so many heartbeats in a row, after whatever comes first."""
    times: list[float] = []
    while len(times) <= pings:
        frame = await socket.get(pings=True)
        times = [*times, trio.current_time()] if frame == PING else [trio.current_time()]
    return times


async def test_case_9_a_heartbeat_postpones_no_deadline(port: int) -> None:
    async with talk(port) as socket:
        await socket.send(prompt=directive(hang_at=1), timeouts={"idle_timeout_s": 0.9}, **ONE)
        await socket.begun()
        assert "delta" in await socket.get()
        token_at, pings = trio.current_time(), 0
        while (frame := await socket.get(pings=True)) == PING:
            pings += 1
        assert frame["error"]["code"] == "idle_timeout" and pings >= 3
        assert 0.85 <= trio.current_time() - token_at <= 0.9 + LATE_S
        assert (await socket.say(completion("next", max_tokens=2) | ONE)).text == generate("next", 2)


async def test_case_20_one_that_fails_ends_alone(port: int) -> None:
    """All three on one socket."""
    plans = [directive(tokens_per_s=200), directive(tokens_per_s=200, raise_at=10), directive(tokens_per_s=200) + "3"]
    async with talk(port) as socket:
        for i, plan in enumerate(plans):
            await socket.send(id=f"{i}", prompt=plan, max_tokens=60)
        said = await socket.until_end("0", "1", "2")
        assert [said[f"{i}"].reason for i in range(3)] == ["length", "engine_error", "length"]
        assert [said[f"{i}"].text for i in range(3)] == [generate(plans[i], (60, 10, 60)[i]) for i in range(3)]
        assert (await ask(port, "GET", "/health/ready")).status == 200
        assert (await socket.say(completion("next", max_tokens=2))).text == generate("next", 2)


async def test_case_21_two_slots_four_places_twenty_at_once(port: int) -> None:
    bound = max(REFUSED_S, 2 * await twenty_health_checks(port))
    async with talk(port) as socket:
        began = trio.current_time()
        for i in range(20):
            await socket.send(id=f"{i}", prompt=directive(tokens_per_s=50), model="two", max_tokens=10)
        refused = []
        while len(refused) < 14:
            frame = await socket.get()
            if "error" in frame:
                assert "stream" not in frame and frame["error"]["code"] == "queue_full"
                refused.append(frame["id"])
        assert trio.current_time() - began <= 14 * bound
        assert refused == [f"{i}" for i in range(6, 20)]
