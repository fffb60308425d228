"""Making room: slots that nobody uses go to who waits for one.

A stream that holds slots and takes no steps (paused, left, or parked for a reader that does not read) keeps them only
while nobody waits. When somebody does, the one that has been idle longest gives its slots up: at once if it is paused,
after `park_hold_s` if its reader is only slow. It goes on later, through the prefix cache, with the same output. So
neither stalled nor departed clients can starve the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import trio

from tokenflow.core.admission import Admission
from tokenflow.service.stream import Stream


class RoomMaker:
    """Watches one model's waiting room.

    Args:
        admission: the room.
        streams: the model's live streams.
        park_hold_s: how long a stalled reader may hold slots that others want.
    """

    def __init__(self, admission: Admission, streams: Callable[[], Iterable[Stream]], park_hold_s: float) -> None:
        self._admission = admission
        self._streams = streams
        self._park_hold_s = park_hold_s
        self._bell = trio.Event()
        admission.listen(lambda: self._bell.set())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            stream, due = self._next() if self._admission.waiting else (None, inf)
            if stream is not None and due <= trio.current_time():
                stream.give_up_slots()
                while stream.slotless and stream.holds_slots:  # one after the other: one may be enough
                    await self._rung()
            else:
                with trio.move_on_at(due):
                    await self._rung()

    async def _rung(self) -> None:
        """Wait until somebody came, left, or went idle."""
        await self._bell.wait()
        self._bell = trio.Event()

    def _next(self) -> tuple[Stream | None, float]:
        """Who gives way next, and when."""
        when = {
            stream: stream.idle_since + (0.0 if stream.paused_or_left else self._park_hold_s)
            for stream in self._streams()
            if stream.idle_since is not None
        }
        stream = min(when, key=lambda s: when[s], default=None)
        return stream, inf if stream is None else when[stream]
