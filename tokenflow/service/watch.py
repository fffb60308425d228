"""Deadlines that move with every token, watched over by one task for all streams.

A Trio cancel scope's deadline may be moved at any time, and each move costs a good part of what a token costs. Nearly
all moves here are to later, so they are not told: the watch looks again when the moment that it knew of has come.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

import trio


class Watched:
    """One deadline. `at` may be set freely to later; `Watch.look_at` must hear of one that is earlier than `known`.

    Args:
        on_passed: called when `at` has come.
    """

    __slots__ = ("at", "known", "on_passed")

    def __init__(self, at: float, on_passed: Callable[[], None]) -> None:
        self.at = at
        self.known = inf
        """When the watch will look next."""
        self.on_passed = on_passed


class Watch:
    """Calls `on_passed` of every deadline whose time has come, on Trio's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Watched]] = []  # some entries are stale: their time is not what is `known`
        self._number = count()  # ties are first come, first served
        self._stale = 0
        self._bell = trio.Event()

    def look_at(self, deadline: Watched) -> None:
        """Watch it from now on; to be called again where `at` becomes earlier than what is `known`."""
        self._drop_entry(deadline)
        if deadline.at == inf:
            return
        deadline.known = deadline.at
        heappush(self._heap, (deadline.at, next(self._number), deadline))
        if self._heap[0][2] is deadline:
            self._bell.set()

    def forget(self, deadline: Watched) -> None:
        """It passes no more."""
        deadline.at = inf
        self._drop_entry(deadline)

    def _drop_entry(self, deadline: Watched) -> None:
        if deadline.known == inf:
            return
        deadline.known = inf
        self._stale += 1
        if 2 * self._stale > len(self._heap):  # a heap cannot be taken from in the middle, but it can be swept
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].known]
            heapify(self._heap)
            self._stale = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._bell = trio.Event()
            with trio.move_on_at(self._heap[0][0] if self._heap else inf):
                await self._bell.wait()
            now = trio.current_time()
            while self._heap and self._heap[0][0] <= now:
                known, _, deadline = heappop(self._heap)
                if known != deadline.known:
                    self._stale -= 1
                    continue
                deadline.known = inf
                if deadline.at <= now:
                    deadline.on_passed()
                else:
                    self.look_at(deadline)
