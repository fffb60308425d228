"""The replay log: what an engine made, numbered, between the engine's pace and each reader's own.

The log alone numbers records (n, from 1, without a gap). A reader is a cursor: the n up to which it has everything.
The fastest reader's cursor is what the engine is paced by: when it moves, the records that it passed are *accepted* and
their credit goes back to the sequence that made them. A slower reader pulls from the log at its own pace and slows
nobody.

How much is held is bounded. A log that is not kept drops what every attached reader has; a kept one, whose readers may
come back, drops its oldest eighth when it outgrows its bound. A reader that needs what was dropped has fallen out: it
is told so by name, and which records are still there. What the fastest reader has not taken is never dropped: the
window bounds that already.

Pure: waking a reader, granting credit and telling of growth are callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from tokenflow.errors import ResumeWindowLost

E = TypeVar("E")

RECORD_BYTES: Final = 235
"""What Python keeps for a record beside its text: itself, the event, numbers and the list's part (measured)."""


class Record(Generic[E]):
    """One numbered entry. It does not change; no tuple, for one is made for every token.

    Attributes:
        n: its number.
        event: what it says.
        source: which sequence made it; -1: none alone.
        at: when, in seconds on the caller's clock.
        size: bytes of memory, about.
    """

    __slots__ = ("at", "event", "n", "size", "source")

    def __init__(self, n: int, event: E, source: int, at: float, size: int) -> None:
        self.n = n
        self.event = event
        self.source = source
        self.at = at
        self.size = size


class Bounds(NamedTuple):
    """How much one log may hold."""

    records: int = 16_384
    bytes: int = 1_048_576


class Statistics(NamedTuple):
    """A log at one moment, for debugging and tests."""

    head: int
    accepted: int
    held: int
    """Records that are there to be read."""
    bytes: int
    readers: int


