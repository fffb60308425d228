"""All replay logs together: one bound on their memory, and who gives way when it is reached.

The order: logs of ended streams whose time is up; then ended ones, least recently read first; then oldest records of
live ones, the largest log first. What a live stream's own reader has not taken yet is never dropped (its window bounds
it), so there can come a moment when nothing may go: then no new stream is admitted.

Pure: the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenflow.core.replay import Bounds, Record, ReplayLog

STREAM_BYTES = 16_384
"""What a stream is, beside its log: its task, sends, account and names (measured)."""


class LogStore:
    """Makes logs, counts their bytes, and makes room.

    Args:
        bounds: of each log.
        total_bytes: of all of them.
        clock: seconds, monotonic.
    """

    def __init__(self, bounds: Bounds, total_bytes: int, clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._clock = clock
        self.total_bytes = total_bytes
        self.bytes = 0
        """Memory held by all logs, about."""
        self.evicted_records = 0
        """Counter: records dropped to make room for others."""
        self._live: dict[ReplayLog[Any], None] = {}  # oldest first
        self._ended: dict[ReplayLog[Any], tuple[float, Callable[[], None]]] = {}  # least recently read first

    def new(
        self,
        on_accept: Callable[[Record[Any]], None],
        *,
        on_read: Callable[[Record[Any]], None] = lambda record: None,
        keep: bool,
    ) -> ReplayLog[Any]:
        """An empty log, counted here until `forget`.

        Where it is to be kept, its stream is counted too, or a great many short ones would cost more than their logs.
        """
        log: ReplayLog[Any] = ReplayLog(on_accept, on_read=on_read, keep=keep, bounds=self._bounds, on_grow=self._grew)
        self._live[log] = None
        if keep:
            self._grew(STREAM_BYTES)
        return log

    def ended(self, log: ReplayLog[Any], until: float, on_evict: Callable[[], None] = lambda: None) -> None:
        """Its stream has ended; it is kept for replay `until` then, or until room is needed: `on_evict`."""
        del self._live[log]
        self._ended[log] = (until, on_evict)

    def being_read(self, log: ReplayLog[Any]) -> None:
        """Somebody reads `log`: among the ended ones it goes last now."""
        if log in self._ended:
            self._ended[log] = self._ended.pop(log)

    def forget(self, log: ReplayLog[Any]) -> None:
        """Drop all of `log`. Repeatable."""
        if log in self._ended:
            _, on_evict = self._ended.pop(log)
            on_evict()
        elif log in self._live:
            del self._live[log]
        else:
            return
        if log.keep:
            self._grew(-STREAM_BYTES)
        log.clear()

    @property
    def has_room(self) -> bool:
        """One more stream may begin."""
        return self.bytes < self.total_bytes

    def _make_room(self) -> None:
        """Evict, in order, until the total holds or nothing may go."""
        now = self._clock()
        for log in sorted(self._ended, key=lambda log: self._ended[log][0] > now):  # stable: least recently read first
            if self.has_room:
                return
            self.evicted_records += log.statistics().held
            self.forget(log)
        for log in sorted(self._live, key=lambda log: log.bytes, reverse=True):
            while not self.has_room and (dropped := log.drop_oldest()):
                self.evicted_records += dropped

    def _grew(self, change: int) -> None:
        self.bytes += change
        if change > 0 and self.bytes >= self.total_bytes:
            self._make_room()
