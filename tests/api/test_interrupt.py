"""Whom the loop interrupts a step for: again and again for who is alone in it, and for others once it has got long."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tokenflow.api import Sequence, SequenceRequest, StepLoop, serving
from tokenflow.api.loop import SHORT_STEP_S
from tokenflow.testing.fakes import company
from tokenflow.testing.steppers import GatedStepper


async def test_who_prefills_alone_is_interrupted_each_time(
    ask: Callable[..., SequenceRequest], pin: Callable[[bool], None], autojump_clock: MockClock
) -> None:
    """One after the other leaves in its first step. Waiting for such a step could take longer than the grace."""
    stepper = GatedStepper(slots=1)
    loop = StepLoop(stepper)
    loop.on_busy = pin
    async with serving(loop), company(loop) as group:
        for count in range(1, 5):
            victim = group.start(ask(prompt=1000))
            await trio.to_thread.run_sync(stepper.entered.acquire)
            await victim.wait_started()
            victim.scope.cancel()
            await wait_all_tasks_blocked()
            assert len(stepper.interrupts) == count
            stepper.gate.release()  # what `interrupt` does to a real one
            await victim.returned.wait()
        assert loop.steps == 4


async def test_who_left_alone_protects_nobody_who_comes_after(
    ask: Callable[..., SequenceRequest], pin: Callable[[bool], None], autojump_clock: MockClock
) -> None:
    """Nobody has lost that step, so the next one, of a whole batch, may be ended for who has no part in it."""
    stepper = GatedStepper(slots=1)
    loop = StepLoop(stepper)
    loop.on_busy = pin
    counts = []
    async with serving(loop), company(loop) as group:
        for _ in range(3):
            hog = group.start(ask(prompt=1000))
            await trio.to_thread.run_sync(stepper.entered.acquire)
            waiting = group.start(ask(prompt=1000))
            await wait_all_tasks_blocked()
            waiting.scope.cancel()
            await wait_all_tasks_blocked()
            autojump_clock.jump(SHORT_STEP_S)
            await wait_all_tasks_blocked()
            counts.append(len(stepper.interrupts))
            stepper.gate.release()
            await waiting.returned.wait()
            await trio.to_thread.run_sync(stepper.entered.acquire)  # the step that the hog must get through
            stepper.gate.release()
            await trio.to_thread.run_sync(stepper.entered.acquire)
            hog.scope.cancel()
            await wait_all_tasks_blocked()
            counts.append(len(stepper.interrupts))
            stepper.gate.release()
            await hog.returned.wait()
    assert counts == [1, 2, 3, 4, 5, 6]


async def test_who_has_no_part_in_a_long_step_does_not_wait_for_its_end(
    ask: Callable[..., SequenceRequest], pin: Callable[[bool], None], autojump_clock: MockClock
) -> None:
    """It came during the step, so it has not even a slot; waiting longer than the grace would end the whole engine."""
    stepper = GatedStepper(slots=2)
    loop = StepLoop(stepper)
    loop.on_busy = pin
    async with serving(loop), company(loop) as group:
        other = group.start(ask(prompt=1000, max_tokens=1))
        await trio.to_thread.run_sync(stepper.entered.acquire)
        victim = group.start(ask(prompt=1000))
        await wait_all_tasks_blocked()
        victim.scope.cancel()
        await wait_all_tasks_blocked()
        assert stepper.interrupts == [], "most steps are short"
        autojump_clock.jump(SHORT_STEP_S)
        await wait_all_tasks_blocked()
        assert len(stepper.interrupts) == 1
        stepper.gate.release()
        await victim.returned.wait()
        stepper.gate.release(10_000)
        await other.returned.wait()
        assert other.tokens == 1


class Misspelt(GatedStepper):
    def interrupt(self, seq: Sequence | None) -> None:
        super().interrupt(seq)
        self.no_such_flag.set()  # type: ignore[attr-defined]


async def test_an_interrupt_that_raises_is_told_once_with_its_place(
    ask: Callable[..., SequenceRequest],
    pin: Callable[[bool], None],
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Cancels would just be slow, and nobody would know why."""
    stepper = Misspelt(slots=1)
    loop = StepLoop(stepper)
    loop.on_busy = pin
    with caplog.at_level(logging.ERROR):
        async with serving(loop), company(loop) as group:
            for _ in range(2):
                victim = group.start(ask(prompt=1000))
                await trio.to_thread.run_sync(stepper.entered.acquire)
                await victim.wait_started()
                victim.scope.cancel()
                await wait_all_tasks_blocked()
                stepper.gate.release()
                await victim.returned.wait()
                assert victim.error is None
    assert stepper.interrupts[-1] is None and len(stepper.interrupts) == 3
    [told] = caplog.records
    assert told.name == "tokenflow.engines" and "no_such_flag.set()" in caplog.text


async def test_so_is_one_that_raises_when_all_leave(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with serving(StepLoop(Misspelt())):
            pass
    assert "no_such_flag.set()" in caplog.text
