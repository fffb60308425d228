"""`Send`: a sequence's way into its stream, with credit as one absolute number.

An engine may have sent `limit` deltas with content in all. The reader's progress raises it (`limit = accepted +
window`); a pause pulls it down to what was sent; a reader that counts what it allows caps it. An engine that honours
`limit` is paced by its reader and needs to know nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from tokenflow.core.types import Delta, Event, Finished

GIVE_UP_SLOT: Final = -1
"""A limit that asks for more than silence: the engine is to free the slot too, if it can (`release`)."""


def _ignore(event: Event) -> None:
    pass


class Send:
    """The sending end of one sequence, a `trio.abc.SendChannel`. Trio's thread only.

    Args:
        on_event: called with each event, in order, at once. What it raises reaches the sender. Left out where a
            subclass overrides `_deliver`.
        window: how many events the sequence may be ahead of its reader, at least 1.
    """

    def __init__(self, on_event: Callable[[Event], None] = _ignore, *, window: int) -> None:
        self._on_event = on_event
        self._window = window
        self._accepted = 0
        self.most: int | None = None
        """Deltas that readers allow in all, where they count them; see `allow`."""
        self.paused = False
        """No credit at all, by the stream's will."""
        self.slotless = False
        """Nor a slot, for others wait for one."""
        self._listener: Callable[[int], None] | None = None
        self._room: trio.Event | None = None  # while the engine waits for some
        self.closed = False
        self.sent = 0
        """Deltas sent that became a record, so that a reader must take them: those with text or log-probabilities."""
        self.limit = window
        """Absolute; falls only on pause, and when a reader that allowed more has left."""
        self.dropped = 0
        """Tokens that the engine generated and could not send any more, because it was cancelled."""

    # --- the engine's side ---

    async def send(self, value: Event) -> None:
        """Wait for room, then send. Cancelled while it waits: not sent. Only deltas wait.

        Raises:
            trio.ClosedResourceError: after Finished, or once the stream has ended.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if isinstance(value, Delta):
            await self.wait_room()
        self.send_nowait(value)
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_room(self) -> None:
        """Wait until a delta may be sent (or nothing any more): for who would rather not make one in vain.

        No checkpoint if there is room.
        """
        while self.stalled and not self.closed:
            if self._room is None:
                self._room = trio.Event()
            await self._room.wait()
            await trio.lowlevel.checkpoint_if_cancelled()  # woken, then cancelled: nothing is sent

    def send_nowait(self, event: Event) -> None:
        """Send at once; for senders that keep to `limit` by themselves.

        Raises:
            trio.ClosedResourceError: after Finished, or once the stream has ended.
        """
        self.put(event)
        self.settle()

    def put(self, event: Event) -> None:
        """The same, for who has more to send, of this sequence or of others: readers wait until it is settled."""
        if self.closed:
            raise trio.ClosedResourceError
        if isinstance(event, Delta):
            self.sent += event.has_content
        elif isinstance(event, Finished):
            self.closed = True
        self._deliver(event)

    def settle(self) -> None:
        """What was put is handed on. Repeatable."""

    def _deliver(self, event: Event) -> None:
        self._on_event(event)

    def listen(self, fn: Callable[[int], None] | None) -> None:
        """Call `fn(limit)` now and at each change; it must not block. None: no more."""
        self._listener = fn
        if fn is not None:
            fn(self.limit)

    async def aclose(self) -> None:
        self.closed = True
        self._make_room()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Send:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def stalled(self) -> bool:
        """No credit: only the reader (or a resume) can change that."""
        return self.sent >= self.limit

    # --- the stream's side ---

    def accept(self, events: int) -> None:
        """The reader has `events` more."""
        self._accepted += events
        self._set_limit()

    def pause(self) -> None:
        """No credit at all, until `resume`."""
        self.paused = True
        self._set_limit()

    def resume(self) -> None:
        self.paused = False
        self._set_limit()

    def give_up_slot(self) -> None:
        """Besides being paused: let others have the slot. `Released` comes when it is free."""
        self.slotless = True
        self._set_limit()

    def take_slot(self) -> None:
        """A slot is there again: go on with whatever credit there is."""
        self.slotless = False
        self._set_limit()

    @property
    def has_credit(self) -> bool:
        """It could go on, had it its slot."""
        return not self.closed and self.sent < self._credit()

    def allow(self, most: int | None) -> None:
        """No more than `most` deltas in all, however far the reader is; None: the window alone counts."""
        self.most = most
        self._set_limit()

    def let_go(self) -> None:
        """The stream has ended, and is not told of anything any more: so it is freed once nobody else has it."""
        self.closed = True
        self._on_event = _ignore

    def _credit(self) -> int:
        limit = self.sent if self.paused else self._accepted + self._window
        return limit if self.most is None else max(self.sent, min(limit, self.most))

    def _set_limit(self) -> None:
        limit = GIVE_UP_SLOT if self.slotless else self._credit()
        if limit == self.limit:
            return
        self.limit = limit
        if self._listener is not None:
            self._listener(limit)
        if not self.stalled:
            self._make_room()

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None


trio.abc.SendChannel.register(Send)  # not inherited: compiled, with an interpreted base, it would get a `__dict__`
