"""The replay log: what an engine made, numbered, between the engine's pace and each reader's own.

The log alone numbers records (n, from 1, without a gap). A reader is a cursor: the n up to which it has everything.
The fastest reader's cursor is what the engine is paced by: when it moves, the records that it passed are *accepted* and
their credit goes back to the sequence that made them. A slower reader pulls from the log at its own pace and slows
nobody.

Records that every attached reader has are dropped; a stream that outlives its reader will keep them (its own issue).

Pure: waking a reader and granting credit are callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

E = TypeVar("E")


class Record(NamedTuple, Generic[E]):
    """One numbered entry: what it says, which sequence made it, and how many of that sequence's events it holds."""

    n: int
    event: E
    source: int
    events: int


class Statistics(NamedTuple):
    """A log at one moment, for debugging and tests."""

    head: int
    accepted: int
    held: int
    """Records that some reader may still need."""
    readers: int


class ReplayLog(Generic[E]):
    """Append-only, numbered, sealed once.

    Args:
        on_accept: called with each record that the fastest reader has passed for the first time, in order.
    """

    def __init__(self, on_accept: Callable[[Record[E]], None]) -> None:
        self._on_accept = on_accept
        self._records: list[Record[E]] = []
        self._dropped = 0
        self._readers: list[Cursor[E]] = []
        self.sealed = False
        self.accepted = 0
        """The highest n that the fastest reader has, ever."""

    @property
    def head(self) -> int:
        """n of the newest record; 0 while there is none."""
        return self._dropped + len(self._records)

    def statistics(self) -> Statistics:
        return Statistics(self.head, self.accepted, len(self._records), len(self._readers))

    def append(self, event: E, source: int = -1, events: int = 0) -> int:
        """Number `event` and hand it to whoever waits. Returns its n."""
        return self._add(event, source, events, last=False)

    def seal(self, event: E) -> int:
        """Append the end; nothing can follow."""
        return self._add(event, -1, 0, last=True)

    def _add(self, event: E, source: int, events: int, *, last: bool) -> int:
        if self.sealed:
            raise RuntimeError("the log is sealed")
        n = self.head + 1
        self._records.append(Record(n, event, source, events))
        self.sealed = last  # before waking: a reader that takes the end inline must find itself `at_end`
        for reader in tuple(self._readers):  # a copy: one that fails inline detaches, and the next must not be skipped
            reader.wake()
        return n

    def attach(self, wake: Callable[[], None], after: int = 0) -> Cursor[E]:
        """A new reader that has everything up to `after`; being ahead of the others, it paces the engine at once.

        `wake` is called whenever there is more; it must neither block nor raise.
        """
        if not self._dropped <= after <= self.head:
            raise ValueError(f"n {after} is not held: the log holds {self._dropped + 1} to {self.head}")
        cursor = Cursor(self, wake, after)
        self._readers.append(cursor)
        self._passed()
        return cursor

    def _passed(self) -> None:
        """A cursor came, moved or went: give back the credit of what is newly accepted, drop what nobody needs."""
        if not self._readers:
            return
        fastest = max(reader.n for reader in self._readers)
        while self.accepted < fastest:
            self.accepted += 1
            self._on_accept(self._records[self.accepted - self._dropped - 1])
        drop = min(reader.n for reader in self._readers) - self._dropped
        if drop > 0:
            del self._records[:drop]
            self._dropped += drop


class Cursor(Generic[E]):
    """One reader's place in the log."""

    __slots__ = ("_log", "n", "wake")

    def __init__(self, log: ReplayLog[E], wake: Callable[[], None], after: int) -> None:
        self._log = log
        self.wake = wake
        self.n = after
        """Everything up to this n is delivered."""

    def peek(self) -> list[Record[E]]:
        """Everything after the cursor. It stays there until `ack`."""
        start = self.n - self._log._dropped
        if start < 0:  # only after `detach`; a negative index would hand out the wrong records
            raise RuntimeError(f"the reader at {self.n} has left, and what follows is dropped")
        return self._log._records[start:]

    @property
    def at_end(self) -> bool:
        """It has the seal: nothing will follow."""
        return self._log.sealed and self.n == self._log.head

    def ack(self, n: int) -> None:
        """Everything up to `n` is delivered."""
        if not self.n <= n <= self._log.head:
            raise ValueError(f"ack of {n} at {self.n} of {self._log.head}")
        self.n = n
        self._log._passed()

    def detach(self) -> None:
        """Leave. What it had accepted stays accepted. Repeatable."""
        if self in self._log._readers:
            self._log._readers.remove(self)
            self._log._passed()
