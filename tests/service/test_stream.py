"""The life of a stream, in mock time."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate
from trio.testing import MockClock

from tests.service.conftest import STEP_S, open_rig, read_all
from tokenflow.api import EngineInfo, EngineStats, Send, SequenceRequest, Started
from tokenflow.cli.logs import OneLine
from tokenflow.config.model import DefaultsConfig
from tokenflow.core.lifecycle import Admitted, FirstToken, SlotTaken
from tokenflow.core.states import Phase
from tokenflow.core.types import Delta
from tokenflow.dialects.openai_completions import CompletionsEncoder
from tokenflow.errors import Draining, EngineError, EngineStuck, QueueFull, StartupError
from tokenflow.service.records import Ended, Failed


def directive(**keys: Any) -> str:
    return json.dumps({"synthetic": keys})


async def test_it_generates_what_the_engine_says(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        assert await r.whole("hello", max_tokens=20) == generate("hello", 20)
        await r.settle()
        [admitted, slot, first, ended] = r.sink.events
        assert isinstance(admitted, Admitted) and isinstance(slot, SlotTaken) and isinstance(first, FirstToken)
        assert (ended.reason, ended.by, ended.phase) == ("length", "engine", "decode")
        assert (ended.generated_tokens, ended.delivered_tokens, ended.after_leaving_tokens) == (20, 20, 0)
        assert sum(ended.gaps.counts) == 19


async def test_the_end_is_one_record_and_the_last(autojump_clock: MockClock) -> None:
    async with open_rig(slots=3) as r:
        _, reader = await r.open(max_tokens=5, n=3)
        events = await read_all(reader)
        assert [source for source, event in events if isinstance(event, Delta)].count(2) == 5
        assert isinstance(events[-1][1], Ended)
        assert events[-1][1].reasons == ("length",) * 3
        assert events[-1][1].usage.completion == 15
        assert sum(isinstance(event, Ended | Failed) for _, event in events) == 1


SPANS = {
    "queue_timeout": {"slots": 1},
    "prefill_timeout": {"prefill_ms": 10_000_000},
    "idle_timeout": {"hang_at": 3},
    "total_timeout": {"tokens_per_s": 1},
}


@pytest.mark.parametrize("code", SPANS)
async def test_each_timeout_fires_to_the_tick_and_under_its_name(autojump_clock: MockClock, code: str) -> None:
    async with open_rig(timeouts={f"{code}_s": 8.0}, **SPANS[code]) as r:
        if code == "queue_timeout":
            _, hog = await r.open(directive(hang_at=1))
            await trio.sleep(1)
        began = trio.current_time()
        stream, reader = await r.open()
        last_token_at = began
        while records := await reader.read():
            if isinstance(records[-1].event, Delta):
                last_token_at = trio.current_time()
            elif isinstance(records[-1].event, Failed):
                error = records[-1].event.error
            reader.ack(records[-1].n)
        reader.close()
        counted_from = last_token_at if code == "idle_timeout" else began
        assert error.code == code
        # A batch step may be in progress: the record comes when the slot is free.
        assert 8.0 <= trio.current_time() - counted_from <= 8.0 + STEP_S * 1.001
        if code == "queue_timeout":
            assert trio.current_time() - began == 8.0
            hog.close()
        await r.settle()
        record = r.sink.ended(stream.identity.id)
        assert (record.reason, record.code, record.by) == ("error", code, "server")


async def test_idle_is_suspended_for_a_reader_that_takes_nothing_and_total_is_not(autojump_clock: MockClock) -> None:
    async with open_rig(timeouts={"idle_timeout_s": 2.0, "total_timeout_s": 60.0}, stream={"window": 8}) as r:
        began = trio.current_time()
        _, reader = await r.open(max_tokens=1000)
        await trio.sleep(30)
        records = await reader.read()
        assert len(records) == 8, "the engine is exactly a window ahead"
        reader.ack(records[-1].n)
        await trio.sleep(1)
        assert len(await reader.read()) == 8
        await trio.sleep(28)
        events = await read_all(reader)
        assert events[-1][1].error.code == "total_timeout"
        assert 0 <= trio.current_time() - began - 60.0 <= STEP_S  # the step that was being taken


async def test_idle_starts_afresh_when_a_stalled_reader_takes_again(autojump_clock: MockClock) -> None:
    async with open_rig(timeouts={"idle_timeout_s": 2.0}, stream={"window": 4}, hang_at=4) as r:
        _, reader = await r.open()
        await trio.sleep(30)
        records = await reader.read()
        taken_at = trio.current_time()
        reader.ack(records[-1].n)
        events = await read_all(reader)
        assert events[-1][1].error.code == "idle_timeout"
        assert 2.0 <= trio.current_time() - taken_at <= 2.0 + STEP_S * 1.001


@pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.PREFILL, Phase.DECODE])
async def test_a_reader_that_leaves_frees_the_slot_within_a_step(autojump_clock: MockClock, phase: Phase) -> None:
    engine = {"prefill_ms": 20_000} if phase is Phase.PREFILL else {}
    async with open_rig(slots=1, tokens_per_s=20, **engine) as r:
        if phase is Phase.QUEUE:
            _, hog = await r.open()
        stream, reader = await r.open("the victim")
        await trio.sleep(1)
        assert stream.phase is phase
        made = r.engine.stepper.made.get(stream.identity.id, 0)
        left_at = trio.current_time()
        reader.close()
        await trio.testing.wait_all_tasks_blocked()
        assert r.service.model("").admission.waiting == 0, "the waiting gauge falls at once"
        while phase is not Phase.QUEUE and r.engine.stepper.rows:
            await trio.sleep(STEP_S / 10)
        assert trio.current_time() - left_at <= STEP_S * 1.001
        if phase is Phase.QUEUE:
            hog.close()
        await r.settle()
        record = r.sink.ended(stream.identity.id)
        assert (record.reason, record.by, record.phase) == ("disconnected", "client", phase.value)
        assert r.engine.stepper.made.get(stream.identity.id, 0) <= made + 1
        assert record.after_leaving_tokens <= 1
        assert record.generated_tokens == r.engine.stepper.made.get(stream.identity.id, 0)
        assert (stream.identity.id in r.engine.stepper.made) is (phase is not Phase.QUEUE), (
            "it never reached the engine"
        )
        assert await r.whole("next", max_tokens=3) == generate("next", 3)


async def test_a_reader_that_leaves_before_the_stream_has_run_at_all(autojump_clock: MockClock) -> None:
    async with open_rig(slots=1) as r:
        stream, reader = await r.open()
        reader.close()
        await r.settle()
        assert r.sink.ended(stream.identity.id).generated_tokens == 0
        assert await r.whole("next", max_tokens=3) == generate("next", 3)


async def test_backpressure_holds_one_stream_and_no_other(autojump_clock: MockClock) -> None:
    async with open_rig(slots=2, stream={"window": 16}) as r:
        stalled, reader = await r.open(max_tokens=500)
        began = trio.current_time()
        await r.whole("the other", max_tokens=500)
        assert trio.current_time() - began <= 502 * STEP_S, "the other lost no step"
        assert r.engine.stepper.made[stalled.identity.id] == 16
        assert (await r.engine.stats()).paused == 1
        text = "".join(e.text for _, e in await read_all(reader) if isinstance(e, Delta))
        assert text == generate("a prompt", 500), "and it lost no token"


async def test_n_choices_take_n_slots_at_once_and_nobody_overtakes(autojump_clock: MockClock) -> None:
    async with open_rig(slots=3, tokens_per_s=10) as r:
        order: list[str] = []

        async def run(name: str, tokens: int, n: int) -> None:
            stream, reader = await r.open(name, max_tokens=tokens, n=n)
            while stream.phase is Phase.QUEUE:
                await trio.sleep(STEP_S)
            order.append(name)
            await read_all(reader)

        async with trio.open_nursery() as nursery:
            for name, tokens, n in [("one", 20, 1), ("two", 10, 1), ("three", 5, 3), ("four", 5, 1)]:
                nursery.start_soon(run, name, tokens, n)
                await trio.sleep(STEP_S)
        assert order == ["one", "two", "three", "four"]


async def test_a_full_waiting_room_refuses_at_once(autojump_clock: MockClock) -> None:
    async with open_rig(slots=2, limits={"max_waiting": 4}, tokens_per_s=10) as r:
        admitted, refused = [], 0
        for _ in range(20):
            try:
                admitted.append(await r.open(max_tokens=5))
            except QueueFull as exc:
                assert exc.retry_after_s
                refused += 1
        assert (len(admitted), refused) == (6, 14)
        for _, reader in admitted:
            assert isinstance((await read_all(reader))[-1][1], Ended)


async def test_one_that_fails_ends_alone(autojump_clock: MockClock) -> None:
    async with open_rig(slots=3) as r:
        results: dict[int, list[tuple[int, Any]]] = {}

        async def run(i: int) -> None:
            _, reader = await r.open(directive(raise_at=4) if i == 1 else f"prompt {i}", max_tokens=10)
            results[i] = await read_all(reader)

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(run, i)
        assert isinstance(results[1][-1][1], Failed) and results[1][-1][1].error.code == "engine_error"
        assert len(results[1]) == 5
        assert isinstance(results[0][-1][1], Ended) and isinstance(results[2][-1][1], Ended)
        assert await r.service.not_ready() is None


async def test_a_choice_that_fails_ends_its_request(autojump_clock: MockClock) -> None:
    async with open_rig(slots=2) as r:
        _, reader = await r.open(directive(raise_at=4), max_tokens=10, n=2)
        events = await read_all(reader)
        assert events[-1][1].error.code == "engine_error"
        await r.settle()
        assert not r.engine.stepper.rows


async def test_coalescing_gathers_for_the_span_and_loses_nothing(autojump_clock: MockClock) -> None:
    async with open_rig(tokens_per_s=100) as r:
        _, reader = await r.open("hello", max_tokens=50, coalesce_ms=100)
        events = await read_all(reader)
        deltas = [e for _, e in events if isinstance(e, Delta)]
        assert "".join(d.text for d in deltas) == generate("hello", 50)
        assert sum(d.tokens for d in deltas) == 50
        assert 5 <= len(deltas) <= 8
        await r.settle()


async def test_coalescing_does_not_slow_the_engine_and_the_window_counts_records(autojump_clock: MockClock) -> None:
    async with open_rig(stream={"window": 8}, tokens_per_s=100) as r:
        _, reader = await r.open("hello", max_tokens=100, coalesce_ms=1000)
        text = "".join(e.text for _, e in await read_all(reader) if isinstance(e, Delta))
        assert text == generate("hello", 100)
        assert trio.current_time() < 1.2
        _, reader = await r.open("hello", max_tokens=1000, coalesce_ms=100)
        await trio.sleep(30)
        assert len(await reader.read()) == 8, "a reader that takes nothing stops it as ever"
        reader.close()


async def test_each_tokens_place_in_the_text_is_known(autojump_clock: MockClock) -> None:
    """Also behind characters of several tokens."""
    async with open_rig(one_byte=True, text="wé 👋!") as r:
        _, reader = await r.open(max_tokens=20, logprobs=0)
        deltas = [event for _, event in await read_all(reader) if isinstance(event, Delta)]
    encoder = CompletionsEncoder("id", "m", 0, include_usage=False)
    frames = b"".join([encoder.delta(0, delta) for delta in deltas])
    said = [json.loads(line[6:])["choices"][0] for line in frames.decode().split("\n") if line]
    text = "".join(choice["text"] for choice in said)
    tokens = [token for choice in said for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in said for offset in choice["logprobs"]["text_offset"]]
    assert text == "wé 👋!"
    assert offsets == [0, 1, 2, 2, 3, 4, 4, 4, 4]
    whole = [(token, offset) for token, offset in zip(tokens, offsets, strict=True) if token.isascii()]
    assert [text[offset] for _, offset in whole] == [token for token, _ in whole] == ["w", " ", "!"]


async def test_n_choices_share_one_window(autojump_clock: MockClock) -> None:
    async with open_rig(slots=3, stream={"window": 18}) as r:
        stream, reader = await r.open(max_tokens=100, n=3)
        await trio.sleep(10)
        assert r.engine.stepper.made[stream.identity.id] == 18
        assert [event.tokens for _, event in await read_all(reader) if isinstance(event, Delta)] == [1] * 300


class OneFunction:
    """As much of an engine as a stream meets: `generate`."""

    def __init__(self, generate: Callable[[SequenceRequest, Send], Awaitable[None]], slots: int) -> None:
        self.generate = generate
        self.info = EngineInfo(model="m", context_length=100, slots=slots)

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return [1]

    async def detokenize(self, tokens: list[int]) -> str:
        return ""

    async def stats(self) -> EngineStats:
        return EngineStats()


def opener(generate: Callable[[SequenceRequest, Send], Awaitable[None]], slots: int) -> Any:
    @asynccontextmanager
    async def open_engine(config: object) -> AsyncIterator[OneFunction]:
        yield OneFunction(generate, slots)

    return open_engine


async def test_a_default_that_the_engine_cannot_do_is_told_at_the_start() -> None:
    async def generate(request: SequenceRequest, send: Send) -> None:
        pytest.fail("it has started")

    told = pytest.RaisesExc(
        StartupError, match="model 'm': its engine cannot do min_p; take that out of its `defaults`"
    )
    with pytest.RaisesGroup(told, flatten_subgroups=True, allow_unwrapped=True):
        async with open_rig(open_engine=opener(generate, 1), defaults=DefaultsConfig(top_p=1, min_p=0.1)):
            pytest.fail("it has started")


async def test_an_event_after_the_deadline_does_not_rename_it(autojump_clock: MockClock) -> None:
    async def generate(request: SequenceRequest, send: Send) -> None:
        """A token while it is being cancelled, against the contract."""
        send.send_nowait(Started(1))
        try:
            await trio.sleep_forever()
        finally:
            send.send_nowait(Delta("late"))

    async with open_rig(open_engine=opener(generate, slots=1), timeouts={"prefill_timeout_s": 2.0}) as r:
        _, reader = await r.open()
        assert (await read_all(reader))[-1][1].error.code == "prefill_timeout"


WAYS_TO_END = {"idle_timeout": "error", "cancelled": "cancelled", "left": "disconnected", "draining": "error"}


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("fault", [EngineStuck("It hangs in its step."), ValueError("It cannot be cancelled.")])
@pytest.mark.parametrize("way", WAYS_TO_END)
async def test_an_engine_that_does_not_let_go_does_not_rename_it(
    autojump_clock: MockClock, way: str, fault: Exception, choices: int
) -> None:
    """What a client is told is why it ended; that the engine is stuck is its host's affair."""

    async def generate(request: SequenceRequest, send: Send) -> None:
        send.send_nowait(Started(1))
        send.send_nowait(Delta("said"))
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            raise fault

    # The total timeout passes too, before the engine is given up.
    async with open_rig(
        open_engine=opener(generate, slots=2), timeouts={"idle_timeout_s": 2.0, "total_timeout_s": 4.0}
    ) as r:
        stream, reader = await r.open(n=choices)
        await trio.sleep(1)
        if way == "cancelled":
            stream.cancel("client")
        elif way == "left":
            reader.close()
        elif way == "draining":
            stream.cancel("server", Draining("It goes down."))
        end = Ended(("cancelled",) * choices, stream.state.usage)
        if way != "left":
            *_, (_, end) = await read_all(reader)
        await r.settle()
        record = r.sink.ended(stream.identity.id)
        assert record.reason == WAYS_TO_END[way]
        if WAYS_TO_END[way] == "error":
            assert isinstance(end, Failed) and end.error.code == record.code == way
        else:
            assert isinstance(end, Ended) and end.reasons == ("cancelled",) * choices and record.code is None
        await trio.sleep(1)
        assert r.service.model("m").host.openings == (2 if isinstance(fault, EngineStuck) else 1)


