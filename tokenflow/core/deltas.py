"""What an engine sends for nearly every token: new text, and what may come with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

LOGPROB_BYTES = 220
"""What Python keeps for a token's log-probability: the tuple, the float, a short text and its bytes (measured)."""

_STR_BYTES: Final = sys.getsizeof("")
_CONTINUATION: Final = bytes(range(0x80, 0xC0))


class TokenLogprob(NamedTuple):
    """One token with its natural log-probability, and the likeliest alternatives (themselves without any)."""

    token: str
    logprob: float
    bytes: bytes
    top: tuple[TokenLogprob, ...] = ()

    @property
    def characters(self) -> int:
        """Characters whose first byte is in this token (RFC 3629, section 3)."""
        return len(self.bytes.translate(None, _CONTINUATION))


@dataclass(slots=True, init=False)  # its own __init__: one is made for every token, and a frozen one takes long
class Delta:
    """New text. May be empty: a token was generated whose text is held (a stop string, half a character).

    It does not change.
    """

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...]
    offset: int
    """Where this delta begins in all scored text, in characters (OpenAI's `text_offset`); set by the stream."""

    def __init__(self, text: str, tokens: int = 1, logprobs: tuple[TokenLogprob, ...] = (), offset: int = 0) -> None:
        self.text = text
        self.tokens = tokens
        self.logprobs = logprobs
        self.offset = offset

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.tokens, self.logprobs, self.offset)

    @property
    def has_content(self) -> bool:
        """There is something for a reader in it; without, it only counts."""
        return bool(self.text or self.logprobs)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that its parts hold, about."""
        text = self.text
        size = _STR_BYTES + len(text) if text.isascii() else sys.getsizeof(text)
        if self.logprobs:
            size += LOGPROB_BYTES * sum([1 + len(token.top) for token in self.logprobs])
        return size


CALL_BYTES = 250
"""What Python keeps for a piece of a tool call, beside its text."""


class CallPiece(NamedTuple):
    """A piece of one tool call: the first has its id and name, all together its arguments' JSON text."""

    at: int
    """Which call of its message, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True, init=False)
class MessageDelta(Delta):
    """A delta with more in it than text, which is the message's own content."""

    reasoning: str
    calls: tuple[CallPiece, ...]

    def __init__(
        self,
        text: str,
        tokens: int = 1,
        logprobs: tuple[TokenLogprob, ...] = (),
        reasoning: str = "",
        calls: tuple[CallPiece, ...] = (),
        offset: int = 0,
    ) -> None:
        Delta.__init__(self, text, tokens, logprobs, offset)
        self.reasoning = reasoning
        self.calls = calls

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.tokens, self.logprobs, self.reasoning, self.calls, self.offset)

    @property
    def has_content(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.logprobs)

    @property
    def memory_bytes(self) -> int:
        calls = sum([CALL_BYTES + len(piece.arguments) for piece in self.calls])
        return Delta(self.text, self.tokens, self.logprobs).memory_bytes + sys.getsizeof(self.reasoning) + calls
