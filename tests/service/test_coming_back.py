"""Streams that outlive their readers, in mock time."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenflow_synthetic import generate
from trio.testing import MockClock

from tests.service.conftest import STEP_S, Rig, open_rig, read_all
from tokenflow.core.states import Phase
from tokenflow.core.types import Attendance, Delta, GenerationRequest, TextPrompt
from tokenflow.errors import (
    IdempotencyConflict,
    InvalidRequest,
    ReplayFull,
    ResumeWindowLost,
    StreamNotFound,
)
from tokenflow.service.reader import StreamReader
from tokenflow.service.records import Ended, Failed
from tokenflow.service.stream import Stream

PAUSE, CONTINUE = Attendance(on_disconnect="pause"), Attendance(on_disconnect="continue")
TICK_S = STEP_S * 1.001


async def read_some(reader: StreamReader, count: int) -> list[Any]:
    """Take exactly `count` records."""
    taken: list[Any] = []
    while len(taken) < count:
        records = (await reader.read())[: count - len(taken)]
        taken += records
        reader.ack(records[-1].n)
    return taken


def text(records: list[Any]) -> str:
    return "".join(record.event.text for record in records if isinstance(record.event, Delta))


def made(rig: Rig, stream: Stream) -> int:
    return rig.engine.stepper.made.get(stream.identity.id, 0)


async def test_pause_takes_no_further_step_and_the_text_goes_on_as_if_nothing_had_been(
    autojump_clock: MockClock,
) -> None:
    async with open_rig(tokens_per_s=20) as r:
        stream, reader = await r.open("hello", max_tokens=60, attendance=PAUSE)
        first = await read_some(reader, 10)
        at_leaving = made(r, stream)
        reader.close()
        await trio.sleep(10)
        assert made(r, stream) <= at_leaving + 1
        assert stream.paused and (await r.engine.stats()).paused == 1
        rest = await read_all(stream.attach(after=first[-1].n))
        assert text(first) + "".join(e.text for _, e in rest if isinstance(e, Delta)) == generate("hello", 60)
        assert made(r, stream) == 60


@pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.PREFILL, Phase.DECODE])
@pytest.mark.parametrize("attendance", [PAUSE, CONTINUE])
async def test_at_the_end_of_grace_it_is_cancelled_to_the_tick(
    autojump_clock: MockClock, phase: Phase, attendance: Attendance
) -> None:
    engine = {"prefill_ms": 10_000_000} if phase is Phase.PREFILL else {}
    async with open_rig(slots=1, tokens_per_s=10, timeouts={"prefill_timeout_s": 1000.0}, **engine) as r:
        if phase is Phase.QUEUE:
            _, hog = await r.open('{"synthetic": {"hang_at": 1}}', timeouts={"idle_s": 500.0})
        stream, reader = await r.open("the victim", attendance=replace(attendance, grace_s=12.0))
        await trio.sleep(1)
        assert stream.phase is phase
        left_at = trio.current_time()
        reader.close()
        await trio.sleep(11.9)
        assert stream.phase is phase
        with trio.fail_after(1):
            while stream.phase is not Phase.DONE:
                await trio.sleep(STEP_S / 10)
        assert 12.0 <= trio.current_time() - left_at <= 12.0 + 1.2 * TICK_S
        assert not stream.holds_slots
        if phase is Phase.QUEUE:
            hog.close()
        await r.settle()
        record = r.sink.ended(stream.identity.id)
        assert (record.reason, record.by, record.phase) == ("disconnected", "client", phase.value)


async def test_coming_back_within_grace_disarms_it(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=1) as r:
        stream, reader = await r.open("hello", max_tokens=100, attendance=replace(PAUSE, grace_s=5.0))
        for _ in range(3):
            await trio.sleep(4)
            n = reader.n
            reader.close()
            await trio.sleep(4.9)
            reader = stream.attach(after=n)
        await trio.sleep(20)
        assert stream.phase is Phase.DECODE
        reader.close()


async def test_continue_runs_on_and_can_be_replayed_until_its_time_is_up(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=100) as r:
        asked = replace(CONTINUE, grace_s=20.0, retention_s=60.0)
        stream, reader = await r.open("hello", max_tokens=500, attendance=asked)
        await read_some(reader, 3)
        reader.close()
        with trio.fail_after(6):
            while stream.phase is not Phase.DONE:
                await trio.sleep(STEP_S)
        ended_at = trio.current_time()
        for after in (0, 3, 500):
            events = await read_all(r.service.stream(stream.identity.id, "-").attach(after))
            assert "".join(e.text for _, e in events[:-1]) == "".join(
                f" {word}" for word in generate("hello", 500).split()[after:]
            )
            assert isinstance(events[-1][1], Ended)
        done = stream.attach(after=501)
        assert done.at_end
        done.close()
        assert r.sink.ended(stream.identity.id).reason == "length"
        await trio.sleep_until(ended_at + 59.9)
        r.service.stream(stream.identity.id, "-")
        await trio.sleep_until(ended_at + 60.1)
        with pytest.raises(StreamNotFound):
            r.service.stream(stream.identity.id, "-")
        assert r.service._logs.bytes == 0


async def test_continue_runs_on_also_when_the_window_was_full(autojump_clock: MockClock) -> None:
    async with open_rig(stream={"window": 8}) as r:
        stream, reader = await r.open("hello", max_tokens=300, attendance=CONTINUE)
        await read_some(reader, 10)
        await trio.sleep(10)
        assert made(r, stream) == 18
        reader.close()
        await trio.sleep(5)
        assert stream.phase is Phase.DONE
        await r.settle()
        record = r.sink.ended(stream.identity.id)
        assert (record.reason, record.generated_tokens, record.delivered_tokens) == ("length", 300, 10)


async def test_a_key_used_again_while_its_stream_is_being_cancelled_generates_anew(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=10) as r:
        stream, reader = await ask(r)
        await read_some(reader, 5)
        reader.close()
        anew, reader = await ask(r)
        assert anew is not stream
        assert isinstance((await read_all(reader))[-1][1], Ended)


async def test_coming_back_in_the_very_tick_of_grace_does_not_rename_the_end(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=10) as r:
        stream, reader = await r.open(attendance=replace(PAUSE, grace_s=5.0))
        await trio.sleep(1)
        reader.close()
        await trio.sleep(5.0)
        with suppress(ResumeWindowLost):
            await read_all(stream.attach())
        await r.settle()
        record = r.sink.ended(stream.identity.id)
        assert (record.reason, record.code, record.by) == ("disconnected", None, "client")


async def test_ended_streams_that_nobody_reads_give_way_whole(autojump_clock: MockClock) -> None:
    async with open_rig(slots=8, replay={"total_bytes": 400_000}) as r:
        for _ in range(60):
            _, reader = await r.open("x" * 1000, max_tokens=3, attendance=CONTINUE)
            await read_all(reader)
        await r.settle()
        gauges = await r.service.gauges()
        assert gauges.kept_streams < 25 and gauges.replay_bytes <= 400_000
        assert len(r.service.streams("-")) == gauges.kept_streams
        assert all(s.asked.prompts == (TextPrompt(text=""),) for s in r.service.streams("-"))


async def test_a_reader_that_lingers_holds_neither_the_record_nor_the_log(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        asked = replace(CONTINUE, retention_s=60.0)
        stream, lingers = await r.open(max_tokens=20, attendance=asked)
        await trio.sleep(35)
        assert r.sink.ended(stream.identity.id).delivered_tokens == 0
        await trio.sleep(60)
        with pytest.raises(StreamNotFound):
            r.service.stream(stream.identity.id, "-")
        with pytest.raises(ResumeWindowLost):
            await lingers.read()
        lingers.close()


@pytest.mark.parametrize(("retention_s", "a_record_s"), [(0.0, 3.0), (60.0, 10.0)])
async def test_whoever_reads_on_is_not_cut_off_when_its_time_is_up(
    autojump_clock: MockClock, retention_s: float, a_record_s: float
) -> None:
    async with open_rig(tokens_per_s=100) as r:
        stream, first = await r.open(max_tokens=40, attendance=replace(CONTINUE, retention_s=retention_s))
        reader = stream.attach()
        await read_all(first)
        first.close()
        taken = 0
        while await reader.read():
            await trio.sleep(a_record_s)
            reader.ack(taken := taken + 1)
        assert taken == 41
        reader.close()
        await trio.sleep(35)
        with pytest.raises(StreamNotFound):
            r.service.stream(stream.identity.id, "-")


async def test_who_comes_back_far_behind_paces_the_engine_again(autojump_clock: MockClock) -> None:
    async with open_rig(stream={"window": 16}) as r:
        stream, reader = await r.open("hello", max_tokens=2000, attendance=CONTINUE)
        await read_some(reader, 5)
        reader.close()
        await trio.sleep(5)
        ran_on_to = made(r, stream)
        assert ran_on_to > 400
        reader = stream.attach(after=5)
        await trio.sleep(5)
        assert made(r, stream) <= ran_on_to + 1, "nobody makes more while the only reader is hundreds behind"
        await read_some(reader, 100)
        await trio.sleep(5)
        assert made(r, stream) <= ran_on_to + 1
        events = await read_all(reader)
        assert isinstance(events[-1][1], Ended)
        assert made(r, stream) == 2000


async def test_two_readers_each_at_their_place_and_the_fastest_paces(autojump_clock: MockClock) -> None:
    async with open_rig(stream={"window": 8}) as r:
        stream, slow = await r.open("hello", max_tokens=100, attendance=PAUSE)
        fast = stream.attach()
        events = await read_all(fast)
        assert isinstance(events[-1][1], Ended)
        assert len(await slow.read()) == 101
        events = await read_all(slow)
        assert "".join(e.text for _, e in events if isinstance(e, Delta)) == generate("hello", 100)


async def test_pause_and_resume_through_the_api(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=10, timeouts={"idle_timeout_s": 3.0}) as r:
        stream, reader = await r.open("hello", max_tokens=30)
        first = await read_some(reader, 5)
        stream.pause()
        stream.pause()
        await trio.sleep(100)
        assert made(r, stream) <= 6
        assert stream.state.paused
        stream.resume()
        rest = await read_all(reader)
        assert text(first) + "".join(e.text for _, e in rest if isinstance(e, Delta)) == generate("hello", 30)


async def test_cancelled_by_id_it_says_so_to_its_reader(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=10) as r:
        stream, reader = await r.open(attendance=PAUSE)
        await read_some(reader, 5)
        stream.cancel("client")
        events = await read_all(reader)
        assert events[-1][1].reasons == ("cancelled",)
        await r.settle()
        assert r.sink.ended(stream.identity.id).reason == "cancelled"
        stream.cancel("client")


async def test_a_cancel_may_come_after_the_end(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.service.service.REMEMBERED", 2)
    async with open_rig() as r:
        ids = []
        for _ in range(3):
            stream, reader = await r.open(max_tokens=1)
            await read_all(reader)
            ids.append(stream.identity.id)
        await r.settle()
        assert r.service.streams("-") == [], "none is kept"
        for id in ids[1:]:
            r.service.cancel(id, "-")
        for id, key in [(ids[0], "-"), (ids[2], "mallory"), ("tf-0", "-")]:
            with pytest.raises(StreamNotFound):
                r.service.cancel(id, key)
        assert [r.sink.ended(id).reason for id in ids] == ["length"] * 3


async def test_a_stream_belongs_to_its_key(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=10) as r:
        stream, reader = await r.open(attendance=PAUSE)
        for id, key in [(stream.identity.id, "mallory"), ("tf-0", "-")]:
            with pytest.raises(StreamNotFound):
                r.service.stream(id, key)
        assert r.service.streams("mallory") == []
        assert r.service.streams("-") == [stream]
        reader.close()


async def test_an_n_that_lies_ahead_is_refused(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=10) as r:
        stream, reader = await r.open(attendance=PAUSE)
        await read_some(reader, 2)
        with pytest.raises(InvalidRequest) as caught:
            stream.attach(after=1000)
        assert caught.value.param == "after"
        reader.close()


async def ask(rig: Rig, body: bytes = b"1", **wishes: Any) -> tuple[Stream, StreamReader]:
    request = GenerationRequest(
        model="", prompts=(TextPrompt(text="hello"),), stream=True, idempotency_key="k", **{"max_tokens": 20} | wishes
    )
    return await rig.service.open(request, key="-", route="/test", digest=body)


async def test_an_idempotency_key_attaches_while_it_lives_and_when_it_is_complete(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=10) as r:
        stream, reader = await ask(r)
        await read_some(reader, 5)
        again, second = await ask(r)
        assert again is stream
        reader.close()
        events = await read_all(second)
        assert "".join(e.text for _, e in events if isinstance(e, Delta)) == generate("hello", 20)
        complete, third = await ask(r)
        assert complete is stream
        await read_all(third)
        assert made(r, stream) == 20
        with pytest.raises(IdempotencyConflict):
            await ask(r, b"2")
        await trio.sleep(301)
        anew, reader = await ask(r, b"2")
        assert anew is not stream
        reader.close()


async def test_after_a_cancel_or_a_failure_an_idempotency_key_generates_anew(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=10) as r:
        stream, reader = await ask(r)
        stream.cancel("client")
        await read_all(reader)
        anew, reader = await ask(r)
        assert anew is not stream
        assert isinstance((await read_all(reader))[-1][1], Ended)


async def test_of_a_complete_stream_whose_beginning_is_gone_nobody_could_have_the_answer(
    autojump_clock: MockClock,
) -> None:
    async with open_rig(replay={"stream_records": 10}) as r:
        stream, reader = await ask(r)
        await read_all(reader)
        assert stream.state.first_n > 1
        anew, reader = await ask(r)
        assert anew is not stream
        again, beside = await ask(r)
        assert again is anew, "and from then on that one is the stream of this key"
        reader.close()
        beside.close()


async def test_when_logs_that_may_not_go_fill_the_memory_nothing_is_admitted(autojump_clock: MockClock) -> None:
    async with open_rig(replay={"total_bytes": 10_000}) as r:
        _, reader = await r.open(attendance=PAUSE)
        await trio.sleep(5)
        with pytest.raises(ReplayFull):
            await r.open()
        reader.close()


async def test_a_reader_that_is_too_slow_is_told_which_records_are_left(autojump_clock: MockClock) -> None:
    async with open_rig(replay={"stream_records": 50}) as r:
        stream, slow = await r.open(max_tokens=500, attendance=PAUSE)
        await read_all(stream.attach())
        with pytest.raises(ResumeWindowLost) as caught:
            await slow.read()
        assert caught.value.details | {"oldest": 0} == {"oldest": 0, "last": 501, "state": "finished"}
        slow.close()


@settings(max_examples=60)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 30), st.floats(0, 3)), max_size=8),
    attendance=st.sampled_from([PAUSE, CONTINUE]),
    window=st.integers(1, 20),
)
def test_exactly_once_however_often_it_breaks(
    cuts: list[tuple[int, float]], attendance: Attendance, window: int
) -> None:
    """After any number of records the reader leaves, and some time later one comes back from there."""

    async def scenario() -> None:
        async with open_rig(tokens_per_s=50, stream={"window": window}) as r:
            stream, reader = await r.open("hello", max_tokens=80, attendance=attendance)
            records: list[Any] = []
            for count, away_s in cuts:
                taken = await read_some(reader, min(count, 81 - len(records)))
                records += taken
                reader.close()
                await trio.sleep(away_s)
                reader = stream.attach(after=len(records))
            records += await read_some(reader, 81 - len(records))
            reader.close()
            assert [record.n for record in records] == list(range(1, 82))
            assert text(records) == generate("hello", 80)
            assert not isinstance(records[-1].event, Failed)
            assert made(r, stream) == 80

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


async def test_of_a_live_stream_whose_beginning_is_gone_the_key_is_told_which_it_is(autojump_clock: MockClock) -> None:
    async with open_rig(replay={"stream_records": 10}, tokens_per_s=10) as r:
        stream, reader = await ask(r, max_tokens=200)
        await read_some(reader, 50)
        with pytest.raises(ResumeWindowLost) as caught:
            await ask(r, max_tokens=200)
        assert caught.value.details["id"] == stream.identity.id
        reader.close()
