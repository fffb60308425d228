"""What a stream's log holds: deltas, then one end. The end is one record, so that it replays as one."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenflow.core.types import Delta, FinishReason, Usage
from tokenflow.errors import TokenflowError


@dataclass(frozen=True, slots=True)
class Ended:
    """Every choice has finished."""

    reasons: tuple[FinishReason, ...]
    usage: Usage
    tokens: int = 0
    """Generated tokens that are in no delta before it: an end-of-sequence token, a stop string."""


@dataclass(frozen=True, slots=True)
class Failed:
    """It ended otherwise."""

    error: TokenflowError
    tokens: int = field(default=0, init=False)


StreamEvent = Delta | Ended | Failed