async def test_who_is_stuck_in_an_engine_that_was_given_up_does_no_harm_to_the_next(autojump_clock: MockClock) -> None:
    async def generate(request: SequenceRequest, send: Send) -> None:
        send.send_nowait(Started(1))
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            raise EngineStuck("It hangs in its step.")

    async with open_rig(open_engine=opener(generate, slots=2)) as r:
        for _ in range(2):
            _, reader = await r.open()
            await trio.sleep(3)
            reader.close()
        await trio.sleep(4)  # the first was stuck 2 s ago
        second = r.service.model("m").engine
        await r.settle()
        await trio.sleep(10)
        assert r.service.model("m").engine is second


@pytest.mark.parametrize("then", ["idle_timeout", "left"])
async def test_what_follows_an_engines_failure_does_not_rename_it(autojump_clock: MockClock, then: str) -> None:
    async def generate(request: SequenceRequest, send: Send) -> None:
        send.send_nowait(Started(1))
        send.send_nowait(Delta("said"))
        if request.index == 1:
            await trio.sleep(1)
            raise EngineError("It broke.")
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)

    async with open_rig(
        open_engine=opener(generate, slots=2), timeouts={"idle_timeout_s": 2.0 if then != "left" else 99.0}
    ) as r:
        stream, reader = await r.open(n=2)
        await trio.sleep(3)
        reader.close()
        await r.settle()
        record = r.sink.ended(stream.identity.id)
        assert (record.reason, record.code, record.by) == ("error", "engine_error", "engine")


