"""Mock time beside a real thread.

Trio's `autojump_clock` jumps when every task waits; it does not see a thread that works. `pinned` holds the clock while
a step loop is busy: `loop.on_busy = pinned(clock)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio.testing


def pinned(clock: trio.testing.MockClock) -> Callable[[bool], None]:
    """A function for `StepLoop.on_busy`; one may serve several loops."""
    busy_loops = 0

    def on_busy(busy: bool) -> None:
        nonlocal busy_loops
        busy_loops += 1 if busy else -1
        clock.autojump_threshold = math.inf if busy_loops else 0

    return on_busy
