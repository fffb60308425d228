"""One moving deadline for a stream: queue, then prefill, then idle, each within total; and grace while nobody reads.

    queue     from admission to the slot
    prefill   from the slot to the first token; suspended while the stream is paused
    idle      between tokens; suspended while the sequence is parked for its reader or paused
    total     from admission to the end; never suspended
    grace     from the last reader's leaving to the first one's coming back

Pure: `now` is an argument, in seconds on any monotonic clock. The caller keeps a cancel scope at `at`.
"""

from __future__ import annotations

from math import inf

from tokenflow.core.states import PHASE_MOVES, Phase, move
from tokenflow.core.types import Timeouts


class Deadline:
    """When the stream must be given up, and under which name."""

    __slots__ = ("_grace_at", "_span_at", "paused", "phase", "stalled", "suspended", "timeouts", "total_at")

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self.timeouts = timeouts
        self.phase = Phase.QUEUE
        self.stalled = False
        """The reader's window is full."""
        self.paused = False
        self.suspended = False
        """Silence is the reader's doing, not the engine's."""
        self.total_at = now + timeouts.total_s
        self._span_at = now + timeouts.queue_s
        self._grace_at = inf

    @property
    def at(self) -> float:
        """The moment at which it passes; inf once done."""
        return min(inf if self.suspended else self._span_at, self.total_at, self._grace_at)

    def slot_taken(self, now: float) -> None:
        self.phase = move(PHASE_MOVES, self.phase, Phase.PREFILL)
        self._span_at = now + self.timeouts.prefill_s
        self._suspend()

    def token(self, now: float, *, stalled: bool) -> bool:
        """A token came; `stalled`: and the reader's window is full, so that the next may not.

        Returns:
            True if `at` may now be earlier than it was; False if it only moved later.
        """
        moved_on = self.phase is Phase.DECODE and not self.suspended
        if self.phase is not Phase.DECODE:
            self.phase = move(PHASE_MOVES, self.phase, Phase.DECODE)
        self.stalled = stalled
        self._span_at = now + self.timeouts.idle_s
        self.suspended = stalled or self.paused
        return not moved_on

    def hold(self, now: float, *, stalled: bool, paused: bool) -> None:
        """The reader became, or stopped being, the reason for silence. When it stops, the span starts afresh."""
        was = self.suspended
        self.stalled, self.paused = stalled, paused
        self._suspend()
        if was and not self.suspended:
            self._span_at = now + (self.timeouts.prefill_s if self.phase is Phase.PREFILL else self.timeouts.idle_s)

    def _suspend(self) -> None:
        in_queue, decodes = self.phase is Phase.QUEUE, self.phase is Phase.DECODE
        self.suspended = (self.paused and not in_queue) or (self.stalled and decodes)

    def left(self, now: float, grace_s: float) -> None:
        """The last reader has gone."""
        self._grace_at = now + grace_s

    def returned(self) -> None:
        """A reader has come."""
        self._grace_at = inf

    def done(self) -> Phase:
        """Nothing more is awaited; returns the phase that it was in."""
        was = self.phase
        if was is not Phase.DONE:
            self.phase = move(PHASE_MOVES, was, Phase.DONE)
            self._span_at = self.total_at = self._grace_at = inf
        return was

    @property
    def code(self) -> str:
        """The name of what `at` stands for: one of the timeouts, or `grace`."""
        if self._grace_at < min(self.total_at, inf if self.suspended else self._span_at):
            return "grace"
        if self.suspended or self.total_at <= self._span_at:
            return "total_timeout"
        return {Phase.QUEUE: "queue_timeout", Phase.PREFILL: "prefill_timeout"}.get(self.phase, "idle_timeout")
