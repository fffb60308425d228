"""Slots are never starved: who holds one and does nothing with it gives it up for who waits, and loses nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate
from trio.testing import MockClock

from tests.service.conftest import STEP_S, Rig, open_rig, read_all
from tokenflow.core.states import Phase
from tokenflow.core.types import Attendance, Delta
from tokenflow.service.reader import StreamReader
from tokenflow.service.stream import Stream

PAUSE = Attendance(on_disconnect="pause", grace_s=100.0)


def text(events: list[tuple[int, Any]], source: int = 0) -> str:
    return "".join(e.text for i, e in events if isinstance(e, Delta) and i == source)


async def paused(r: Rig, prompt: str, **wishes: Any) -> tuple[Stream, StreamReader]:
    stream, reader = await r.open(prompt, max_tokens=50, **wishes)
    await trio.sleep(1)
    stream.pause()
    return stream, reader


async def left(r: Rig, prompt: str) -> tuple[Stream, StreamReader]:
    stream, reader = await r.open(prompt, max_tokens=50, attendance=PAUSE)
    await trio.sleep(1)
    reader.close()
    return stream, reader


async def stalled(r: Rig, prompt: str) -> tuple[Stream, StreamReader]:
    stream, reader = await r.open(prompt, max_tokens=500)
    await trio.sleep(1)
    return stream, reader


async def starts_within(r: Rig, seconds: float) -> None:
    began = trio.current_time()
    stream, reader = await r.open("the newcomer", max_tokens=3)
    records = await reader.read()
    assert trio.current_time() - began <= seconds
    reader.ack(records[-1].n)
    await read_all(reader)
    assert r.engine.stepper.made[stream.identity.id] == 3


async def paused_in_the_queue(r: Rig, prompt: str) -> tuple[Stream, StreamReader]:
    stream, reader = await r.open(prompt, max_tokens=50)
    stream.pause()
    return stream, reader


async def left_in_the_queue(r: Rig, prompt: str) -> tuple[Stream, StreamReader]:
    stream, reader = await r.open(prompt, max_tokens=50, attendance=PAUSE)
    reader.close()
    return stream, reader


async def without_credit(r: Rig, prompt: str) -> tuple[Stream, StreamReader]:
    stream, reader = await r.open(prompt, max_tokens=50)
    reader.allow(0)
    return stream, reader


@pytest.mark.parametrize("how", [paused_in_the_queue, left_in_the_queue, without_credit])
async def test_one_that_could_do_nothing_from_the_start_gives_way_too(autojump_clock: MockClock, how: Any) -> None:
    async with open_rig(slots=2, tokens_per_s=20) as r:
        for i in range(2):
            stream, reader = await how(r, f"prompt {i}")
        await trio.sleep(2)
        await starts_within(r, 1.0)
        stream.resume()
        if reader.closed:
            reader = stream.attach()
        reader.allow(1000)
        assert text(await read_all(reader)) == generate("prompt 1", 50)
        for stream in list(r.service._streams.values()):
            stream.cancel("client")


@pytest.mark.parametrize("how", [paused, left, stalled])
async def test_one_more_starts_within_a_second_whatever_the_others_do(autojump_clock: MockClock, how: Any) -> None:
    async with open_rig(slots=3, tokens_per_s=20, stream={"window": 4}) as r:
        held = [await how(r, f"prompt {i}") for i in range(3)]
        await starts_within(r, 1.0)
        made = [r.engine.stepper.made[stream.identity.id] for stream, _ in held]
        for i, (stream, reader) in enumerate(held):
            stream.resume()
            events = await read_all(stream.attach() if reader.closed else reader)
            count = 500 if how is stalled else 50
            assert text(events) == generate(f"prompt {i}", count), "the same output as if nothing had been"
            assert r.engine.stepper.made[stream.identity.id] == count > made[i], "and each token once"
        await r.settle()


async def test_nobody_gives_way_while_nobody_waits(autojump_clock: MockClock) -> None:
    async with open_rig(slots=2, tokens_per_s=20) as r:
        (one, reader), _ = await paused(r, "one"), await paused(r, "two")
        await trio.sleep(50)
        assert len(r.engine.stepper.rows) == 2 and one.holds_slots
        reader.close()


async def test_one_newcomer_takes_the_slot_of_one_the_longest_idle(autojump_clock: MockClock) -> None:
    async with open_rig(slots=3, tokens_per_s=20) as r:
        streams = [(await paused(r, f"prompt {i}"))[0] for i in range(3)]
        _, reader = await r.open(max_tokens=100)
        await trio.sleep(1)
        assert [stream.holds_slots for stream in streams] == [False, True, True]
        reader.close()


async def test_who_was_called_back_waits_its_turn_like_everybody(autojump_clock: MockClock) -> None:
    async with open_rig(slots=1, tokens_per_s=20, limits={"max_waiting": 1}) as r:
        stream, reader = await paused(r, "hello")
        newcomer, busy = await r.open("newcomer", max_tokens=60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, busy)
            await trio.sleep(1)
            stream.resume()
            await trio.sleep(1)
            assert not stream.holds_slots and newcomer.phase is Phase.DECODE
            assert r.service.model("").admission.waiting == 1
            assert text(await read_all(reader)) == generate("hello", 50)


async def test_n_choices_give_way_together_and_come_back_together(autojump_clock: MockClock) -> None:
    async with open_rig(slots=2, tokens_per_s=20) as r:
        stream, reader = await paused(r, "hello", n=2)
        await starts_within(r, 1.0)
        assert not stream.holds_slots
        stream.resume()
        events = await read_all(reader)
        assert [text(events, i) for i in range(2)] == [generate("hello", 50)] * 2


@pytest.mark.parametrize("what", ["cancel", "grace", "total", "leave"])
async def test_one_that_gave_way_can_still_end(autojump_clock: MockClock, what: str) -> None:
    timeouts = {"total_timeout_s": 20.0} if what == "total" else {}
    async with open_rig(slots=1, tokens_per_s=20, timeouts=timeouts) as r:
        attendance = replace(PAUSE, grace_s=10.0) if what == "grace" else Attendance()
        stream, reader = await paused(r, "hello", attendance=attendance)
        await starts_within(r, 1.0)
        assert not stream.holds_slots and stream.phase is Phase.DECODE
        if what == "cancel":
            stream.cancel("client")
            await read_all(reader)
        elif what == "total":
            assert (await read_all(reader))[-1][1].error.code == "total_timeout"
        else:
            reader.close()
        with trio.fail_after(11):
            while stream.phase is not Phase.DONE:
                await trio.sleep(STEP_S)
        assert await r.whole("next", max_tokens=3) == generate("next", 3)
        await r.settle()
        assert r.service.model("").admission.free == 1


async def test_one_that_is_paused_again_before_its_engine_has_called_it_back_gives_way_again(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_rig(slots=2, tokens_per_s=20) as r:
        stream, reader = await paused(r, "hello")
        for prompt in ("busy", "newcomer"):  # there is always a step in progress
            latest, latest_reader = await r.open(prompt, max_tokens=1000)
            nursery.start_soon(read_all, latest_reader)
        await trio.sleep(1)
        assert not stream.holds_slots
        stream.resume()
        latest.cancel("client")
        while not stream.holds_slots:
            await trio.sleep(STEP_S / 100)
        stream.pause()
        await starts_within(r, 1.0)
        stream.resume()
        assert text(await read_all(reader)) == generate("hello", 50)


async def test_a_choice_that_still_waits_for_its_slot_gives_way_with_the_others(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(slots=2, tokens_per_s=20) as r:
        stepper, full = r.engine.stepper, True
        add = stepper.add
        monkeypatch.setattr(stepper, "add", lambda seq: not (full and stepper.rows) and add(seq))
        stream, reader = await r.open("hello", max_tokens=50, n=2)
        stream.pause()
        await trio.sleep(1)
        assert len(stepper.rows) == r.engine.loop.waiting == 1
        await starts_within(r, 1.0)
        assert not stream.holds_slots
        full = False
        stream.resume()
        await trio.sleep(1)
        assert not any(choice.away for choice in stream._choices)
        events = await read_all(reader)
        assert [text(events, i) for i in range(2)] == [generate("hello", 50)] * 2


async def test_called_back_at_any_moment(autojump_clock: MockClock) -> None:
    """The newcomer comes, and some hundredths of a second later the paused one is resumed: no slot is lost."""
    async with open_rig(slots=1, tokens_per_s=20) as r:
        for delay in range(12):
            stream, reader = await paused(r, "hello")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(starts_within, r, 5.0)
                await trio.sleep(delay * STEP_S / 4)
                stream.resume()
                assert text(await read_all(reader)) == generate("hello", 50)
            await r.settle()
            admission = r.service.model("").admission
            assert (admission.free, admission.waiting, len(r.engine.stepper.rows)) == (1, 0, 0)
