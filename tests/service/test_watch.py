"""One task watches over everybody's deadlines: each passes at its own time, whoever comes, moves or goes meanwhile."""

from __future__ import annotations

from math import inf

import trio
from trio.testing import MockClock

from tokenflow.service.watch import Watch


class Thing:
    def __init__(self, due: float) -> None:
        self.due = due
        self.known = inf
        self.passed: list[float] = []

    def pass_due(self) -> None:
        self.passed.append(trio.current_time())


class Steps(trio.abc.Instrument):
    """How often the watch's task ran."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += "Watch.run" in task.name


async def test_each_passes_at_its_time(autojump_clock: MockClock) -> None:
    watch = Watch()
    late, early, moved, gone = Thing(20.0), Thing(5.0), Thing(6.0), Thing(1.0)
    async with trio.open_nursery() as nursery:
        watch.look_at(late)
        nursery.start_soon(watch.run)
        await trio.testing.wait_all_tasks_blocked()
        for thing in (early, moved, gone):  # each before what it waits for
            watch.look_at(thing)
        watch.forget(gone)
        moved.due = 12.0
        await trio.sleep(15)
        sooner = Thing(16.0)
        watch.look_at(sooner)
        await trio.sleep(15)
        nursery.cancel_scope.cancel()
    passed = [thing.passed for thing in (gone, early, moved, sooner, late)]
    assert passed == [[], [5.0], [12.0], [16.0], [20.0]]


async def test_what_comes_later_than_it_looks_anyway_does_not_wake_it(autojump_clock: MockClock) -> None:
    watch, steps = Watch(), Steps()
    first = Thing(5.0)
    async with trio.open_nursery() as nursery:
        watch.look_at(first)
        nursery.start_soon(watch.run)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(steps)
        watch.forget(first)  # a stream that came and went
        later = [Thing(6.0 + i) for i in range(100)]
        for thing in later:
            watch.look_at(thing)
            await trio.testing.wait_all_tasks_blocked()
        assert steps.count == 0
        await trio.sleep(200)
        assert steps.count
        nursery.cancel_scope.cancel()
    assert [thing.passed for thing in later] == [[6.0 + i] for i in range(100)]
