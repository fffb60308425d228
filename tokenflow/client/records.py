"""Server-sent events in, whole records out, each exactly once: what a stream means, without any I/O.

A record may come as several events, of which only the last carries its id. So events without a new id are held until
the one that has it: cut in between, they are not the record, and all of it comes again. A record whose n is not above
the last one's is a repetition and dropped; one that leaves out an n is a fault, never a silent gap. The end (finish,
usage, `[DONE]`) is one record like any other.

A server that numbers nothing (another implementation, or `on_disconnect: cancel`) is taken event by event.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenflow.client.errors import BadAnswer, ServerError, from_envelope
from tokenflow.core.sse import Event

DONE = "[DONE]"
HELD_CHARS = 16_777_216
"""The most that an unfinished record may hold: what bounds the memory against a hostile peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of one choice's answer."""

    n: int
    """The record's number, from 1. Several deltas have the same where a record came in parts."""
    index: int
    """The choice that it belongs to."""
    text: str
    """May be empty: see `reasoning` and `choice`."""
    choice: Mapping[str, Any]
    """The choice as it came, for tool calls and log-probabilities."""
    reasoning: str = ""
    """What the model thinks before it answers; no part of the answer."""


class Records:
    """What has come of one stream, over however many connections.

    Args:
        after: n of the last record that the caller has already.
    """

    def __init__(self, after: int = 0) -> None:
        self.id: str | None = None
        """As the chunks say it."""
        self.n = after
        self.numbered = False
        """Its events carry ids: set by whoever knows what was asked for."""
        self.done = False
        """A terminal sequence was seen."""
        self.failure: ServerError | None = None
        self.finish_reasons: dict[int, str] = {}
        self.usage: dict[str, Any] | None = None
        self._texts: dict[int, list[str]] = {}
        self._held: list[str] = []
        self._held_chars = 0
        self._event_id = ""

    @property
    def texts(self) -> dict[int, str]:
        """All text so far, by choice."""
        return {index: "".join(pieces) for index, pieces in self._texts.items()}

    def connected(self) -> None:
        """What follows comes from a new connection: half a record from the old one is nothing."""
        self._release()
        self._event_id = ""

    def take(self, event: Event) -> list[Delta]:
        """An event as it came; the deltas of the records that it completes.

        Raises:
            BadAnswer: it is no event of this protocol.
        """
        if self.done:
            return []
        n = self._new_n(event.id)
        if n is None and self.numbered and event.data != DONE:
            self._hold(event.data)
            return []
        record = [*self._release(), event.data]
        if n is not None:
            if n <= self.n:
                return []
            if n != self.n + 1:
                raise BadAnswer(f"record {n} came after record {self.n}")
            self.n = n
        return [delta for data in record for delta in self._read(data, numbered=n is not None)]

    def _hold(self, data: str) -> None:
        self._held.append(data)
        self._held_chars += len(data)
        if self._held_chars > HELD_CHARS:
            raise BadAnswer(f"a record is longer than {HELD_CHARS} characters")

    def _release(self) -> list[str]:
        held, self._held, self._held_chars = self._held, [], 0
        return held

    def _new_n(self, event_id: str) -> int | None:
        """The number that this event brings; the parser repeats the last id with events that have none."""
        if event_id == self._event_id:
            return None
        self._event_id = event_id
        whose, _, number = event_id.rpartition(":")
        if not whose or not number.isascii() or not number.isdigit() or len(number) > 15:
            return None  # not one of ours
        if self.id is not None and whose != self.id:
            raise BadAnswer(f"an event of stream {whose} came within stream {self.id}")
        return int(number) or None  # 0 only says whose stream it is

    def _read(self, data: str, *, numbered: bool) -> list[Delta]:
        if data == DONE:
            self.done = True
            return []
        chunk = _object(data)
        if "error" in chunk:
            self.failure = from_envelope(chunk["error"])
            self.done = True
            return []
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        deltas = []
        for choice in chunk.get("choices") or ():
            if (delta := self._delta(choice)) is not None:
                self.n += not numbered
                index, text, reasoning = delta
                deltas.append(Delta(n=self.n, index=index, text=text, choice=choice, reasoning=reasoning))
        return deltas

    def _delta(self, choice: Any) -> tuple[int, str, str] | None:
        """Index, text and reasoning of a choice that brings something."""
        try:
            index, inner = choice.get("index", 0), choice.get("delta") or {}
            text = inner.get("content") or choice.get("text") or ""
            reasoning = inner.get("reasoning_content") or ""
            more = inner.get("tool_calls") or choice.get("logprobs")
            reason = choice.get("finish_reason")
        except AttributeError:
            raise BadAnswer(f"this is no choice: {choice!r:.80}") from None
        if not isinstance(index, int) or not isinstance(text, str) or not isinstance(reasoning, str):
            raise BadAnswer(f"this is no choice: {choice!r:.80}")
        if isinstance(reason, str):
            self.finish_reasons[index] = reason
        if not text and not reasoning and not more:
            return None
        self._texts.setdefault(index, []).append(text)
        return index, text, reasoning


def chunk_id(event: Event) -> str | None:
    """The `id` within an event's JSON, if that is what it is."""
    try:
        found = json.loads(event.data)["id"]
    except (ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _object(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise BadAnswer(f"this is no JSON: {data!r:.80}") from None
    if not isinstance(value, dict):
        raise BadAnswer(f"this is no chunk: {data!r:.80}")
    return value
