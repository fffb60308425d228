"""The loop's thread, step by step: the test lets each step begin and end. And one that never ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tokenflow.api import EngineStuck, Sequence, SequenceRequest, StepLoop, serving
from tokenflow.testing.fakes import Company, Recorder, company, record
from tokenflow.testing.steppers import GatedStepper, PlainStepper

Ask = Callable[..., SequenceRequest]
Pin = Callable[[bool], None]


class Gates:
    """Drives a GatedStepper from Trio's side."""

    def __init__(self, stepper: GatedStepper) -> None:
        self.stepper = stepper

    async def step_began(self) -> None:
        await trio.to_thread.run_sync(self.stepper.entered.acquire)

    def end_step(self) -> None:
        self.stepper.gate.release()

    async def steps(self, n: int) -> None:
        """Let n steps pass; the next one has begun."""
        for _ in range(n):
            self.end_step()
            await self.step_began()

    def open_for_good(self) -> None:
        self.stepper.gate.release(10_000)


@asynccontextmanager
async def gated(stepper: GatedStepper, pin: Pin) -> AsyncIterator[tuple[Gates, Company]]:
    loop, gates = StepLoop(stepper), Gates(stepper)
    loop.on_busy = pin
    async with serving(loop), company(loop) as group:
        try:
            yield gates, group
        finally:
            gates.open_for_good()  # or a failed test would wait for its sequences for ever


async def test_a_cancel_is_acknowledged_before_the_next_step(ask: Ask, pin: Pin, autojump_clock: MockClock) -> None:
    stepper = GatedStepper()
    async with gated(stepper, pin) as (gates, group):
        # both prefill: a step without events, whose delivery the acknowledgement could travel with by luck
        victim, other = group.start(ask(prompt=1000)), group.start(ask(prompt=1000))
        await gates.step_began()
        while len(stepper.used) < 2:  # the first step may have begun before both had come
            await gates.steps(1)
        await gates.steps(2)
        await other.wait_started()
        victim.scope.cancel()
        await wait_all_tasks_blocked()
        assert not victim.returned.is_set(), "its slot cannot be free within the step"
        gates.end_step()
        await gates.step_began()
        await victim.returned.wait()  # while the next step is in progress
        assert victim.error is None
        assert [seq.send for seq in stepper.used] == [other.send]


async def test_what_a_step_made_for_a_cancelled_sequence_is_dropped_and_counted(
    ask: Ask, pin: Pin, autojump_clock: MockClock
) -> None:
    stepper = GatedStepper()
    async with gated(stepper, pin) as (gates, group):
        victim = group.start(ask(prompt=0, max_tokens=50))
        await gates.step_began()
        await gates.steps(3)
        await victim.wait_deltas(3)
        victim.scope.cancel()
        await wait_all_tasks_blocked()
        gates.end_step()
        await victim.returned.wait()
        assert victim.tokens == 3
        assert victim.send.dropped == 1


async def test_a_prefill_is_interrupted_never_twice_in_a_row(ask: Ask, pin: Pin, autojump_clock: MockClock) -> None:
    stepper = GatedStepper(slots=4)
    async with gated(stepper, pin) as (gates, group):
        victims = [group.start(ask(prompt=1000)) for _ in range(4)]
        await gates.step_began()

        async def cancel(victim: Recorder) -> int:
            before = len(stepper.interrupts)
            victim.scope.cancel()
            await wait_all_tasks_blocked()
            return len(stepper.interrupts) - before

        while len(stepper.used) < 4:
            await gates.steps(1)
        assert await cancel(victims[0]) == 1
        assert stepper.interrupts[-1] in stepper.used
        assert await cancel(victims[1]) == 0, "the step that was interrupted"
        await gates.steps(1)
        assert await cancel(victims[2]) == 0, "the step after it, which must get through"
        await gates.steps(1)
        assert await cancel(victims[3]) == 1
        gates.end_step()
        for victim in victims:
            await victim.returned.wait()
            assert victim.scope.cancelled_caught
        assert not stepper.used


async def test_when_all_in_the_step_have_left_it_is_interrupted_again(
    ask: Ask, pin: Pin, autojump_clock: MockClock
) -> None:
    stepper = GatedStepper()
    async with gated(stepper, pin) as (gates, group):
        victims = [group.start(ask(prompt=1000)) for _ in range(2)]
        await gates.step_began()
        while len(stepper.used) < 2:
            await gates.steps(1)
        for n, victim in enumerate(victims, 1):
            victim.scope.cancel()
            await wait_all_tasks_blocked()
            assert len(stepper.interrupts) == n


