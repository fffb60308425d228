"""Trio instruments: cancel at every scheduler step there is, and time each task step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import trio
import trio.testing
from trio._core import _run  # private: the only way to a scheduler order that can be repeated; Hypothesis uses it too


class CancelAtStep(trio.abc.Instrument):
    """Cancels `scope` after the k-th scheduler step, of whatever task, since `arm`."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.steps = 0
        """Steps seen so far."""
        self._scope: trio.CancelScope | None = None

    def arm(self, scope: trio.CancelScope) -> None:
        self._scope = scope

    def disarm(self) -> None:
        self._scope = None

    @property
    def fired(self) -> bool:
        return self.steps >= self.k

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._scope is not None:
            self.steps += 1
            if self.steps == self.k:
                self._scope.cancel()


Scenario = Callable[[CancelAtStep], Awaitable[None]]


def cancel_at_every_step(scenario: Scenario, *, seed: int = 0) -> int:
    """Run `scenario` again and again, in mock time, cancelled one step later each time, until it ends by itself.

    The scenario gets the instrument, arms it with the victim's scope, and checks at its end what must hold always.
    Tasks run in an order drawn from `seed`, the same in each run. Returns the number of steps that were tried.
    """
    k = 1
    while True:
        instrument = CancelAtStep(k)
        with ordered_by(seed):
            clock = trio.testing.MockClock(autojump_threshold=0)
            trio.run(scenario, instrument, clock=clock, instruments=[instrument])
        if not instrument.fired:
            return k - 1
        k += 1


@contextmanager
def ordered_by(seed: int) -> Iterator[None]:
    """Inside, `trio.run` schedules tasks in an order that depends on `seed` alone."""
    before, state = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r.getstate()
    vars(_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = True  # final, says trio
    _run._r.seed(seed)
    try:
        yield
    finally:
        vars(_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = before
        _run._r.setstate(state)


class LongestStep(trio.abc.Instrument):
    """How long the longest task step held the event loop, in wall time."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.task = ""
        """Whose it was."""
        self._began = 0.0  # until the first step that it sees from its beginning

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took_s = perf_counter() - self._began
        if self._began and took_s > self.longest_s:
            self.longest_s, self.task = took_s, task.name
