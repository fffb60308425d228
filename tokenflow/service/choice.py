"""One choice of a stream: its sequence's `Send`, and what becomes of the deltas on it before they are records."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tokenflow.api import Delta, Event, FinishReason, Send
from tokenflow.chat.reader import MessageReader
from tokenflow.core.timings import GapCounter

if TYPE_CHECKING:
    from tokenflow.service.stream import Stream


class Choice(Send):
    """See the module.

    Args:
        index: which one.
        stream: whose it is, and who takes its events.
        window: records that its sequence may be ahead of the fastest reader.
        message: reads its text as a message; None: it is all content.
    """

    def __init__(self, index: int, stream: Stream, window: int, message: MessageReader | None) -> None:
        super().__init__(window=window)
        self.index = index
        self._stream: Stream | None = stream
        self.message = message
        self.gaps = GapCounter()
        self.reason: FinishReason | None = None
        """Why its sequence ended, where it did as it should."""
        self.untold = 0
        """Tokens whose text is held: they count with the next delta."""
        self.away = False
        """Its sequence has given up its slot."""
        self._offset = 0  # see Delta.offset: for who comes back and has none before it

    def _deliver(self, event: Event) -> None:
        if self._stream is not None:
            self._stream.take(self, event)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.settle()

    def told(self, delta: Delta) -> Delta:
        """`delta`, with the tokens whose text was held."""
        if self.untold:
            delta = Delta(delta.text, delta.tokens + self.untold, delta.logprobs)
            self.untold = 0
        return delta

    def placed(self, delta: Delta) -> Delta:
        """`delta`, with how far its text has come."""
        if delta.logprobs:
            delta = replace(delta, offset=self._offset)
            self._offset += sum([token.characters for token in delta.logprobs])
        return delta

    def finish_message(self) -> Delta | None:
        """What was held of it, if anything; and its reason becomes what its client is to see."""
        if self.message is None:
            return None
        tail, reason = self.message.finish(self.reason or "cancelled")
        if self.reason is not None:
            self.reason = reason
        if tail is not None:
            tail = replace(tail, tokens=self.untold)
            self.untold = 0
        return tail

    def let_go(self) -> None:
        super().let_go()
        self._stream = None