async def test_nobody_interrupts_for_a_sequence_that_decodes_or_waits(
    ask: Ask, pin: Pin, autojump_clock: MockClock
) -> None:
    stepper = GatedStepper(slots=2)
    async with gated(stepper, pin) as (gates, group):
        parked = group.start(ask(prompt=0), Recorder(window=1, follow=False))
        await gates.step_began()
        gates.end_step()
        await parked.wait_deltas(1)
        decoding = group.start(ask(prompt=0, max_tokens=50))
        await gates.step_began()
        await gates.steps(2)
        await decoding.wait_deltas(2)
        waiting = group.start(ask(prompt=1000))
        await wait_all_tasks_blocked()
        for victim in (parked, decoding, waiting):
            victim.scope.cancel()
        await wait_all_tasks_blocked()
        assert stepper.interrupts == []
        gates.end_step()


async def test_a_faulty_interrupt_does_not_skip_the_wait_for_the_slot(
    ask: Ask, pin: Pin, autojump_clock: MockClock
) -> None:
    stepper = GatedStepper()

    def fail(seq: Sequence | None) -> None:
        raise ZeroDivisionError

    stepper.interrupt = fail  # type: ignore[method-assign]
    async with gated(stepper, pin) as (gates, group):
        victim = group.start(ask(prompt=1000))
        await gates.step_began()
        victim.scope.cancel()
        await wait_all_tasks_blocked()
        assert not victim.returned.is_set()
        gates.end_step()
        await victim.returned.wait()
        assert victim.scope.cancelled_caught
        assert not stepper.used


async def test_a_wedged_step_lets_its_callers_and_its_loop_go(ask: Ask, pin: Pin, autojump_clock: MockClock) -> None:
    stepper = GatedStepper()
    closed = threading.Event()
    stepper.close = closed.set  # type: ignore[method-assign]
    loop, gates = StepLoop(stepper, grace_s=5), Gates(stepper)
    loop.on_busy = pin
    victim, bystander, ended = Recorder(), Recorder(), trio.Event()

    async def host() -> None:
        async with serving(loop):
            await leave.wait()
        ended.set()

    leave = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host)
        await wait_all_tasks_blocked()
        while loop._token is None:
            await trio.lowlevel.checkpoint()
        for recorder in (victim, bystander):
            nursery.start_soon(recorder.play, loop, ask(prompt=1000))
        await gates.step_began()
        victim.scope.cancel()
        await wait_all_tasks_blocked()
        autojump_clock.jump(4.9)
        await wait_all_tasks_blocked()
        assert not victim.returned.is_set()
        assert loop.step_age_s > 0
        autojump_clock.jump(0.2)
        await victim.returned.wait()
        assert isinstance(victim.error, EngineStuck)
        assert not bystander.returned.is_set()
        leave.set()
        await wait_all_tasks_blocked()
        assert stepper.interrupts[-1] is None, "everybody is leaving"
        assert not ended.is_set()
        autojump_clock.jump(5.1)
        await ended.wait()
        await bystander.returned.wait()
        assert bystander.error is not None
        # much later the thread comes back: it frees the engine, and hands out nothing
        events = len(bystander.events), len(victim.events)
        gates.open_for_good()
        await trio.to_thread.run_sync(closed.wait)
        await wait_all_tasks_blocked()
        assert (len(bystander.events), len(victim.events)) == events


@contextmanager
def nervous_threads() -> Iterator[None]:
    """Threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("window", [1, 3])
async def test_no_wake_up_is_lost(ask: Ask, pin: Pin, autojump_clock: MockClock, window: int) -> None:
    """Credit and parking meet in every way that two threads can: with a lost wake-up this would hang."""
    with nervous_threads():
        loop = StepLoop(PlainStepper(slots=8))
        loop.on_busy = pin
        async with serving(loop), company(loop) as group:
            recorders = [group.start(ask(prompt=0, max_tokens=400), Recorder(window=window)) for _ in range(8)]
            with trio.fail_after(1000):  # mock time: it passes only when nobody is busy
                for recorder in recorders:
                    await recorder.returned.wait()
    assert [recorder.tokens for recorder in recorders] == [400] * 8


async def test_sequences_come_and_go_while_steps_go_on(ask: Ask, pin: Pin, autojump_clock: MockClock) -> None:
    stepper = PlainStepper(slots=3)
    with nervous_threads():
        loop = StepLoop(stepper)
        loop.on_busy = pin
        async with serving(loop), company(loop) as group:
            for n in range(60):
                victim = group.start(ask(prompt=n % 7, max_tokens=1000))
                if n % 3:
                    await victim.wait_started()
                if n % 3 == 2:
                    await victim.wait_deltas(n % 5)
                victim.scope.cancel()
                await victim.returned.wait()
                assert victim.scope.cancelled_caught or victim.finished
                assert victim.at_return == len(victim.events)
            last = await record(loop, ask(max_tokens=3))
            assert last.tokens == 3
            assert not stepper.used


async def test_the_thread_is_named_for_who_looks_at_the_machine(mock_clock: MockClock) -> None:
    class Named(PlainStepper):
        def open(self) -> None:
            self.name = threading.current_thread().name

    async with serving(StepLoop(stepper := Named())):
        assert stepper.name == "engine"
