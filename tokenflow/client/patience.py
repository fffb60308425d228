"""When to try again, and when no more: pure, time is an argument.

The pauses are drawn evenly from zero up to a bound that doubles ("full jitter"), so that a thousand clients of a server
that comes back do not come back at once. Patience is per outage: it begins with the first failure after something was
received, and whatever is received ends the outage. It makes no sense to be longer than the stream's grace.
"""

from __future__ import annotations

from random import Random

FIRST_S = 0.2
LONGEST_S = 2.0


class Patience:
    """How long one stream's outages may last.

    Args:
        total_s: seconds from an outage's first failure to its last attempt.
        random: where the jitter comes from.
    """

    def __init__(self, total_s: float, random: Random) -> None:
        self.total_s = total_s
        self._random = random
        self._attempts = 0
        self._until: float | None = None

    def progress(self) -> None:
        """Something came: the outage is over."""
        self._attempts, self._until = 0, None

    def next_pause_s(self, now: float, at_least_s: float = 0.0) -> float | None:
        """Seconds to wait before the next attempt; None where that would be beyond the patience.

        Args:
            now: seconds on the caller's clock.
            at_least_s: what the server asked for.
        """
        if self._until is None:
            self._until = now + self.total_s
        bound = min(LONGEST_S, FIRST_S * 2 ** min(self._attempts, 10))
        self._attempts += 1
        pause = max(at_least_s, self._random.uniform(0, bound))
        return pause if now + pause <= self._until else None
