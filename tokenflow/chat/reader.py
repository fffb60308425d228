"""What a chat model says, read as a message: one reader for each sequence, before anything of it gets a number.

So what is logged is what every reader of the stream gets, however often it comes back. Text that might become markup is
held; it comes with a later delta, or with the last.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b

from tokenflow.chat.calls import CallFormat
from tokenflow.chat.harmony import harmony
from tokenflow.chat.message import MessageBuilder
from tokenflow.chat.reasoning import Think
from tokenflow.chat.source import Read, Source
from tokenflow.core.types import Delta, FinishReason, TokenLogprob, Tools


class MessageReader:
    """Reads one sequence.

    Args:
        think: how the model marks its reasoning; None: it does not.
        opened: the prompt ends within it.
        calls: how it calls tools.
        tools: what it may call; None: nothing, and what looks like a call is text.
        is_harmony: it speaks Harmony, which has its own of all of these.
        continued: the prompt ends within its content, which is for Harmony to know: elsewhere content has no head.
        seed: what the ids of its calls are made of; unlike any other sequence's.
    """

    def __init__(
        self,
        *,
        think: Think | None = None,
        opened: bool = False,
        calls: CallFormat | None = None,
        tools: Tools | None = None,
        is_harmony: bool = False,
        continued: bool = False,
        seed: str = "",
    ) -> None:
        self._source = source = Source()
        chars = calls.id_chars if calls is not None else None
        self._message = message = MessageBuilder(tools, lambda i: call_id(seed, i, chars), source.forget)
        self._reading: Read[None] | None
        if is_harmony:
            self._reading = harmony(source, message, continued)
        else:
            self._reading = _read(source, message, think, opened, calls if tools is not None else None)
        self._scores: Scores | None = None
        self._go_on()

    def take(self, delta: Delta) -> Delta | None:
        """What is certain with `delta`; None: all of it is held."""
        if self._scores is None:
            if not delta.logprobs:
                self._push(delta.text)
                return self._message.take(delta.tokens)
            self._scores = Scores()
        logprobs: list[TokenLogprob] = []
        for text, entry in self._scores.split(delta.text, delta.logprobs):
            content, other = self._message.content_chars, self._message.other_chars
            self._push(text)
            said = self._message.content_chars - content
            logprobs += self._scores.told(text, entry, said, other=self._message.other_chars > other)
        return self._message.take(delta.tokens, tuple(logprobs))

    def finish(self, reason: FinishReason) -> tuple[Delta | None, FinishReason]:
        """The sequence has ended: what was held, and why it ended as a client sees it."""
        content = self._message.content_chars
        self._source.end(cut=reason != "stop")
        self._go_on()
        self._message.finish()
        said = self._message.content_chars - content
        logprobs = [] if self._scores is None else self._scores.told("", None, said, other=False)
        if reason == "stop" and self._message.begun and not self._message.open:
            reason = "tool_calls"
        return self._message.take(0, tuple(logprobs)), reason

    def _push(self, text: str) -> None:
        self._source.push(text)
        self._go_on()

    def _go_on(self) -> None:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None  # what follows a broken call is nobody's


def _read(
    source: Source, message: MessageBuilder, think: Think | None, opened: bool, calls: CallFormat | None
) -> Read[None]:
    if think is not None:
        yield from think.read(source, message, opened)
    if calls is None:
        yield from source.rest(message.content)
    else:
        yield from calls.read(source, message)


def call_id(seed: str, index: int, chars: int | None) -> str:
    """A call's id: the same whenever it is asked for, and no other call's."""
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}" if chars is None else digest[:chars]


class Scores:
    """Log-probabilities beside a text of which a reader lets only some out: those of the content's own tokens.

    An entry is a token's, and text may come later than its token (while it could be a stop string's) and be told later
    still (while it could be markup). So entries wait here twice: for their text, and until it is known whether it was
    content.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._coming: deque[tuple[str, TokenLogprob]] = deque()
        self._untold: list[tuple[int, TokenLogprob]] = []

    def split(self, text: str, entries: tuple[TokenLogprob, ...]) -> Iterator[tuple[str, TokenLogprob | None]]:
        """The text in pieces, each with the entry of the token that it ends."""
        self._coming += [(self._decoder.decode(entry.bytes), entry) for entry in entries]
        at = 0
        while self._coming and at < len(text):
            token, entry = self._coming[0]
            if text.startswith(token, at):
                self._coming.popleft()
                yield token, entry
            elif token.startswith(text[at:]):
                self._coming[0] = token[len(text) - at :], entry
                yield text[at:], None
                return
            else:  # a token without a text: a control token that is not shown
                self._coming.popleft()
                yield "", entry
                continue
            at += len(token)
        if at < len(text):
            yield text[at:], None

    def told(self, text: str, entry: TokenLogprob | None, said: int, *, other: bool) -> list[TokenLogprob]:
        """Entries of the content that has just been told.

        Args:
            text: what was read.
            entry: of the token that ended with it.
            said: how many characters of content that gave; they end where it ends, or with what was held.
            other: it gave something else.
        """
        if entry is not None:
            self._untold.append((len(text), entry))
        if not said and not other:
            return []
        told: list[TokenLogprob] = []
        for size, held in reversed(self._untold):
            if said <= 0 and size:  # one without a size is half of a character, or not shown: it goes with the next
                break
            told.append(held)
            said -= size
        self._untold.clear()
        return told[::-1]
