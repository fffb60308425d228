"""From Trio to the file: lines are gathered for as long as a write takes, and the next write takes them all.

    record -> pending -> run: one batch at a time, in a thread -> LedgerFile

A write counts as taking a tenth of a second at least, so that a thousand streams a second do not wake a thread each.
So nothing waits longer than the write before it, and `kill -9` loses what that had not taken: a fraction of a second,
on a disk that works. On one that does not, lines stay pending, in order, up to a bound; beyond it the newest are
dropped and counted, so that what is missing in the end is one stretch of time and not holes all over.

Closing gives the last write `CLOSE_S`. A write that hangs longer (a dead network disk) is left to its thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import trio

from tokenflow.api import Ended, LifecycleEvent, StartupError
from tokenflow_ledger.file import LedgerFile, why_not
from tokenflow_ledger.line import line

MAX_PENDING = 50_000
"""Lines that wait for a disk that does not take them: some 30 MB."""
GATHER_S = 0.1
"""From one write to the next, at least."""
RETRY_S = 1.0
CLOSE_S = 5.0

log = logging.getLogger("tokenflow.ledger")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """`[sinks.ledger]`"""

    path: str = "ledger.jsonl"
    """The file that gets one line for each finished stream. Relative to the working directory."""
    fsync: bool = False
    """Wait for the disk at each write, so that a power cut loses no line that was written."""


class Statistics(NamedTuple):
    """A sink at one moment, for debugging and tests."""

    pending: int
    """Lines not in the file yet."""
    dropped: int
    """Lines given up since the file was last written whole: the disk refused them for too long."""
    retry_at: float | None
    """On Trio's clock: when the disk, having refused, is tried again."""


class LedgerSink:
    """Takes usage records and never waits for the disk."""

    def __init__(self, file: LedgerFile, *, max_pending: int = MAX_PENDING, gather_s: float = GATHER_S) -> None:
        self._file = file
        self._gather_s = gather_s
        self._max_pending = max_pending
        self._pending: deque[bytes] = deque()
        self._thread = trio.CapacityLimiter(1)
        self._news = trio.Event()
        self._closing = trio.Event()
        self._patience = trio.CancelScope(shield=True)  # its deadline is set by `close`
        self._failing: int | None = None  # the errno that the log has been told of
        self._dropped = 0
        self._retry_at: float | None = None

    def statistics(self) -> Statistics:
        return Statistics(len(self._pending), self._dropped, self._retry_at)

    async def record(self, event: LifecycleEvent) -> None:
        if not isinstance(event, Ended):
            return
        if len(self._pending) < self._max_pending:
            self._pending.append(line(event))
            self._news.set()
        else:
            self._drop()

    def close(self) -> None:
        """Let `run` write what is pending and return. Repeatable."""
        if not self._closing.is_set():
            self._patience.deadline = trio.current_time() + CLOSE_S
            self._closing.set()
            self._news.set()

    async def run(self) -> None:
        """Write until closed. Being cancelled does not end it: `close` does, for the last lines must be written."""
        with self._patience:
            await self._write_until_closed()
            await trio.to_thread.run_sync(self._file.close, limiter=self._thread, abandon_on_cancel=True)
        if self._pending or self._dropped:
            lost = len(self._pending) + self._dropped
            log.error("ledger %s: closed; %d lines could not be written and are lost", self._file.path, lost)

    async def _write_until_closed(self) -> None:
        while self._pending or not self._closing.is_set():
            if not self._pending:
                self._news = trio.Event()
                await self._news.wait()
            elif await self._write():
                with trio.move_on_after(self._gather_s):
                    await self._closing.wait()
            else:
                if self._closing.is_set():
                    return
                self._retry_at = trio.current_time() + RETRY_S
                with trio.move_on_at(self._retry_at):
                    await self._closing.wait()  # and then try once more
                self._retry_at = None

    async def _write(self) -> bool:
        """Write all that is pending now. False: the disk did not take all of it."""
        batch = tuple(self._pending)
        appended = await trio.to_thread.run_sync(self._file.append, batch, limiter=self._thread, abandon_on_cancel=True)
        for _ in range(appended.lines):
            self._pending.popleft()
        if appended.error is not None:
            self._failed(appended.error)
        elif self._failing is not None or self._dropped:
            self._recovered()
        return appended.error is None or not self._pending

    def _failed(self, error: OSError) -> None:
        if self._failing != error.errno:  # once an outage, not once a second
            self._failing = error.errno
            log.error(
                "ledger %s: cannot write: [Errno %s] %s; keeping up to %d lines and trying again every %g s",
                self._file.path,
                error.errno,
                error.strerror,
                self._max_pending,
                RETRY_S,
            )

    def _recovered(self) -> None:
        log.warning("ledger %s: writing again; %d lines were dropped meanwhile", self._file.path, self._dropped)
        self._failing, self._dropped = None, 0

    def _drop(self) -> None:
        if not self._dropped:
            log.error("ledger %s: %d lines wait; dropping further ones", self._file.path, self._max_pending)
        self._dropped += 1


def missing(config: LedgerConfig) -> Iterator[tuple[str, str]]:
    """What is wrong with the file, by its key."""
    path = Path(config.path).absolute()
    if error := why_not(path):
        yield "path", _refused(path, error)


def _refused(path: Path, error: OSError) -> str:
    return (
        f"cannot write {path}: {error.strerror} (errno {error.errno}); "
        "make it writable for this user, or name another file"
    )


@asynccontextmanager
async def open_ledger(config: LedgerConfig) -> AsyncIterator[LedgerSink]:
    """The sink, for as long as the context lasts.

    Raises:
        StartupError: the file cannot be opened for writing.
    """
    file = LedgerFile(Path(config.path), fsync=config.fsync)
    try:
        await trio.to_thread.run_sync(file.open)
    except OSError as exc:
        raise StartupError(f"sinks.ledger.path: {_refused(file.path, exc)}.") from exc
    sink = LedgerSink(file)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.run)
        try:
            yield sink
        finally:
            sink.close()
