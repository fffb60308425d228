"""A reader's place in a stream: it pulls from the log at its own pace, or is written to by whoever has the record.

Caught up, and given an `AtOnce`, it gets each record in the task that made it: no wake-up, no queue. Otherwise `read`
returns everything after the cursor, and `ack` moves the cursor.
"""

from __future__ import annotations

from typing import Protocol

import trio

from tokenflow.core.replay import Record, ReplayLog
from tokenflow.core.types import Delta
from tokenflow.errors import InvalidRequest
from tokenflow.service.records import StreamEvent


class AtOnce(Protocol):
    """Writes to a reader that has caught up, from whichever task has a record for it. Must not block."""

    def write(self, records: list[Record[StreamEvent]]) -> bool | None:
        """True: all are taken. False: a part is held, and `flush` waits until it is taken. None: not now."""

    async def flush(self) -> None: ...


class Source(Protocol):
    """What a reader needs of its stream."""

    @property
    def well(self) -> bool: ...
    def allowed(self) -> None: ...
    def moved(self) -> None: ...
    def left(self, reader: StreamReader) -> None: ...


class StreamReader:
    """One reader.

    Args:
        stream: what it reads.
        log: where that stands.
        after: it has everything up to this record.
        credit: as if `allow(credit)` had been called before anything was read.

    Raises:
        ResumeWindowLost, InvalidRequest: `after` lies before or behind what the log holds.
    """

    def __init__(self, stream: Source, log: ReplayLog[StreamEvent], after: int, credit: int | None) -> None:
        self._stream = stream
        self.allowed = None if credit is None else after + credit
        """n of the last delta that it may be given; None: it does not count."""
        self._given = after
        self._let_go = False
        self._news = trio.Event()
        self._at_once: AtOnce | None = None  # while `read` waits, and only where it was given one
        self._held = 0  # n of the last record that `_at_once` holds a part of
        self._failure: Exception | None = None
        try:
            self._cursor = log.attach(self._wake, after)
        except ValueError as exc:
            raise InvalidRequest(f"{exc}.", param="after") from exc
        self.closed = False

    async def read(self, at_once: AtOnce | None = None) -> list[Record[StreamEvent]]:
        """Wait until there is something after the cursor, and return all of it (within the credit); the same again
        until `ack`.

        Returns an empty list once the end has been acknowledged, or the reader closed.

        Args:
            at_once: while this waits, deltas are written to it, and acknowledged, and this goes on waiting. What it
                raises is raised here, and nowhere else.

        Raises:
            ResumeWindowLost: it was too slow, and what it needs next is not held any more.
        """
        while not self.closed:
            if self._held:
                assert at_once is not None
                await at_once.flush()
                self.ack(self._held)
                self._held = 0
            records = self._within(self._cursor.peek())
            if records or self._cursor.at_end:
                self._given = self._cursor.n + len(records)
                return records
            self._news, self._at_once = trio.Event(), at_once
            try:
                await self._news.wait()
            finally:
                self._at_once = None
            if self._failure is not None:
                raise self._failure
        await trio.lowlevel.checkpoint_if_cancelled()  # who closes it under a task's hands has cancelled that task
        return []

    def _wake(self, record: Record[StreamEvent]) -> None:
        """There is more. Called by the log, in the task of whoever made it."""
        at_once, self._at_once = self._at_once, None
        if at_once is not None and isinstance(record.event, Delta):
            taken = None
            try:
                if records := self._within(self._cursor.peek()):
                    taken = at_once.write(records)
            except Exception as exc:
                self._failure = exc
            if taken:
                self._at_once, self._given = at_once, records[-1].n
                self.ack(self._given)
                return
            if taken is False:
                self._held = records[-1].n
        self._news.set()

    def _within(self, records: list[Record[StreamEvent]]) -> list[Record[StreamEvent]]:
        """What the credit allows of them. The end costs nothing, nor does what is left when it came early."""
        if self.allowed is None or self._let_go or not self._stream.well:
            return records
        room = max(0, self.allowed - self._cursor.n)
        if room < len(records) and not isinstance(records[room].event, Delta):
            room += 1
        return records[:room]

    def allow(self, records: int) -> None:
        """Credit: `records` more, beyond what was allowed or, the first time, beyond what was given.

        From then on this reader is given no more than it allowed, and where every reader counts like this, no more is
        generated either. The end is free.
        """
        self.allowed = (self._given if self.allowed is None else self.allowed) + records
        self._news.set()
        self._stream.allowed()

    def let_go(self) -> None:
        """The stream was cancelled: what is left comes whether it is allowed or not."""
        self._let_go = True
        self._news.set()

    def ack(self, n: int) -> None:
        """Everything up to `n` has been taken by whoever this reads for (over HTTP: by the kernel)."""
        self._cursor.ack(n)
        self._stream.moved()

    @property
    def n(self) -> int:
        """Everything up to this record is taken."""
        return self._cursor.n

    @property
    def at_end(self) -> bool:
        """It has everything there will ever be."""
        return self._cursor.at_end

    def close(self) -> None:
        """Leave. Repeatable."""
        if not self.closed:
            self.closed = True
            self._news.set()
            self._cursor.detach()
            self._stream.left(self)
