"""The step loop in both drivers, in mock time: order, credit, failures, ends."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tokenflow.api import (
    Delta,
    EngineClosed,
    EngineError,
    Event,
    Finished,
    Released,
    Resumed,
    Send,
    Sequence,
    SequenceRequest,
    Started,
    StartupError,
    Step,
    StepLoop,
    serving,
)
from tokenflow.api.loop import DRAIN_EVENTS
from tokenflow.testing.fakes import Recorder, company, record
from tokenflow.testing.steppers import PlainStepper

STEP_S = 0.1
Ask = Callable[..., SequenceRequest]
Open = Any


async def pace(loop: StepLoop) -> None:
    await trio.sleep(STEP_S)


def says(n: int) -> str:
    return "".join(f"t{i} " for i in range(n))


async def test_more_sequences_than_slots(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper(slots=2)
    async with open_loop(stepper) as loop, company(loop) as group:
        recorders = [group.start(ask(prompt=6, max_tokens=7)) for _ in range(7)]
        for recorder in recorders:
            await recorder.returned.wait()
            assert recorder.events[0] == Started(6)
            assert recorder.text == says(7)
            assert recorder.events[-1] == Finished("length")
            assert len(recorder.events) == 9
    assert stepper.log[0] == "open"
    assert stepper.log[-1] == "close"
    assert stepper.log.count("add") == stepper.log.count("remove") == 7
    assert loop.generated == 49


class Borrowing(PlainStepper):
    """One slot, which whoever is parked lends to who waits."""

    refused = 0

    def add(self, seq: Sequence) -> bool:
        for other in [other for other in self.used if other.parked]:
            self.remove(other)
        if super().add(seq):
            return True
        self.refused += 1
        if self.refused == 5:
            for other in self.used:
                other.limit = other.emitted  # a pause that comes just now
        return False

    def remove(self, seq: Sequence) -> None:
        if seq in self.used:
            super().remove(seq)


async def test_who_waits_is_asked_again_when_somebody_is_parked(
    open_loop: Open, ask: Ask, autojump_clock: MockClock
) -> None:
    async with open_loop(Borrowing(slots=1)) as loop, company(loop) as group:
        holder = group.start(ask(prompt=1_000_000))  # prefills for the whole of this test
        await holder.wait_started()
        waiting = group.start(ask(max_tokens=3))
        with trio.fail_after(100 * STEP_S):
            await waiting.returned.wait()
        assert waiting.finished is not None


class Releasing(PlainStepper):
    can_release = True

    def release(self, seq: Sequence) -> None:
        self.remove(seq)


@pytest.mark.interpreted
async def test_a_slot_that_comes_free_for_one_that_has_just_been_cancelled_is_nobodys(
    ask: Ask, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = StepLoop(Releasing(slots=1))
    async with serving(loop, pace=pace), company(loop) as group:
        victim = group.start(ask(max_tokens=50), Recorder(window=2, follow=False))
        await victim.wait_deltas(2)
        victim.accept(2)
        victim.send.give_up_slot()
        await victim.until(lambda recorder: isinstance(recorder.events[-1], Released))
        post = loop._post

        def post_and_take(command: str, seq: Sequence) -> None:
            post(command, seq)
            if command == "cancel":
                victim.send.take_slot()  # another's has come free at this very moment

        monkeypatch.setattr(loop, "_post", post_and_take)
        victim.scope.cancel()
        await victim.returned.wait()
        other = group.start(ask(max_tokens=3))
        await other.returned.wait()
        assert other.finished is not None and loop.held == 0


async def test_what_is_kept_of_a_released_sequence_goes_with_it_when_it_is_cancelled(
    open_loop: Open, ask: Ask, autojump_clock: MockClock
) -> None:
    """The stepper is not asked to free it: it may hold no more than an object can."""

    class Keeping(Releasing):
        def add(self, seq: Sequence) -> bool:
            seq.data = {"kept"}
            kept.append(ref(seq.data))
            return super().add(seq)

    kept: list[ref[Any]] = []
    async with open_loop(stepper := Keeping()) as loop, company(loop) as group:
        victim = group.start(ask(max_tokens=9), Recorder(window=2, follow=False))
        await victim.wait_deltas(2)
        victim.send.give_up_slot()
        await victim.until(partial(gave_up, 1))
        calls = list(stepper.log)
        assert kept[0]() == {"kept"}
        victim.scope.cancel()
        await victim.returned.wait()
        assert stepper.log == calls
        assert kept[0]() is None


async def test_one_that_comes_back_and_is_refused_leaves_nothing(
    open_loop: Open, ask: Ask, autojump_clock: MockClock
) -> None:
    stepper = Releasing(slots=1)
    add = stepper.add

    def refuse(seq: Sequence) -> bool:
        if seq.generated:
            raise EngineError("not again")
        return add(seq)

    stepper.add = refuse  # type: ignore[method-assign]
    async with open_loop(stepper) as loop, company(loop) as group:
        victim = group.start(ask(max_tokens=9), Recorder(window=2, follow=False))
        await victim.wait_deltas(2)
        victim.send.give_up_slot()
        await victim.until(lambda recorder: isinstance(recorder.events[-1], Released))
        assert list(loop._away)
        victim.send.take_slot()
        victim.catch_up()
        await victim.returned.wait()
        assert isinstance(victim.error, EngineError)
        assert not loop._away


def gave_up(n: int, recorder: Recorder) -> bool:
    return sum(isinstance(event, Released) for event in recorder.events) == n


async def test_who_is_asked_for_its_slot_again_before_it_has_one_answers_again(
    open_loop: Open, ask: Ask, autojump_clock: MockClock
) -> None:
    """Called back and asked again at once, or while it waits for somebody else's slot."""
    async with open_loop(Releasing(slots=1)) as loop, company(loop) as group:
        slow = group.start(ask(max_tokens=9), Recorder(window=2, follow=False))
        await slow.wait_deltas(2)
        slow.accept(3)
        slow.send.give_up_slot()
        with trio.fail_after(100 * STEP_S):
            await slow.until(partial(gave_up, 1))
            slow.send.take_slot()
            slow.send.give_up_slot()
            await slow.until(partial(gave_up, 2))
            holder = group.start(ask(max_tokens=2), Recorder(window=1, follow=False))
            await holder.wait_deltas(1)
            slow.accept(3)  # it may have gone on for a moment
            slow.send.take_slot()
            await trio.sleep(5 * STEP_S)
            assert loop.waiting == 1
            slow.send.give_up_slot()
            await slow.until(partial(gave_up, 3))
            assert loop.waiting == 0
            slow.send.take_slot()
            holder.catch_up()
            slow.catch_up()
            await slow.returned.wait()
        assert slow.text == says(9)
        assert any(isinstance(event, Resumed) for event in slow.events)


