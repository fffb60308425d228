"""The engine contract. What holds for every engine is written here once, and run by `tokenflow.testing.conformance`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tokenflow.api.send import Send
from tokenflow.core.types import EngineInfo, EngineStats, Grammar, SequenceRequest


@runtime_checkable
class Engine(Protocol):
    """A model that can generate. All methods are called from Trio's thread."""

    @property
    def info(self) -> EngineInfo:
        """What it is and can do; the same object while it is open."""
        ...

    async def generate(self, request: SequenceRequest, send: Send) -> None:
        """Generate one sequence.

        Sends `Started` once it has its slot, then deltas, then exactly one `Finished`, last; then returns. Keeps to
        `send.limit`. A failure is raised (any Exception) and ends this sequence alone. Cancelled, it sends nothing
        more and ends only when its slot is free, within one step; tokens that were generated meanwhile are counted in
        `send.dropped`. An engine that cannot let go within its grace raises `EngineStuck` instead of `Cancelled`.

        With the capability `release`, a limit of `api.send.GIVE_UP_SLOT` is answered with `Released` once the sequence
        has no slot, also if it waits for one or has given it up before, unless the limit has changed by then. It takes
        none until the limit allows it another delta: then it waits for one, sends `Resumed` (`Started`, if it never had
        one) and goes on where it was. Either may come again and again.
        """
        ...

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, without any added token; `special`: control tokens' texts become those tokens.

        Raises:
            ValueError: there are none for this text; with a sentence for the client. So does `InvalidRequest`.
        """
        ...

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of `tokens`, control tokens included; ValueError for an id outside the vocabulary."""
        ...

    async def stats(self) -> EngineStats:
        """Counters and gauges, now. Quick: it is asked at every scrape."""
        ...


@runtime_checkable
class StructuredEngine(Engine, Protocol):
    """What an engine with the capability `grammar` is."""

    async def compile(self, grammar: Grammar, *, budget_s: float) -> None:
        """Make sure that `grammar` can be used, before anything is promised to the client.

        Takes no longer than `budget_s` from when it is its turn, leaves the event loop free, and is cancelled at once.

        Raises:
            InvalidRequest: what is wrong with it, and where.
            Overloaded: its turn has not come.
        """
        ...
