"""What every dialect that is spoken as server-sent events offers for a stream."""

from __future__ import annotations

from collections.abc import Sequence

from tokenflow.core.types import Delta, FinishReason, Usage
from tokenflow.errors import TokenflowError


class Encoder:
    """One per connection: it may remember what it wrote.

    `event_id`, where ids are on, is the record's; `ids` says that they are.
    """

    def start(self, *, ids: bool = False) -> bytes:
        """What goes out when the stream opens."""
        return b""

    def delta(self, index: int, delta: Delta, *, event_id: str | None = None) -> bytes:
        """One record's text, of the choice `index`. Nothing at all for a delta without content."""
        raise NotImplementedError

    def end(self, reasons: Sequence[FinishReason], usage: Usage, *, event_id: str | None = None) -> bytes:
        """The end that went well: `reasons` are by choice, `usage` is the whole request's."""
        raise NotImplementedError

    def failure(self, error: TokenflowError, *, event_id: str | None = None) -> bytes:
        """The end that did not."""
        raise NotImplementedError

    def ping(self, *, ids: bool = False) -> bytes:
        """A heartbeat."""
        raise NotImplementedError
