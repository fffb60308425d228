"""The two state machines, each one table. A move that the table does not have is a fault of ours and raises.

A **sequence** is what the step loop moves; a **stream** is what a client sees of one or more sequences.
Only `api.loop` moves sequences and only `service.stream` moves streams.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar


class SequenceState(Enum):
    WAITING = "waiting"
    """No slot yet, or none any more: it gave its own up for others."""
    ACTIVE = "active"
    """Takes part in steps: prefill, then decode."""
    PARKED = "parked"
    """Has its slot and takes no steps: no credit."""
    GONE = "gone"
    """Holds nothing any more."""


class Phase(Enum):
    QUEUE = "queue"
    """In the waiting room."""
    PREFILL = "prefill"
    """Has its slots; no token yet."""
    DECODE = "decode"
    """Tokens come."""
    DONE = "done"
    """Sealed; nothing follows."""


S = TypeVar("S", bound=Enum)

SEQUENCE_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.ACTIVE, SequenceState.GONE}),
    SequenceState.ACTIVE: frozenset({SequenceState.PARKED, SequenceState.WAITING, SequenceState.GONE}),
    SequenceState.PARKED: frozenset({SequenceState.ACTIVE, SequenceState.WAITING, SequenceState.GONE}),
    SequenceState.GONE: frozenset(),
}

PHASE_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUE: frozenset({Phase.PREFILL, Phase.DONE}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.DONE}),
    Phase.DECODE: frozenset({Phase.DONE}),
    Phase.DONE: frozenset(),
}


def move(table: dict[S, frozenset[S]], state: S, to: S) -> S:
    """Return `to` if the table allows it from `state`; RuntimeError if not."""
    if to not in table[state]:
        raise RuntimeError(f"no move from {state.name} to {to.name}")
    return to
