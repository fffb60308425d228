"""Gathering tokens for at most `coalesce_ms` into one record, before it gets its number."""

from __future__ import annotations

from collections.abc import Callable

import trio

from tokenflow.core.types import Delta


class Coalescer:
    """Merges deltas of each sequence and hands them on when their time is up, oldest sequence first.

    Args:
        append: takes (source, delta, how many events are in it).
        merged: told the source of each event that joined another.
        span_s: how long a delta may wait for others.
    """

    def __init__(self, append: Callable[[int, Delta, int], None], merged: Callable[[int], None], span_s: float) -> None:
        self._append = append
        self._merged = merged
        self._span_s = span_s
        self._held: dict[int, tuple[Delta, int]] = {}
        self._first = trio.Event()

    def add(self, source: int, delta: Delta) -> None:
        held = self._held.get(source)
        if held is None:
            self._held[source] = (delta, 1)
            self._first.set()
        else:
            old, events = held
            delta = Delta(old.text + delta.text, old.tokens + delta.tokens, old.logprobs + delta.logprobs)
            self._held[source] = (delta, events + 1)
            self._merged(source)

    def flush(self) -> None:
        """Hand on what is held."""
        held, self._held = self._held, {}
        self._first = trio.Event()
        for source, (delta, events) in held.items():
            self._append(source, delta, events)

    async def run(self) -> None:
        """Flush in time, until cancelled."""
        while True:
            await self._first.wait()
            await trio.sleep(self._span_s)
            self.flush()
