"""Deadlines that move with every token, watched over by one task for all streams.

A Trio cancel scope's deadline may be moved at any time, and each move costs a good part of what a token costs. Nearly
all moves here are to later, so they are not told: the watch looks again when the moment that it knew of has come.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

import trio


class Watched(Protocol):
    """Whatever has a deadline."""

    @property
    def due(self) -> float:
        """When it passes; infinite: never. It may move later freely; of an earlier one `look_at` must hear."""

    known: float
    """When the watch will look next; infinite while it does not. The watch's own."""

    def pass_due(self) -> None:
        """Called when the deadline has passed."""


class Watch:
    """Calls `pass_due` of everything whose time has come, on Trio's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Watched]] = []  # some entries are stale: their time is not what is `known`
        self._number = count()  # ties are first come, first served
        self._stale = 0
        self._bell = trio.Event()
        self._wakes_at = inf  # when it looks next, if nobody rings

    def look_at(self, watched: Watched) -> None:
        """Watch it from now on; to be called again where `due` becomes earlier than what is `known`."""
        self.forget(watched)
        due = watched.due
        if due == inf:
            return
        watched.known = due
        heappush(self._heap, (due, next(self._number), watched))
        if due < self._wakes_at:
            self._bell.set()

    def forget(self, watched: Watched) -> None:
        """Watch it no more. Repeatable."""
        if watched.known == inf:
            return
        watched.known = inf
        self._stale += 1
        if 2 * self._stale > len(self._heap):  # a heap cannot be taken from in the middle, but it can be swept
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].known]
            heapify(self._heap)
            self._stale = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._bell = trio.Event()
            self._wakes_at = self._heap[0][0] if self._heap else inf
            with trio.move_on_at(self._wakes_at):
                await self._bell.wait()
            now = trio.current_time()
            while self._heap and self._heap[0][0] <= now:
                known, _, watched = heappop(self._heap)
                if known != watched.known:
                    self._stale -= 1
                    continue
                watched.known = inf
                if watched.due <= now:
                    watched.pass_due()
                else:
                    self.look_at(watched)
