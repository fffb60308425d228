"""One moving deadline for a stream: queue, then prefill, then idle, each within total.

    queue     from admission to the slot
    prefill   from the slot to the first token
    idle      between tokens; suspended while the sequence is parked for its reader or paused
    total     from admission to the end; never suspended

Pure: `now` is an argument, in seconds on any monotonic clock. The caller keeps a cancel scope at `at`.
"""

from __future__ import annotations

from math import inf

from tokenflow.core.states import PHASE_MOVES, Phase, move
from tokenflow.core.types import Timeouts


class Deadline:
    """When the stream must be given up, and under which name."""

    __slots__ = ("_span_at", "_timeouts", "phase", "suspended", "total_at")

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self.phase = Phase.QUEUE
        self.suspended = False
        self.total_at = now + timeouts.total_s
        self._span_at = now + timeouts.queue_s

    @property
    def at(self) -> float:
        """The moment at which it passes; inf once done."""
        if self.phase is Phase.DONE:
            return inf
        return self.total_at if self.suspended else min(self._span_at, self.total_at)

    def slot_taken(self, now: float) -> None:
        self.phase = move(PHASE_MOVES, self.phase, Phase.PREFILL)
        self._span_at = now + self._timeouts.prefill_s

    def token(self, now: float, *, stalled: bool) -> None:
        """A token came; `stalled`: and the reader's window is full, so that the next may not."""
        if self.phase is not Phase.DECODE:
            self.phase = move(PHASE_MOVES, self.phase, Phase.DECODE)
        self.suspended = stalled
        self._span_at = now + self._timeouts.idle_s

    def stall(self, now: float, *, stalled: bool) -> None:
        """The reader became, or stopped being, the reason for silence. Ending a stall starts idle afresh."""
        if self.phase is Phase.DECODE and self.suspended and not stalled:
            self._span_at = now + self._timeouts.idle_s
        self.suspended = stalled and self.phase is Phase.DECODE

    def done(self) -> Phase:
        """Nothing more is awaited; returns the phase that it was in."""
        was = self.phase
        if was is not Phase.DONE:
            self.phase = move(PHASE_MOVES, was, Phase.DONE)
        return was

    @property
    def code(self) -> str:
        """The name of the timeout that `at` stands for."""
        if self.suspended or self.total_at <= self._span_at:
            return "total_timeout"
        return {Phase.QUEUE: "queue_timeout", Phase.PREFILL: "prefill_timeout"}.get(self.phase, "idle_timeout")
