"""A client that leaves at any moment leaves nothing behind.

An instrument counts every scheduler step of every task while a request lives, and the reader leaves at the k-th, for
every k there is, under several orders of the scheduler (a seed each). Afterwards: no task, no slot, no place and no
reader is left, there is exactly one usage record, and the engine serves the next.
"""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from tokenflow_synthetic import generate

from tests.service.conftest import Rig, open_rig, read_all
from tokenflow.core.types import Delta

PROMPT, TOKENS = "the victim", 6


class LeaveAt(trio.abc.Instrument):
    """Calls `leave` after the k-th scheduler step from `start` on."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.steps = 0
        self.counting = False
        self.leave = lambda: None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.counting:
            self.steps += 1
            if self.steps == self.k:
                self.leave()


async def read(rig: Rig, n: int, instrument: LeaveAt, how: str) -> list[str]:
    """Read a stream as a handler does, and be cancelled, or just close, when the instrument says so."""
    texts = [""] * n
    with trio.CancelScope() as scope:
        instrument.counting = True
        instrument.leave = scope.cancel
        _, reader = await rig.open(PROMPT, max_tokens=TOKENS, n=n, coalesce_ms=15 if how == "coalesced" else 0)
        if how == "closed":
            instrument.leave = reader.close
        try:
            while not reader.closed and (records := await reader.read()):
                for record in records:
                    if isinstance(record.event, Delta):
                        texts[record.source] += record.event.text
                if not reader.closed:
                    reader.ack(records[-1].n)
        finally:
            reader.close()
    return texts


async def scenario(k: int, n: int, how: str) -> int:
    instrument = LeaveAt(k)
    async with open_rig(slots=2, tokens_per_s=50, prefill_ms=30, stream={"window": 3}) as rig:
        _, hog = await rig.open("in the way", max_tokens=4)  # with n = 2 the victim waits for it
        tasks = trio.lowlevel.current_statistics().tasks_living
        trio.lowlevel.add_instrument(instrument)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, hog)
            with trio.move_on_after(5):
                texts = await read(rig, n, instrument, how)
        instrument.counting = False
        trio.lowlevel.remove_instrument(instrument)
        await rig.settle()
        check_nothing_is_left(rig, tasks)
        for text in texts if instrument.steps < k or how == "closed" else ():
            assert generate(PROMPT, TOKENS).startswith(text)
        assert await rig.whole("next", max_tokens=3) == generate("next", 3)
        await rig.settle()
    return instrument.steps


def check_nothing_is_left(rig: Rig, tasks: int) -> None:
    admission = rig.service.model("").admission
    assert (admission.free, admission.waiting) == (admission.slots, 0)
    assert not rig.engine.stepper.rows
    assert rig.service.live_streams == 0
    assert trio.lowlevel.current_statistics().tasks_living <= tasks
    ended = [e for e in rig.sink.events if type(e).__name__ == "Ended"]
    admitted = [e for e in rig.sink.events if type(e).__name__ == "Admitted"]
    assert sorted(e.id for e in ended) == sorted(e.id for e in admitted), "one usage record a stream"
    for record in ended:
        assert record.generated_tokens == rig.engine.stepper.made.get(record.id, 0)
        assert record.delivered_tokens + record.after_leaving_tokens <= record.generated_tokens


@pytest.mark.parametrize("how", ["cancelled", "closed", "coalesced"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_leaving_at_every_scheduler_step(n: int, how: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Trio shuffles each batch of runnable tasks with this generator; seeding it makes every run repeatable.
    monkeypatch.setattr(trio._core._run, "_r", random.Random(seed))
    k = 1
    while trio.run(scenario, k, n, how, clock=trio.testing.MockClock(autojump_threshold=0)) >= k:
        k += 1
    assert k > 30
