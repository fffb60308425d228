"""One choice of a stream: its sequence's way in, and what becomes of the deltas on it before they are records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tokenflow.api import Delta, Event, FinishReason, Send
from tokenflow.chat.reader import MessageReader
from tokenflow.core.timings import GapCounter


class Choice:
    """See the module.

    Args:
        index: which one.
        take: called with it and each of its events.
        window: records that its sequence may be ahead of the fastest reader.
        message: reads its text as a message; None: it is all content.
    """

    __slots__ = ("_offset", "_take", "away", "gaps", "index", "message", "reason", "send", "untold")

    def __init__(
        self, index: int, take: Callable[[Choice, Event], None], window: int, message: MessageReader | None
    ) -> None:
        self.index = index
        self._take = take
        self.send = Send(self._on_event, window=window)
        self.message = message
        self.gaps = GapCounter()
        self.reason: FinishReason | None = None
        """Why its sequence ended, where it did as it should."""
        self.untold = 0
        """Tokens whose text is held: they count with the next delta."""
        self.away = False
        """Its sequence has given up its slot."""
        self._offset = 0  # see Delta.offset: for who comes back and has none before it

    def _on_event(self, event: Event) -> None:
        self._take(self, event)

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
            self._offset += sum([len(token.token) for token in delta.logprobs])
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
        """Its stream has ended, and is not told of anything any more: so it is freed once nobody else has it."""
        self.send.let_go()
        self._take = _ignore


def _ignore(choice: Choice, event: Event) -> None:
    pass
