"""What a stream did, in numbers: gathered as it happens, told to the sinks, written as one usage record at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tokenflow.core import lifecycle
from tokenflow.core.replay import Record
from tokenflow.core.states import Phase
from tokenflow.core.timings import GapCounter, merge
from tokenflow.core.types import Delta, Started, Usage
from tokenflow.service.records import StreamEvent

By = Literal["engine", "client", "server"]
Emit = Callable[[lifecycle.LifecycleEvent], None]

log = logging.getLogger("tokenflow.streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamIdentity:
    """Who and what, as it goes into every record of its life."""

    id: str
    model: str
    engine: str
    key: str
    route: str
    stream: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended, and who ended it."""

    reason: lifecycle.EndReason
    by: By
    code: str | None = None


class Account:
    """Counts and times of one stream. `now` is Trio's clock, in seconds.

    Args:
        identity: whose they are.
        gaps: a counter for each of its sequences.
        emit: takes the records of its life.
    """

    def __init__(self, identity: StreamIdentity, gaps: list[GapCounter], now: float, emit: Emit) -> None:
        self.identity = identity
        self._emit = emit
        self._choices = len(gaps)
        self._admitted_at = now
        self._slot_at: float | None = None
        self._first_token_at: float | None = None
        self._cancelled_at: float | None = None
        self._gaps = gaps
        self._prompt = self._cached = self._generated = self._delivered = 0
        emit(
            lifecycle.Admitted(
                id=identity.id,
                at=time.time(),
                model=identity.model,
                engine=identity.engine,
                key=identity.key,
                route=identity.route,
                stream=identity.stream,
                choices=self._choices,
            )
        )

    def slot_taken(self, started: Started, now: float, *, again: bool) -> None:
        """One sequence has its slot; the first one ends the queue.

        Args:
            again: it is another choice for a prompt that has been counted: as OpenAI does, once.
        """
        if not again:
            self._prompt += started.prompt_tokens
            self._cached += started.cached_tokens
        if self._slot_at is None:
            self._slot_at = now
            self._emit(
                lifecycle.SlotTaken(id=self.identity.id, model=self.identity.model, queue_s=now - self._admitted_at)
            )

    def token(self, gaps: GapCounter, delta: Delta, now: float) -> None:
        """A delta came from the sequence whose counter that is."""
        self._generated += delta.tokens
        gaps.token(now)
        if self._first_token_at is None:
            self._first_token_at = now
            slot_at = self._admitted_at if self._slot_at is None else self._slot_at
            self._emit(
                lifecycle.FirstToken(
                    id=self.identity.id,
                    model=self.identity.model,
                    ttft_s=now - self._admitted_at,
                    prefill_s=now - slot_at,
                )
            )

    def read(self, record: Record[StreamEvent]) -> None:
        """A reader has really taken `record`."""
        self._delivered += record.event.tokens

    def cancelled(self, now: float) -> None:
        self._cancelled_at = now

    @property
    def usage(self) -> Usage:
        return Usage(prompt=self._prompt, completion=self._generated, cached=self._cached)

    def close(self, outcome: Outcome, phase: Phase, released_at: float, after_leaving: int) -> None:
        """Write the usage record. `phase` is where it was when it ended; `after_leaving` are the dropped tokens."""
        since = self._admitted_at
        slot, first, cancelled = self._slot_at, self._first_token_at, self._cancelled_at
        record = lifecycle.Ended(
            id=self.identity.id,
            at=time.time(),
            model=self.identity.model,
            engine=self.identity.engine,
            key=self.identity.key,
            route=self.identity.route,
            stream=self.identity.stream,
            choices=self._choices,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            generated_tokens=self._generated + after_leaving,
            delivered_tokens=self._delivered,
            after_leaving_tokens=after_leaving,
            queue_s=(released_at if slot is None else slot) - since,
            prefill_s=None if first is None or slot is None else first - slot,
            ttft_s=None if first is None else first - since,
            duration_s=released_at - since,
            release_s=None if cancelled is None else released_at - cancelled,
            reason=outcome.reason,
            code=outcome.code,
            by=outcome.by,
            phase=phase.value,
            gaps=merge(self._gaps),
        )
        self._emit(record)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", _line(record))


def _line(record: lifecycle.Ended) -> str:
    """The record as one line for a log. 499 is nginx's number for a client that left."""
    how = {"disconnected": "499 client left"}.get(record.reason, record.code or record.reason)
    ttft = "" if record.ttft_s is None else f", first token after {record.ttft_s:.3f} s"
    return (
        f"{record.id} {record.route} {record.model} {record.key}: {how} in {record.phase} by {record.by}; "
        f"{record.prompt_tokens}+{record.generated_tokens} tokens, {record.delivered_tokens} delivered, "
        f"{record.duration_s:.3f} s{ttft}"
    )
