"""Gathering tokens for at most `coalesce_ms` into one record, before it gets its number."""

from __future__ import annotations

from collections.abc import Callable

import trio

from tokenflow.core.types import Delta
from tokenflow.service.choice import Choice


class Coalescer:
    """Merges deltas of each choice and hands them on when their time is up, oldest choice first.

    A delta that joins another takes no room of its own: the two will be one record.

    Args:
        append: takes a choice, its delta, how many events are in that, and when it is.
        span_s: how long a delta may wait for others.
    """

    def __init__(self, append: Callable[[Choice, Delta, int, float], None], span_s: float) -> None:
        self._append = append
        self._span_s = span_s
        self._held: dict[Choice, tuple[Delta, int]] = {}
        self._first = trio.Event()

    def add(self, choice: Choice, delta: Delta) -> None:
        held = self._held.get(choice)
        if held is None:
            self._held[choice] = (delta, 1)
            self._first.set()
        else:
            old, events = held
            delta = Delta(old.text + delta.text, old.tokens + delta.tokens, old.logprobs + delta.logprobs)
            self._held[choice] = (delta, events + 1)
            choice.accept(1)

    def flush(self) -> None:
        """Hand on what is held."""
        held, self._held = self._held, {}
        self._first = trio.Event()
        now = trio.current_time()
        for choice, (delta, events) in held.items():
            self._append(choice, delta, events, now)

    async def run(self) -> None:
        """Flush in time, until cancelled."""
        while True:
            await self._first.wait()
            await trio.sleep(self._span_s)
            self.flush()
