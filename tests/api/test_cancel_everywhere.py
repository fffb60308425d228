"""Cancel a sequence after every scheduler step there is, of any task, in several orders of the tasks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from tokenflow.api import (
    Engine,
    EngineInfo,
    Finished,
    SequenceRequest,
    Started,
    StepLoop,
    engine_from_generator,
    serving,
)
from tokenflow.testing.fakes import Recorder, company, record
from tokenflow.testing.instruments import CancelAtStep, cancel_at_every_step
from tokenflow.testing.steppers import PlainStepper

Ask = Callable[..., SequenceRequest]


class Arrival(trio.abc.Instrument):
    """How much had been sent at the victim's first step after its cancel."""

    def __init__(self, victim: Recorder) -> None:
        self.victim = victim
        self.events: int | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.events is None and task is self.victim.task and self.victim.scope.cancel_called:
            self.events = len(self.victim.events)


def says(n: int) -> str:
    return "".join(f"t{i} " for i in range(n))


async def pace(loop: StepLoop) -> None:
    await trio.sleep(0.1)


async def play_victim(
    engine: Engine, instrument: CancelAtStep, request: SequenceRequest, *, slow: bool, release: Callable[[], object]
) -> Recorder:
    """A victim from its first step to its return, cancelled wherever the instrument says; then all must hold."""
    victim = Recorder(window=2, follow=not slow)
    arrived = Arrival(victim)
    trio.lowlevel.add_instrument(arrived)
    async with company(engine) as group:
        instrument.arm(victim.scope)
        group.start(request, victim)
        while not victim.returned.is_set():
            await trio.sleep(0.05)
            if slow and victim.send.stalled:
                victim.accept(1)
    instrument.disarm()
    release()
    assert victim.error is None
    if arrived.events is not None and victim.scope.cancelled_caught:
        assert len(victim.events) == arrived.events, "sent after the cancel had come"
    kinds = [type(event) for event in victim.events]
    assert kinds.count(Started) <= 1
    assert kinds.count(Finished) <= 1
    assert victim.text == says(len(victim.deltas))
    if not victim.scope.cancelled_caught:
        assert victim.finished == Finished("length")
        assert victim.tokens == request.max_tokens
    return victim


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slow", [False, True])
def test_a_loop(ask: Ask, seed: int, slow: bool) -> None:
    async def scenario(instrument: CancelAtStep) -> None:
        stepper = PlainStepper(slots=1)
        async with serving(loop := StepLoop(stepper), pace=pace), company(loop) as group:
            hog = group.start(ask(max_tokens=2))  # so that the victim waits first
            await hog.wait_started()
            generated = loop.generated
            victim = await play_victim(loop, instrument, ask(prompt=9, max_tokens=5), slow=slow, release=lambda: None)
            await hog.returned.wait()
            assert not stepper.used
            assert loop.generated - generated == victim.tokens + victim.send.dropped + hog.tokens
            assert (await record(loop, ask(max_tokens=3))).text == says(3), "the slot is usable"
            assert hog.text == says(2)
        assert not loop.busy

    assert cancel_at_every_step(scenario, seed=seed) > 30


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slow", [False, True])
def test_a_generator(ask: Ask, seed: int, slow: bool) -> None:
    async def scenario(instrument: CancelAtStep) -> None:
        running = 0

        async def say(prompt: str, request: SequenceRequest):  # type: ignore[no-untyped-def]
            nonlocal running
            running += 1
            try:
                for i in range(5):
                    await trio.sleep(0.1)
                    yield f"t{i} "
            finally:
                running -= 1

        engine = engine_from_generator(say, info=EngineInfo(model="test", context_length=100, slots=1))

        def none_is_left() -> None:
            assert running == 0

        async with company(engine) as group:
            hog = group.start(ask(max_tokens=2))
            await hog.wait_started()
            await play_victim(engine, instrument, ask(max_tokens=5), slow=slow, release=lambda: None)
            await hog.returned.wait()
            none_is_left()
            assert (await engine.stats()).slots_used == 0
            assert (await record(engine, ask(max_tokens=3))).text == says(3)

    assert cancel_at_every_step(scenario, seed=seed) > 20
