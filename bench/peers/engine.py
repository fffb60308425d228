"""The shared engine: at each tick every stream gets its token, as from a batch's step, through a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isinf

from bench.peers.words import TOKEN

ROOM = 64
"""Tokens that a stream may be behind, as tokenflow's window; more are lost to it."""

Put = Callable[[str], None]


class Batch:
    """The streams that decode.

    Args:
        tokens_per_s: of each stream; 0 for none ever, infinity for as many as there is room for at every tick.
        full: what a `put` raises when its queue has no room.
    """

    def __init__(self, tokens_per_s: float, full: type[Exception]) -> None:
        self.tick_s = 1 / tokens_per_s if tokens_per_s else 0.0
        self._silent = not tokens_per_s
        self._at_once = ROOM if isinf(tokens_per_s) else 1
        self._puts: set[Put] = set()
        self._full = full

    @contextmanager
    def joined(self, put: Put) -> Iterator[None]:
        self._puts.add(put)
        if not self._silent:
            put(TOKEN)  # the prefill takes no time
        try:
            yield
        finally:
            self._puts.discard(put)

    @property
    def busy(self) -> bool:
        return bool(self._puts) and not self._silent

    def tick(self) -> None:
        for put in tuple(self._puts):
            try:
                for _ in range(self._at_once):
                    put(TOKEN)
            except self._full:
                pass


class Engine(Batch):
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
