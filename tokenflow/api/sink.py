"""The sink contract: who is told of each stream's life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tokenflow.core.lifecycle import Gauges, LifecycleEvent


class Sink(Protocol):
    """Takes lifecycle records. It can neither slow nor break a stream.

    It is called from a task of the server's own, through a bounded memory channel: while `record` waits, records
    queue up, and past the bound they are dropped and counted. What it raises is logged, and the next record follows.
    """

    async def record(self, event: LifecycleEvent) -> None: ...


@dataclass(frozen=True, slots=True)
class Exposition:
    """A page of metrics."""

    body: bytes
    content_type: str


@runtime_checkable
class MetricsSink(Sink, Protocol):
    """A sink that can show a page of metrics: `GET /metrics` asks the first one configured."""

    def expose(self, gauges: Gauges) -> Exposition: ...
