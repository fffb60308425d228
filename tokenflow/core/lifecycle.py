"""What a sink is told of a stream's life: plain records, in this order, each at most once a stream.

    Admitted -> SlotTaken -> FirstToken -> Ended

`Admitted` is always first and `Ended` always last; either or both between may be missing.

Times are seconds; `at` is Unix time, everything else a duration on the server's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EndReason = Literal["stop", "length", "tool_calls", "cancelled", "disconnected", "error"]
"""How it ended. `cancelled`: through the API or by the server itself; `disconnected`: the client left."""

Phase = Literal["queue", "prefill", "decode", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    id: str
    at: float
    model: str
    engine: str
    key: str
    """The name of the API key, or `-` where there is none."""
    route: str
    stream: bool
    choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTaken:
    id: str
    model: str
    queue_s: float
    """From admission to the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    id: str
    model: str
    ttft_s: float
    """From admission to the first token: queue and prefill."""
    prefill_s: float
    """From the slot to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Times between tokens, counted into `TBT_BUCKETS_S` (see `core.timings`); the last count is what lies above."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The usage record: who, what, how much, how long, and how it ended. Written on every path."""

    id: str
    at: float
    model: str
    engine: str
    key: str
    route: str
    stream: bool
    choices: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Sampled by the engine, also those that nobody could be sent any more."""
    delivered_tokens: int
    """In records that the kernel accepted for the fastest reader."""
    after_leaving_tokens: int
    """Of the generated: after the cancel, before the slot was free."""
    queue_s: float
    prefill_s: float | None
    ttft_s: float | None
    duration_s: float
    """From admission to the end (TTLT where it ended well)."""
    release_s: float | None
    """From the cancel to the free slot, where there was one."""
    reason: EndReason
    code: str | None
    """The error's code where the reason is `error`."""
    by: Literal["engine", "client", "server"]
    """Who ended it."""
    phase: Phase
    """Where it was when it ended."""
    gaps: Gaps


LifecycleEvent = Admitted | SlotTaken | FirstToken | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGauges:
    """A model at one moment, for a page of metrics."""

    model: str
    ready: bool
    active: int
    """Streams that hold slots."""
    waiting: int
    """Streams in the waiting room."""
    waiting_capacity: int
    """Its places: beyond, whoever asks is refused."""
    slots: int
    slots_used: int
    paused: int
    generated_tokens: int
    prompt_tokens: int
    kv_tokens_used: int
    kv_tokens_capacity: int
    kv_tokens_evicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The whole server at one moment."""

    models: tuple[ModelGauges, ...]
    sink_events_dropped: int
    """Lifecycle events that a slow sink's full channel refused, since the start."""
    replay_bytes: int = 0
    """Memory that all replay logs hold, Python's own overhead in."""
    replay_bytes_capacity: int = 0
    replay_records_evicted: int = 0
    """Records dropped, since the start, to make room in that memory."""
    kept_streams: int = 0
    """Streams that have ended and can be replayed."""
    connections: int = 0
    """Open now."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Connections and requests that were refused before any handler saw them, by reason, since the start."""