@pytest.mark.parametrize("early", [True, False])
async def test_who_is_asked_for_a_slot_that_it_never_had_answers_too(
    open_loop: Open, ask: Ask, autojump_clock: MockClock, early: bool
) -> None:
    async with open_loop(Releasing(slots=1)) as loop, company(loop) as group:
        holder = group.start(ask(max_tokens=2), Recorder(window=1, follow=False))
        await holder.wait_deltas(1)
        late = Recorder()
        if early:
            late.send.give_up_slot()
        group.start(ask(max_tokens=3), late)
        await trio.sleep(5 * STEP_S)
        late.send.give_up_slot()
        with trio.fail_after(100 * STEP_S):
            await late.until(partial(gave_up, 1))
            assert loop.waiting == 0
            late.send.take_slot()
            holder.catch_up()
            await late.returned.wait()
        assert late.events[:2] == [Released(), Started(1)]
        assert late.text == says(3)


async def test_a_quiet_loop_takes_no_steps(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    async with open_loop(PlainStepper()) as loop, company(loop) as group:
        stalled = group.start(ask(max_tokens=9), Recorder(window=2, follow=False))
        await stalled.wait_deltas(2)
        await trio.sleep(10)
        steps = loop.steps
        assert not loop.busy
        await trio.sleep(1000)
        assert loop.steps == steps
        assert (loop.held, loop.parked, loop.waiting) == (1, 1, 0)


async def test_who_is_parked_costs_the_others_no_step(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    async with open_loop(PlainStepper()) as loop, company(loop) as group:
        slow = group.start(ask(max_tokens=100), Recorder(window=4, follow=False))
        await slow.wait_deltas(4)
        before = loop.steps
        await record(loop, ask(prompt=0, max_tokens=100))
        assert loop.steps - before <= 102
        assert slow.send.sent == 4
        slow.catch_up()
        await slow.returned.wait()
        assert slow.text == says(100)


class Passes(trio.abc.Instrument):
    """Counts Trio's rounds: in each, everybody who can run does."""

    n = 0

    def after_io_wait(self, timeout: float) -> None:
        self.n += 1


async def test_others_are_served_while_a_great_many_tokens_are_handed_out(
    open_loop: Open, ask: Ask, autojump_clock: MockClock
) -> None:
    """Or a flood would keep whoever knocks at the door from ever being heard."""
    sequences, passes = 4 * DRAIN_EVENTS, Passes()
    handed_out: Counter[int] = Counter()
    trio.lowlevel.add_instrument(passes)

    def count(event: Event) -> None:
        handed_out[passes.n] += 1

    async with open_loop(PlainStepper(slots=sequences)) as loop, company(loop) as group:
        recorders = [group.start(ask(max_tokens=3), Recorder(on_event=count)) for _ in range(sequences)]
        for recorder in recorders:
            await recorder.returned.wait()
    assert handed_out.total() == 5 * sequences
    assert max(handed_out.values()) <= 2 * DRAIN_EVENTS


async def test_deltas_without_text_cost_no_credit(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper()
    letters = "🙂é".encode()
    stepper.token = lambda seq: Step(1, letters[seq.generated : seq.generated + 1])  # type: ignore[method-assign]
    async with open_loop(stepper) as loop, company(loop) as group:
        stalled = group.start(ask(max_tokens=len(letters)), Recorder(window=1, follow=False))
        await stalled.wait_deltas(4)
        await trio.sleep(10)
        assert [delta.text for delta in stalled.deltas] == ["", "", "", "🙂"]
        assert loop.parked == 1
        stalled.catch_up()
        await stalled.returned.wait()
        assert stalled.text == "🙂é"


async def test_pause_and_resume(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    async with open_loop(PlainStepper()) as loop, company(loop) as group:
        recorder = group.start(ask(max_tokens=2000), Recorder(window=8))
        await recorder.wait_deltas(5)
        recorder.send.pause()
        await trio.sleep(10)
        sent, steps = recorder.send.sent, loop.steps
        assert sent < 2000
        await trio.sleep(1000)
        assert (recorder.send.sent, loop.steps) == (sent, steps)
        recorder.send.resume()
        await recorder.returned.wait()
        assert recorder.text == says(2000)


async def test_a_refused_sequence_ends_alone(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper()
    add = stepper.add

    def refuse(seq: Sequence) -> bool:
        if seq.request.max_tokens == 3:
            raise EngineError("not this one")
        return add(seq)

    stepper.add = refuse  # type: ignore[method-assign]
    async with open_loop(stepper) as loop, company(loop) as group:
        recorders = [group.start(ask(max_tokens=n)) for n in (2, 3, 4)]
        for recorder in recorders:
            await recorder.returned.wait()
    assert [recorder.text for recorder in recorders] == [says(2), "", says(4)]
    assert isinstance(recorders[1].error, EngineError)
    assert recorders[1].events == []


async def test_a_failed_sequence_ends_alone(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper()
    error = EngineError("planned")
    token = stepper.token
    stepper.token = lambda seq: (  # type: ignore[method-assign]
        Step(error=error) if seq.request.id == "bad" and seq.generated == 2 else token(seq)
    )
    async with open_loop(stepper) as loop, company(loop) as group:
        good, bad = group.start(ask()), group.start(ask(id="bad"))
        await good.returned.wait()
        await bad.returned.wait()
        assert not stepper.used
    assert bad.error is error
    assert bad.text == says(2)
    assert bad.finished is None
    assert good.text == says(5)


async def test_a_step_that_raises_fails_all_that_hold_a_slot(
    open_loop: Open, ask: Ask, autojump_clock: MockClock
) -> None:
    stepper = PlainStepper(slots=2)
    step = stepper.step

    def failing(run: list[Sequence]) -> Iterable[tuple[Sequence, Step]]:
        if any(seq.request.id == "bad" and seq.generated == 3 for seq in run):
            raise ZeroDivisionError
        return step(run)

    stepper.step = failing  # type: ignore[method-assign]
    async with open_loop(stepper) as loop, company(loop) as group:
        parked = group.start(ask(), Recorder(window=1, follow=False))
        await parked.wait_deltas(1)
        bad = group.start(ask(id="bad"))
        await bad.wait_started()
        waiting = group.start(ask())
        for recorder in (parked, bad, waiting):
            await recorder.returned.wait()
        assert not stepper.used
    assert isinstance(parked.error, ZeroDivisionError)
    assert isinstance(bad.error, ZeroDivisionError)
    assert bad.text == says(3)
    assert waiting.text == says(5)


@pytest.mark.parametrize("from_step", [True, False])
async def test_each_is_told_of_a_common_failure_as_if_it_were_its_own(
    open_loop: Open, ask: Ask, autojump_clock: MockClock, from_step: bool
) -> None:
    """One exception is raised in every task: where each stands is not added up, nor kept by those who had it."""
    stepper, sends, traces = PlainStepper(slots=8), [Send(window=50) for _ in range(8)], []
    whole = stepper.step

    def failing(run: list[Sequence]) -> Iterable[tuple[Sequence, Step]]:
        if len(run) < 8:
            return whole(run)
        if from_step:
            raise ZeroDivisionError
        error = ZeroDivisionError()
        return [(seq, Step(error=error)) for seq in run]

    stepper.step = failing  # type: ignore[method-assign]

    async def attempt(send: Send) -> None:
        try:
            await loop.generate(ask(max_tokens=50), send)
        except ZeroDivisionError as exc:
            traces.append([frame.name for frame in traceback.extract_tb(exc.__traceback__)])

    gc.collect()
    gc.disable()
    try:
        async with open_loop(stepper) as loop:
            async with trio.open_nursery() as nursery:
                for send in sends:
                    nursery.start_soon(attempt, send)
            assert len(traces) == 8
            assert all(trace == traces[0] for trace in traces)
            assert traces[0].count("attempt") == 1 and ("failing" in traces[0]) is from_step
            assert not any(type(left) is Sequence and left.send in sends for left in gc.get_objects())
    finally:
        gc.enable()


async def test_after_a_failed_step_it_serves_on(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper()
    step, fails = stepper.step, [ValueError("cuda")]

    def failing(run: list[Sequence]) -> Iterable[tuple[Sequence, Step]]:
        yield from step(run)
        if fails:
            raise fails.pop()

    stepper.step = failing  # type: ignore[method-assign]
    async with open_loop(stepper) as loop:
        with pytest.raises(ValueError, match="cuda"):
            await record(loop, ask())
        assert not stepper.used
        assert (await record(loop, ask())).text == says(5)


async def test_a_reader_that_raises_ends_alone(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, Delta):
            raise ZeroDivisionError

    async with open_loop(PlainStepper()) as loop, company(loop) as group:
        good, bad = group.start(ask(max_tokens=20)), group.start(ask(max_tokens=20), Recorder(on_event=fail))
        await bad.returned.wait()
        await good.returned.wait()
        assert not loop.stepper.used
    assert isinstance(bad.error, ZeroDivisionError)
    assert len(bad.events) == 2
    assert good.text == says(20)


class Told(Send):
    """Calls `note` with each delta that is put, and whenever it is settled."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(window=100)
        self._note = note

    def _deliver(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._note("put")

    def settle(self) -> None:
        self._note("settled")


@pytest.mark.interpreted
async def test_what_a_step_made_is_put_for_all_before_any_is_settled(
    open_loop: Open, ask: Ask, autojump_clock: MockClock
) -> None:
    passes = Passes()
    trio.lowlevel.add_instrument(passes)
    notes: list[tuple[int, str]] = []
    async with open_loop(PlainStepper(slots=3)) as loop, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(loop.generate, ask(max_tokens=20), Told(lambda what: notes.append((passes.n, what))))
    assert notes == sorted(notes), "in each pass of the event loop first the one and then the other"
    puts = Counter(n for n, what in notes if what == "put")
    assert puts.total() == 60
    assert max(puts.values()) >= 3


@pytest.mark.interpreted
async def test_one_that_cannot_be_settled_ends_alone(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    failed = 0

    def fail(what: str) -> None:
        nonlocal failed
        if what == "settled" and send.sent:
            failed += 1
            raise ZeroDivisionError

    send = Told(fail)
    async with open_loop(PlainStepper()) as loop, company(loop) as group:
        good = group.start(ask(max_tokens=20))
        with pytest.raises(ZeroDivisionError):
            await loop.generate(ask(max_tokens=20), send)
        await good.returned.wait()
        assert not loop.stepper.used
    assert failed == 1
    assert good.text == says(20)


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_a_failed_open_comes_out_as_it_is(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper()

    def fail() -> None:
        raise StartupError("no such file")

    stepper.open = fail  # type: ignore[method-assign]
    with pytest.raises(StartupError, match="no such file"):
        async with open_loop(stepper):
            raise AssertionError("it never opened")
    assert stepper.log == []


async def test_after_a_failed_open_nobody_waits_for_ever(driver: str, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper()
    stepper.open = lambda: 1 / 0  # type: ignore[method-assign,assign,return-value]
    loop = StepLoop(stepper)
    with pytest.raises(ZeroDivisionError):
        async with serving(loop, pace=pace if driver == "task" else None):
            pass
    with pytest.raises(EngineClosed):
        await loop.generate(ask(), Recorder().send)


async def test_a_slot_that_cannot_be_freed_ends_the_loop(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper(slots=1)

    def fail(seq: Sequence) -> None:
        raise RuntimeError("dead")

    stepper.remove = fail  # type: ignore[method-assign]
    recorders = [Recorder() for _ in range(4)]
    async with trio.open_nursery() as nursery:
        with pytest.raises(EngineError, match="dead"):
            async with open_loop(stepper) as loop:
                for recorder in recorders:
                    nursery.start_soon(recorder.play, loop, ask())
                await trio.sleep_forever()
    for recorder in recorders:
        assert isinstance(recorder.error, EngineError)
    with pytest.raises(EngineClosed):
        await loop.generate(ask(), Recorder().send)
    assert stepper.log[-1] == "close"


async def test_so_does_one_that_cannot_be_given_up(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    class Dead(Releasing):
        def release(self, seq: Sequence) -> None:
            raise RuntimeError("dead")

    recorder = Recorder(window=1, follow=False)
    async with trio.open_nursery() as nursery:
        with pytest.raises(EngineError, match="dead") as ended:
            async with open_loop(Dead()) as loop:
                nursery.start_soon(recorder.play, loop, ask())
                await recorder.wait_deltas(1)
                recorder.send.give_up_slot()
                await trio.sleep_forever()
    for error in (ended.value, recorder.error):
        assert isinstance(error, EngineError) and isinstance(error.__cause__, RuntimeError)
    assert recorder.error is not ended.value, "each is raised in a task of its own"


async def test_closing_lets_everyone_go(open_loop: Open, ask: Ask, autojump_clock: MockClock) -> None:
    stepper = PlainStepper(slots=2)
    async with trio.open_nursery() as nursery:
        recorders = [Recorder(window=2, follow=False) for _ in range(3)]
        async with open_loop(stepper) as loop:
            for recorder in recorders:
                nursery.start_soon(recorder.play, loop, ask())
            await trio.sleep(10)
            late = Recorder()
            nursery.start_soon(late.play, loop, ask())
    for recorder in (*recorders, late):
        assert isinstance(recorder.error, EngineClosed)
    assert not stepper.used
    assert stepper.log[-1] == "close"
    assert not loop.busy


async def test_a_command_that_comes_while_the_loop_ends_is_answered(
    ask: Ask, pin: Callable[[bool], None], autojump_clock: MockClock
) -> None:
    """Posted after the owner's last look at its commands: Trio's side answers it."""
    stepper = PlainStepper()
    recorder = Recorder()
    loop = StepLoop(stepper)
    loop.on_busy = pin
    async with trio.open_nursery() as nursery:

        def close() -> None:
            loop._stop = False  # as the caller's side may have read it just before
            trio.from_thread.run_sync(nursery.start_soon, recorder.play, loop, ask())

        stepper.close = close  # type: ignore[method-assign]
        async with serving(loop):
            pass
    assert isinstance(recorder.error, EngineClosed)


# --- what can go wrong between the two sides ------------------------------------------------------------------------


@pytest.mark.interpreted
async def test_the_limit_is_read_again_after_parking(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Trio raises the limit between the owner's look at it and the parking, and so sees no reason to wake anyone."""
    move = Sequence._move

    def late_credit(seq: Sequence, to: Any) -> None:
        if to.name == "PARKED":
            seq.send.accept(1)
        move(seq, to)

    monkeypatch.setattr(Sequence, "_move", late_credit)
    async with serving(loop := StepLoop(PlainStepper()), pace=pace):
        with trio.fail_after(100):
            recorder = await record(loop, ask(max_tokens=6), Recorder(window=1, follow=False))
    assert recorder.text == says(6)


async def test_the_limit_is_read_again_after_giving_up(ask: Ask, autojump_clock: MockClock) -> None:
    """Trio calls one back while its slot is being freed, and sees no reason to wake it: it has not gone yet."""

    class CalledBack(Releasing):
        def release(self, seq: Sequence) -> None:
            super().release(seq)
            seq.send.take_slot()

    async with serving(loop := StepLoop(CalledBack()), pace=pace), company(loop) as group:
        recorder = group.start(ask(max_tokens=6))
        await recorder.wait_deltas(2)
        recorder.send.give_up_slot()
        with trio.fail_after(100):
            await recorder.returned.wait()
        assert recorder.text == says(6)
        assert gave_up(1, recorder)


async def test_a_stale_idle_message_is_not_believed(ask: Ask, autojump_clock: MockClock) -> None:
    """The owner says it is idle; meanwhile, on Trio's side, a command was posted that it had not seen."""

    async def no_time(loop: StepLoop) -> None:
        pass  # so that the last event and the idle message are handed out together

    async with serving(loop := StepLoop(PlainStepper()), pace=no_time), company(loop) as group:
        parked = group.start(ask(max_tokens=2), Recorder(window=1, follow=False))
        await parked.wait_deltas(1)
        await wait_all_tasks_blocked()
        assert not loop.busy
        seen: list[bool] = []

        def wake(event: Event) -> None:
            if isinstance(event, Finished):
                parked.accept(1)

        parked.on_event = lambda event: seen.append(loop.busy)
        await record(loop, ask(max_tokens=1), Recorder(on_event=wake))
        assert loop.busy
        await parked.returned.wait()
        assert seen == [True, True]
        await wait_all_tasks_blocked()
        assert not loop.busy


async def test_generate_that_is_cancelled_before_it_begins_leaves_no_trace(
    open_loop: Open, ask: Ask, autojump_clock: MockClock
) -> None:
    stepper = PlainStepper()
    async with open_loop(stepper) as loop:
        recorder = Recorder()
        recorder.scope.cancel()
        await recorder.play(loop, ask())
        assert recorder.scope.cancelled_caught
        assert recorder.events == []
    assert stepper.log == ["open", "close"]