@pytest.mark.parametrize("n", [1, 3])
async def test_a_fault_in_an_engines_code_is_logged_once_with_its_place(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    async def generate(request: SequenceRequest, send: Send) -> None:
        raise NameError("name 'promt' is not defined")

    async with open_rig(open_engine=opener(generate, slots=n)) as r:
        _, reader = await r.open(n=n)
        assert (await read_all(reader))[-1][1].error.message.endswith("NameError: name 'promt' is not defined")
    (line,) = [OneLine(traces=False).format(record) for record in caplog.records if record.levelno == logging.ERROR]
    assert "the engine failed (NameError: name 'promt' is not defined at " in line and __file__ in line


async def test_an_engines_error_that_cannot_say_what_it_is_ends_its_stream_alone(autojump_clock: MockClock) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    async def generate(request: SequenceRequest, send: Send) -> None:
        raise Mute

    async with open_rig(open_engine=opener(generate, slots=1)) as r:
        for _ in range(2):
            _, reader = await r.open()
            failed = (await read_all(reader))[-1][1]
            assert failed.error.message == "The engine failed: Mute: its text cannot be had"


async def test_draining_refuses_new_work_and_ends_old_work_in_time(autojump_clock: MockClock) -> None:
    async with open_rig(server={"drain_s": 5.0}, tokens_per_s=10) as r, trio.open_nursery() as nursery:
        long, reader = await r.open(max_tokens=1000)
        nursery.start_soon(r.service.drain)
        await trio.sleep(1)
        with pytest.raises(Draining):
            await r.open()
        events = await read_all(reader)
        assert trio.current_time() <= 5.0 + STEP_S * 1.001
        assert events[-1][1].error.code == "draining"
        await r.settle()
        assert r.sink.ended(long.identity.id).by == "server"


async def test_a_service_that_is_cancelled_still_writes_every_record(autojump_clock: MockClock) -> None:
    with trio.CancelScope() as scope:
        async with open_rig(tokens_per_s=10) as r:
            stream, _ = await r.open(max_tokens=1000)
            await trio.sleep(1)
            scope.cancel()
            await trio.sleep(1)
    record = r.sink.ended(stream.identity.id)
    assert (record.code, record.by) == ("draining", "server")
    assert record.generated_tokens >= 9


async def test_an_engine_that_breaks_lets_its_streams_go_and_comes_back(autojump_clock: MockClock) -> None:
    async with open_rig(slots=2) as r:
        _, good = await r.open(max_tokens=1000)
        _, bad = await r.open(directive(break_at=3), max_tokens=10)
        for reader in (good, bad):
            assert (await read_all(reader))[-1][1].error.code == "engine_error"
        assert await r.whole("next", max_tokens=3) == generate("next", 3)
