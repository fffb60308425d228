"""The shared engine: a tick every 2 ms, each stream's turn as often as the rate says, a bounded queue to each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import isinf

from bench.peers.words import TOKEN

TICK_S = 0.002
ROOM = 64
"""Tokens that a stream may be behind, as tokenflow's window; more are lost to it."""

Put = Callable[[str], None]


class Turns:
    """Streams in as many groups as there are ticks from one token of a stream to its next.

    Args:
        tokens_per_s: of each stream; 0 for none ever, infinity for as many as there is room for at every tick.
        full: what a `put` raises when its queue has no room.
    """

    def __init__(self, tokens_per_s: float, full: type[Exception]) -> None:
        flood, self._silent = isinf(tokens_per_s), not tokens_per_s
        self.tick_s = 0.0 if flood else TICK_S
        self._at_once = ROOM if flood else 1
        ticks = 1 if flood or self._silent else round(1 / tokens_per_s / TICK_S)
        self._groups: list[set[Put]] = [set() for _ in range(ticks)]
        self._joined, self._ticked = count(), count()
        self._full = full

    @contextmanager
    def joined(self, put: Put) -> Iterator[None]:
        group = self._groups[next(self._joined) % len(self._groups)]
        group.add(put)
        if not self._silent:
            put(TOKEN)  # the prefill takes no time
        try:
            yield
        finally:
            group.discard(put)

    @property
    def busy(self) -> bool:
        return not self._silent and any(self._groups)

    def tick(self) -> None:
        for put in tuple(self._groups[next(self._ticked) % len(self._groups)]):
            try:
                for _ in range(self._at_once):
                    put(TOKEN)
            except self._full:
                pass


class Engine(Turns):
    """For asyncio."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__(tokens_per_s, asyncio.QueueFull)
        self._wanted = asyncio.Event()

    @contextmanager
    def stream(self) -> Iterator[asyncio.Queue[str]]:
        queue = asyncio.Queue[str](ROOM)
        self._wanted.set()
        with self.joined(queue.put_nowait):
            yield queue

    async def run(self) -> None:
        now = asyncio.get_running_loop().time
        while await self._wanted.wait():
            due = now()
            while self.busy:
                due += self.tick_s
                await asyncio.sleep(max(0.0, due - now()))
                await asyncio.sleep(0)  # now every stream waits, and one whose reader has left can be cancelled
                self.tick()
            self._wanted.clear()
