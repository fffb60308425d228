"""Engines of generators: always closed, in the right place; and the base of loop engines."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tokenflow.api import (
    Engine,
    EngineClosed,
    EngineInfo,
    EngineStuck,
    Finished,
    InvalidRequest,
    LoopEngine,
    SequenceRequest,
    StepLoop,
    engine_from_blocking_iterator,
    engine_from_generator,
    serving,
)
from tokenflow.testing.fakes import Recorder, company, record
from tokenflow.testing.steppers import PlainStepper

INFO = EngineInfo(model="test", context_length=100, slots=1)
Ask = Callable[..., SequenceRequest]


class Letters:
    """Generator functions that say where they are."""

    def __init__(self, text: str = "abcdef") -> None:
        self.text = text
        self.log: list[str] = []
        self.prompts: list[str] = []

    async def say(self, prompt: str, request: SequenceRequest) -> AsyncIterator[str]:
        self.prompts.append(prompt)
        self.log.append("open")
        try:
            for letter in self.text:
                yield letter
        finally:
            self.log.append("close")

    def say_blocking(self, prompt: str, request: SequenceRequest) -> Iterator[bytes]:
        self.prompts.append(prompt)
        self.log.append("open")
        try:
            for letter in self.text:
                yield letter.encode()
        finally:
            self.log.append("close" if threading.current_thread() is not threading.main_thread() else "close in trio")


@pytest.fixture(params=["async", "blocking"])
def letters(request: pytest.FixtureRequest) -> tuple[Letters, Engine]:
    letters = Letters()
    if request.param == "async":
        return letters, engine_from_generator(letters.say, info=INFO)
    return letters, engine_from_blocking_iterator(letters.say_blocking, info=INFO)


async def test_it_ends_with_the_generator(letters: tuple[Letters, Engine], ask: Ask) -> None:
    said, engine = letters
    recorder = await record(engine, SequenceRequest(prompt=tuple("é?".encode()), max_tokens=50))
    assert (recorder.text, recorder.finished, recorder.tokens) == ("abcdef", Finished("stop"), 6)
    assert said.prompts == ["é?"]
    assert said.log == ["open", "close"]


async def test_it_is_closed_at_the_length(letters: tuple[Letters, Engine], ask: Ask) -> None:
    said, engine = letters
    recorder = await record(engine, ask(max_tokens=3))
    assert (recorder.text, recorder.finished) == ("abc", Finished("length"))
    assert said.log == ["open", "close"]


async def test_it_is_closed_at_a_stop_string(letters: tuple[Letters, Engine], ask: Ask) -> None:
    said, engine = letters
    recorder = await record(engine, ask(max_tokens=9, stop=("cd",)))
    assert (recorder.text, recorder.finished) == ("ab", Finished("stop"))
    assert said.log == ["open", "close"]


async def test_it_is_closed_at_a_cancel(letters: tuple[Letters, Engine], ask: Ask) -> None:
    said, engine = letters
    async with company(engine) as group:
        stalled = group.start(ask(max_tokens=9), Recorder(window=2, follow=False))
        await stalled.wait_deltas(2)
        await wait_all_tasks_blocked()
        assert (await engine.stats()).generated_tokens == 2, "nothing is made that cannot be sent"
        stalled.scope.cancel()
        await stalled.returned.wait()
        assert said.log == ["open", "close"]
        assert stalled.text == "ab"
        assert (await engine.stats()).slots_used == 0


async def test_an_item_that_a_cancel_overtakes_is_counted(ask: Ask) -> None:
    async def say(prompt: str, request: SequenceRequest) -> AsyncIterator[str]:
        yield "a"
        victim.scope.cancel()
        yield "b"
        raise AssertionError("it goes on")

    victim = Recorder()
    engine = engine_from_generator(say, info=INFO)
    await victim.play(engine, ask())
    assert victim.scope.cancelled_caught
    assert (victim.text, victim.send.dropped) == ("a", 1)
    assert (await engine.stats()).generated_tokens == 2


async def test_what_it_raises_ends_it_alone(ask: Ask) -> None:
    async def fail(prompt: str, request: SequenceRequest) -> AsyncIterator[str]:
        yield "a"
        raise ZeroDivisionError

    def fail_blocking(prompt: str, request: SequenceRequest) -> Iterator[str]:
        raise ZeroDivisionError

    for engine in (engine_from_generator(fail, info=INFO), engine_from_blocking_iterator(fail_blocking, info=INFO)):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await record(engine, ask(max_tokens=9))


async def test_a_plain_iterator_will_do(ask: Ask) -> None:
    class Plain:
        def __aiter__(self) -> Plain:
            return self

        async def __anext__(self) -> str:
            return "x"

    engine = engine_from_generator(lambda prompt, request: Plain(), info=INFO)
    assert (await record(engine, ask(max_tokens=3))).text == "xxx"
    engine = engine_from_blocking_iterator(lambda prompt, request: iter(["a", "b"]), info=INFO)
    assert (await record(engine, ask(max_tokens=3))).text == "ab"


async def test_a_token_that_is_no_byte_is_refused_before_it_has_a_slot(letters: tuple[Letters, Engine]) -> None:
    said, engine = letters
    recorder = Recorder()
    with pytest.raises(InvalidRequest, match="300 is not a byte"):
        await record(engine, SequenceRequest(prompt=(300,), max_tokens=1), recorder)
    assert recorder.events == []
    assert said.log == []


async def test_what_the_adapters_add_to_info(letters: tuple[Letters, Engine]) -> None:
    _, engine = letters
    assert engine.info.capabilities == {"stop", "pause"}
    assert engine.info.vocab_size == 256
    assert isinstance(engine, Engine)


async def test_a_blocked_iterator_is_left_behind_and_keeps_its_slot(ask: Ask, mock_clock: MockClock) -> None:
    began, go_on = threading.Event(), threading.Event()
    log: list[str] = []
    closed = threading.Semaphore(0)

    def block(prompt: str, request: SequenceRequest) -> Iterator[str]:
        try:
            if not log:
                log.append("blocks")
                began.set()
                go_on.wait()
            yield "a"
        finally:
            closed.release()

    engine = engine_from_blocking_iterator(block, info=INFO, grace_s=5)
    async with company(engine) as group:
        victim = group.start(ask())
        await trio.to_thread.run_sync(began.wait)
        victim.scope.cancel()
        await wait_all_tasks_blocked()
        mock_clock.jump(4.9)
        await wait_all_tasks_blocked()
        assert not victim.returned.is_set()
        mock_clock.jump(0.2)
        await victim.returned.wait()
        assert isinstance(victim.error, EngineStuck)
        heir = group.start(ask(max_tokens=1))
        await wait_all_tasks_blocked()
        assert heir.events == []
        assert (await engine.stats()).slots_used == 1
        go_on.set()
        await heir.returned.wait()
        assert heir.text == "a"
    for _ in range(2):  # the thread that was left behind closes its own in its own time
        assert await trio.to_thread.run_sync(closed.acquire, True, 10.0)


async def test_a_cancelled_next_that_comes_back_is_no_fault(ask: Ask, mock_clock: MockClock) -> None:
    began, go_on = threading.Event(), threading.Event()
    closed = threading.Event()

    def block(prompt: str, request: SequenceRequest) -> Iterator[str]:
        try:
            began.set()
            go_on.wait()
            yield "a"
        finally:
            closed.set()

    engine = engine_from_blocking_iterator(block, info=INFO)
    async with company(engine) as group:
        victim = group.start(ask())
        await trio.to_thread.run_sync(began.wait)
        victim.scope.cancel()
        await wait_all_tasks_blocked()
        go_on.set()
        await victim.returned.wait()
        assert victim.scope.cancelled_caught
        assert victim.error is None
        assert victim.text == ""
        assert closed.is_set()
        assert (await engine.stats()).slots_used == 0


class SlowToClose:
    """Two items, and a `close` that waits."""

    def __init__(self) -> None:
        self.items = iter(["a", "b"])
        self.closing, self.go_on = threading.Event(), threading.Event()
        self.closed = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self.items)

    def close(self) -> None:
        self.closed += 1
        self.closing.set()
        self.go_on.wait(10.0)


@pytest.mark.parametrize("end", [Finished("stop"), Finished("length"), None])
async def test_one_that_is_slow_to_close_keeps_its_slot_and_fails_nobody_who_has_ended(
    ask: Ask, mock_clock: MockClock, caplog: pytest.LogCaptureFixture, end: Finished | None
) -> None:
    slow = SlowToClose()
    sources = [slow, iter("c")]
    engine = engine_from_blocking_iterator(lambda prompt, request: sources.pop(0), info=INFO, grace_s=5)
    async with company(engine) as group:
        request = ask(max_tokens=2 if end == Finished("length") else 9)
        first = group.start(request, Recorder(window=3 if end else 1, follow=False))
        if end is None:
            await first.wait_deltas(1)
            first.scope.cancel()
        await trio.to_thread.run_sync(slow.closing.wait)
        await wait_all_tasks_blocked()
        assert first.finished == end and not first.returned.is_set()
        mock_clock.jump(5.1)
        await first.returned.wait()
        if end is None:  # then it has not ended, and its slot is not to be trusted
            assert isinstance(first.error, EngineStuck)
        else:
            assert first.error is None and first.text == "ab"
            (line,) = [record.getMessage() for record in caplog.records]
            assert line == f"{request.id}: its iterator has not closed after 5 s; its slot stays taken until it has"
        heir = group.start(ask())
        await wait_all_tasks_blocked()
        assert heir.events == [] and (await engine.stats()).slots_used == 1
        slow.go_on.set()
        await heir.returned.wait()
        assert heir.text == "c"
    assert slow.closed == 1


async def test_a_close_that_fails_says_so(ask: Ask) -> None:
    class Faulty(SlowToClose):
        def close(self) -> None:
            raise ZeroDivisionError

    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        await record(engine_from_blocking_iterator(lambda p, r: Faulty(), info=INFO), ask(), recorder)
    assert recorder.finished == Finished("stop")


class Plain(LoopEngine):
    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    async def detokenize(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


async def test_a_loop_engine_brings_the_loops_numbers(ask: Ask, autojump_clock: MockClock) -> None:
    async def pace(loop: StepLoop) -> None:
        await trio.sleep(1)

    loop = StepLoop(PlainStepper(slots=1))
    engine = Plain(loop, INFO)
    assert engine.info.capabilities == {"stop", "pause"}
    async with serving(loop, pace=pace), company(engine) as group:
        first = group.start(ask(), Recorder(window=2, follow=False))
        await first.wait_deltas(2)
        group.start(ask())
        await trio.sleep(10)
        stats = await engine.stats()
        assert (stats.slots, stats.slots_used, stats.waiting, stats.paused) == (1, 1, 1, 1)
        assert (stats.generated_tokens, stats.steps, stats.step_age_s) == (2, 3, 0.0)


async def test_a_loop_that_ends_cancels_what_runs_on_it(ask: Ask, autojump_clock: MockClock) -> None:
    async def fail(loop: StepLoop) -> None:
        raise ZeroDivisionError

    loop, recorder = StepLoop(PlainStepper()), Recorder()
    async with trio.open_nursery() as nursery:
        with pytest.raises(ZeroDivisionError):
            async with serving(loop, pace=fail):
                nursery.start_soon(recorder.play, loop, ask())
                await trio.sleep_forever()
    assert isinstance(recorder.error, EngineClosed)
