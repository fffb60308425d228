"""Who gets slots, and when: first come, first served, and a request takes all its slots at once or waits.

Strict order means that a request for many slots is never overtaken for ever by requests for one. `max_waiting` places
bound how many may wait; who finds none is refused at once, which costs nothing and tells the client when to come back.

Pure: readiness is a callback.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tokenflow.errors import InvalidRequest, QueueFull


class Admission:
    """The slots of one engine and the places to wait for them."""

    def __init__(self, slots: int, max_waiting: int) -> None:
        self.slots = slots
        self.max_waiting = max_waiting
        self.free = slots
        self._on_change: Callable[[], None] = lambda: None
        self._queue: deque[Ticket] = deque()

    @property
    def waiting(self) -> int:
        """Tickets that hold no slot yet."""
        return len(self._queue)

    def listen(self, fn: Callable[[], None]) -> None:
        """Call `fn` when a first one begins to wait, when slots have come back, and at `notify`.

        Others who wait change nothing.
        """
        self._on_change = fn

    def notify(self) -> None:
        """Who holds slots has gone idle with them, or goes on."""
        self._on_change()

    def enter(self, n: int, on_ready: Callable[[], None], *, back: bool = False) -> Ticket:
        """Take `n` slots, or a place to wait for them; `on_ready` is called once they are held, maybe at once.

        Args:
            n: how many.
            on_ready: must not block.
            back: it had slots and gave them up for others: there is always a place for it.

        Raises:
            InvalidRequest: there will never be `n` slots.
            QueueFull: every place is taken.
        """
        if n > self.slots:
            raise InvalidRequest(f"n asks for {n} sequences at once; this model has {self.slots} slots.", param="n")
        ticket = Ticket(self, n, on_ready)
        if not self._queue and n <= self.free:
            self._grant(ticket)
        elif back or len(self._queue) < self.max_waiting:
            self._queue.append(ticket)
            if len(self._queue) == 1:
                self._on_change()
        else:
            raise QueueFull(
                f"All slots ({self.slots}) and places to wait ({self.max_waiting}) are taken. Try again later.",
                retry_after_s=1.0,
            )
        return ticket

    def _grant(self, ticket: Ticket) -> None:
        self.free -= ticket.n
        ticket.held = True
        ticket._on_ready()

    def _leave(self, ticket: Ticket) -> None:
        held, ticket.held = ticket.held, False
        if held:
            self.free += ticket.n
        else:
            self._queue.remove(ticket)
        while self._queue and self._queue[0].n <= self.free:
            self._grant(self._queue.popleft())
        if held:
            self._on_change()


class Ticket:
    """One request's claim: a place in the queue, then `n` slots."""

    __slots__ = ("_admission", "_on_ready", "gone", "held", "n")

    def __init__(self, admission: Admission, n: int, on_ready: Callable[[], None]) -> None:
        self._admission = admission
        self._on_ready = on_ready
        self.gone = False
        """It holds nothing, and waits for nothing."""
        self.n = n
        self.held = False

    def leave(self) -> None:
        """Give back the slots, or the place. Repeatable."""
        if not self.gone:
            self.gone = True
            self._admission._leave(self)
