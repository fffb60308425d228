"""`/v1/streams`: what a stream is doing, and where a reader says it was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenflow.core.types import Usage
from tokenflow.dialects.openai_frames import usage_object
from tokenflow.errors import InvalidRequest

_EVENT_ID = re.compile(r"([\w.-]{1,200}):([0-9]{1,15})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A stream at one moment."""

    id: str
    model: str
    created: int
    """Unix seconds."""
    phase: str
    paused: bool
    readers: int
    first_n: int
    """The oldest record that is held; above `last_n` if none is."""
    last_n: int
    on_disconnect: str
    finish_reasons: tuple[str | None, ...]
    reason: str | None
    """How it ended; None while it lives."""
    error: str | None
    """The code of the error that it ended with."""
    usage: Usage
    age_s: float


def state_object(state: StreamState) -> dict[str, Any]:
    """One stream, for `GET /v1/streams/{id}`."""
    return {
        "id": state.id,
        "object": "stream",
        "created": state.created,
        "model": state.model,
        "state": state.phase,
        "paused": state.paused,
        "readers": state.readers,
        "first_n": state.first_n,
        "last_n": state.last_n,
        "on_disconnect": state.on_disconnect,
        "finish_reasons": list(state.finish_reasons),
        "reason": state.reason,
        "error": state.error,
        "usage": usage_object(state.usage),
        "age_s": round(state.age_s, 3),
    }


def parse_event_id(text: str) -> tuple[str, int]:
    """`<stream id>:<n>`, as our events carry it and a client gives it back."""
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"{text[:100]!r} is no event id of this server.", param="Last-Event-ID")
    return found[1], int(found[2])


def parse_after(text: str) -> int:
    """The query's `after`."""
    if not re.fullmatch("[0-9]{1,15}", text, re.ASCII):
        raise InvalidRequest(f"'after' is the number of the last record read, not {text[:40]!r}.", param="after")
    return int(text)
