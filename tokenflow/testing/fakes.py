"""`Recorder`: the other end of a real `Send`, with the reader's progress in the test's hand."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import trio

from tokenflow.api import Delta, Engine, Event, Finished, Send, SequenceRequest, Started


class Recorder:
    """Keeps the events of one sequence.

    Args:
        window: as of `Send`.
        follow: the reader takes each event at once; otherwise only `accept` gives credit.
        on_event: called with each event after it is kept; what it raises reaches the engine.
    """

    def __init__(
        self, *, window: int = 64, follow: bool = True, on_event: Callable[[Event], None] = lambda event: None
    ) -> None:
        self.send = Send(self._take, window=window)
        self.follow = follow
        self.on_event = on_event
        self.events: list[Event] = []
        self.scope = trio.CancelScope()
        """Of `play`: cancel it as a stream would."""
        self.task: trio.lowlevel.Task | None = None
        """The one that runs `play`."""
        self.error: Exception | None = None
        """What `generate` raised."""
        self.returned = trio.Event()
        """`generate` has ended, whatever way."""
        self.at_return = 0
        """Events when it had."""
        self._accepted = 0
        self._changed = trio.Event()

    async def play(self, engine: Engine, request: SequenceRequest) -> None:
        """Run `engine.generate`, keeping what it raises. Once only."""
        self.task = trio.lowlevel.current_task()
        try:
            with self.scope:
                await engine.generate(request, self.send)
        except Exception as exc:
            self.error = exc
        finally:
            self.at_return = len(self.events)
            self.returned.set()
            self._ring()

    async def until(self, condition: Callable[[Recorder], object]) -> None:
        """Wait until `condition(self)`. AssertionError if `generate` ends before."""
        while not condition(self):
            if self.returned.is_set():
                raise AssertionError(f"generate ended with {self.error!r} after {self.events!r}") from self.error
            await self._changed.wait()

    async def wait_deltas(self, n: int) -> None:
        """Wait until `n` deltas have been sent."""
        await self.until(lambda recorder: len(recorder.deltas) >= n)

    async def wait_started(self) -> None:
        await self.until(lambda recorder: recorder.events)

    def accept(self, events: int) -> None:
        """The reader has `events` more."""
        self._accepted += events
        self.send.accept(events)

    def catch_up(self) -> None:
        """From now on the reader takes each event at once, and it has all so far."""
        self.follow = True
        self.accept(self.send.sent - self._accepted)

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> int:
        """Sent, with text or without."""
        return sum(delta.tokens for delta in self.deltas)

    @property
    def started(self) -> Started | None:
        first = self.events[0] if self.events else None
        return first if isinstance(first, Started) else None

    @property
    def finished(self) -> Finished | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished) else None

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self._ring()
        if self.follow and isinstance(event, Delta) and event.has_content:
            self.accept(1)
        self.on_event(event)

    def _ring(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class Company:
    """Several sequences at once on one engine; see `company`."""

    def __init__(self, engine: Engine, nursery: trio.Nursery) -> None:
        self._engine = engine
        self._nursery = nursery

    def start(self, request: SequenceRequest, recorder: Recorder | None = None) -> Recorder:
        recorder = recorder or Recorder()
        self._nursery.start_soon(recorder.play, self._engine, request)
        return recorder


@asynccontextmanager
async def company(engine: Engine) -> AsyncGenerator[Company, None]:
    """Sequences that may outlast the body: they are cancelled then."""
    async with trio.open_nursery() as nursery:
        yield Company(engine, nursery)
        nursery.cancel_scope.cancel()


async def record(engine: Engine, request: SequenceRequest, recorder: Recorder | None = None) -> Recorder:
    """Generate with a reader that keeps up; raises what the engine raises."""
    recorder = recorder or Recorder()
    await recorder.play(engine, request)
    if recorder.error is not None:
        raise recorder.error
    return recorder