class ReplayLog(Generic[E]):
    """Append-only, numbered, sealed once.

    Args:
        on_accept: called with each record that the fastest reader has passed for the first time, in order; while the
            log runs on without readers, with each at once.
        on_read: called with each record that a reader has really taken, once, in order.
        keep: hold delivered records too, within `bounds`, for readers who come (back) later.
        bounds: of what is held.
        on_grow: called with the change in bytes held, whenever it changes.
    """

    def __init__(
        self,
        on_accept: Callable[[Record[E]], None],
        *,
        on_read: Callable[[Record[E]], None] = lambda record: None,
        keep: bool = False,
        bounds: Bounds | None = None,
        on_grow: Callable[[int], None] = lambda change: None,
    ) -> None:
        self._on_accept = on_accept
        self._on_read = on_read
        self._read = 0  # the highest n that any reader has taken
        self._on_grow = on_grow
        self._bounds = bounds or Bounds()
        self._records: list[Record[E]] = []
        self._told = 0  # of `bytes`
        self._dropped = 0
        self._readers: list[Cursor[E]] = []
        self.keep = keep
        self.run_on = False
        """While nobody reads, everything counts as accepted at once: the engine runs on into the log."""
        self.sealed = False
        self._held_back = False
        self.accepted = 0
        """The highest n that the fastest reader has, ever."""
        self.bytes = 0
        """Memory held, about."""

    @property
    def head(self) -> int:
        """n of the newest record; 0 while there is none."""
        return self._dropped + len(self._records)

    @property
    def oldest(self) -> int:
        """n of the oldest record that is held; `head + 1` if none is."""
        return self._dropped + 1

    @property
    def behind(self) -> bool:
        """There are readers, and all of them are behind `accepted`: the furthest point that any reader has reached, or
        running on without one has.
        """
        return bool(self._readers) and max(reader.n for reader in self._readers) < self.accepted

    def statistics(self) -> Statistics:
        return Statistics(self.head, self.accepted, len(self._records), self.bytes, len(self._readers))

    def seal(self, event: E, *, at: float = 0.0) -> int:
        """Append the end; nothing can follow."""
        return self.append(event, at=at, last=True)

    def append(
        self, event: E, source: int = -1, *, at: float = 0.0, size: int = 0, last: bool = False, hold: bool = False
    ) -> int:
        """Number `event` and hand it to whoever waits. Returns its n.

        Args:
            event: what it says.
            source: see `Record`.
            at: see `Record`.
            size: its own bytes, of text mostly.
            last: nothing can follow.
            hold: another follows at once, or `wake`: nobody is woken for this one.
        """
        if self.sealed:
            raise RuntimeError("the log is sealed")
        n = self._dropped + len(self._records) + 1
        record = Record(n, event, source, at, size + RECORD_BYTES)
        self._records.append(record)
        self.sealed = last  # before waking: a reader that takes the end inline must find itself `at_end`
        self.bytes += record.size
        self._held_back = hold
        if not hold:
            self._wake(record)
        if self.run_on and not self._readers:
            self._accept(n)
        if len(self._records) > self._bounds.records or self.bytes > self._bounds.bytes:
            self.drop_oldest()
        if not hold and self.bytes != self._told:  # what every reader took at once has come and gone
            self._tell()
        return n

    def wake(self) -> None:
        """What was to follow does not: hand out what was held back."""
        if self._held_back:
            self._held_back = False
            if self._records:
                self._wake(self._records[-1])
            if self.bytes != self._told:
                self._tell()

    def _wake(self, record: Record[E]) -> None:
        if len(self._readers) == 1:
            self._readers[0].wake(record)
            return
        for reader in tuple(self._readers):  # a copy: one that fails inline detaches, and the next must not be skipped
            reader.wake(record)

    def attach(self, wake: Callable[[Record[E]], None], after: int = 0) -> Cursor[E]:
        """A reader that has everything up to `after`; being ahead of the others, it paces the engine at once.

        `wake` is called with each new record, or the newest of several; it must neither block nor raise, and may
        acknowledge.

        Raises:
            ResumeWindowLost: what comes after `after` is not held any more.
            ValueError: `after` lies ahead of the log.
        """
        if not 0 <= after <= self.head:
            raise ValueError(f"n {after} lies ahead: the log's last is {self.head}")
        self._check_held(after)
        cursor = Cursor(self, wake, after)
        self._readers.append(cursor)
        self._passed()
        return cursor

    def drop_oldest(self) -> int:
        """Drop an eighth of what is held, as far as it has been accepted; the number of records dropped."""
        count = min(len(self._records) // 8 + 1, self.accepted - self._dropped)
        self._drop(count)
        self._tell()
        return count

    def clear(self) -> None:
        """Drop everything: nothing that was in it will be accepted any more, and nobody is told."""
        self.accepted = self.head
        self._drop(len(self._records))
        self._tell()
        self._on_accept = self._on_read = _ignore

    def _drop(self, count: int) -> None:
        if count <= 0:
            return
        if count == 1:  # as in every stream whose reader keeps up
            self.bytes -= self._records.pop(0).size
        else:
            self.bytes -= sum([record.size for record in self._records[:count]])
            del self._records[:count]
        self._dropped += count

    def _tell(self) -> None:
        change, self._told = self.bytes - self._told, self.bytes
        self._on_grow(change)

    def _check_held(self, n: int) -> None:
        if n < self._dropped:
            raise ResumeWindowLost(asked=n + 1, oldest=self.oldest, last=self.head, sealed=self.sealed)

    def _passed(self) -> None:
        """A cursor came, moved or went: give back the credit of what is newly accepted, drop what nobody needs."""
        if not self._readers:
            if self.run_on:
                self._accept(self.head)
            return
        fastest = slowest = self._readers[0].n
        if len(self._readers) > 1:
            fastest, slowest = max([reader.n for reader in self._readers]), min([reader.n for reader in self._readers])
        while self._read < fastest:
            self._read += 1
            if self._read > self._dropped:  # else it comes back after what it had, and that is gone
                self._on_read(self._records[self._read - self._dropped - 1])
        if self.accepted < fastest:
            self._accept(fastest)
        if not self.keep:
            self._drop(slowest - self._dropped)
        if self.bytes != self._told:
            self._tell()

    def _accept(self, n: int) -> None:
        while self.accepted < n:
            self.accepted += 1
            self._on_accept(self._records[self.accepted - self._dropped - 1])


class Cursor(Generic[E]):
    """One reader's place in the log."""

    __slots__ = ("_log", "n", "wake")

    def __init__(self, log: ReplayLog[E], wake: Callable[[Record[E]], None], after: int) -> None:
        self._log = log
        self.wake = wake
        self.n = after
        """Everything up to this n is delivered."""

    def peek(self) -> list[Record[E]]:
        """Everything after the cursor. It stays there until `ack`.

        Raises:
            ResumeWindowLost: this reader was too slow, and what it needs next is not held any more.
        """
        self._log._check_held(self.n)
        return self._log._records[self.n - self._log._dropped :]

    @property
    def at_end(self) -> bool:
        """It has the seal: nothing will follow."""
        return self._log.sealed and self.n == self._log.head

    def ack(self, n: int) -> None:
        """Everything up to `n` is delivered."""
        log = self._log
        if not self.n <= n <= log._dropped + len(log._records):
            raise ValueError(f"ack of {n} at {self.n} of {log.head}")
        self.n = n
        log._passed()

    def detach(self) -> None:
        """Leave. What it had accepted stays accepted. Repeatable."""
        if self in self._log._readers:
            self._log._readers.remove(self)
            self.wake = _ignore
            self._log._passed()


def _ignore(record: Record[Any]) -> None:
    pass
