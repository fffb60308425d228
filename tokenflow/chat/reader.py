"""What a chat model says, read as a message: one reader for each sequence, before anything of it gets a number.

So what is logged is what every reader of the stream gets, however often it comes back. Text that might become markup is
held; it comes with a later delta, or with the last.
"""

from __future__ import annotations

import codecs
from collections import deque
from hashlib import blake2b

from tokenflow.chat.calls import CallFormat
from tokenflow.chat.harmony import harmony
from tokenflow.chat.message import MessageBuilder, Span
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
        self._message = message = MessageBuilder(tools, lambda i: call_id(seed, i, chars), source.forget, source.read)
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
            self._scores = Scores(self._source.pushed())
            self._message.follow()
        self._scores.place(delta.text, delta.logprobs)
        self._push(delta.text)
        return self._message.take(delta.tokens, self._told())

    def _told(self) -> tuple[TokenLogprob, ...]:
        if self._scores is None:
            return ()
        return self._scores.told(self._message.content_spans(), self._message.held, self._message.settled)

    def finish(self, reason: FinishReason) -> tuple[Delta | None, FinishReason]:
        """The sequence has ended: what was held, and why it ended as a client sees it."""
        self._source.end(cut=reason != "stop")
        self._go_on()
        self._message.finish()
        if reason == "stop" and self._message.begun and not self._message.open:
            reason = "tool_calls"
        return self._message.take(0, self._told()), reason

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
    still (while it could be markup). So entries wait here twice: for their text, which says where they stand, and until
    it is known whether what stands there is content.

    Args:
        at: how many characters have come before the first token that has an entry.
    """

    def __init__(self, at: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = at
        self._coming: deque[tuple[str, int, TokenLogprob | None]] = deque()
        self._placed: list[tuple[Span, TokenLogprob]] = []
        self._held: list[TokenLogprob] = []
        self._settled = 0

    def place(self, text: str, entries: tuple[TokenLogprob, ...]) -> None:
        """Text that has come, and the entries of tokens whose text comes with it or later."""
        for entry in entries:
            token = self._decoder.decode(entry.bytes)
            self._coming.append((token, bool(self._decoder.getstate()[0]), entry))
        at = 0
        while self._coming and at < len(text):
            token, begun, scored = self._coming.popleft()  # `begun`: a character that it begins is its own too
            if not text.startswith(token, at) and not token.startswith(text[at:]):
                token = ""  # a control token that is not shown
            start = self._at + at
            if scored is not None:
                self._placed.append(((start, start + len(token) + begun), scored))
            if token[len(text) - at :]:
                self._coming.appendleft((token[len(text) - at :], 0, None))
            at += len(token)
        if at < len(text) and self._placed:  # a character that something came between
            (start, _), scored = self._placed[-1]
            self._placed[-1] = (start, self._at + len(text)), scored
        self._at += len(text)

    def told(self, said: list[Span], held: Span, settled: int) -> tuple[TokenLogprob, ...]:
        """Entries of content that has just been told: of the tokens that lie in it at least in part.

        Args:
            said: where that content stands.
            held: where content stands that is told with the next, if any is.
            settled: up to where it is known what the text is.
        """
        if not said and settled == self._settled:
            return ()
        self._settled = settled
        told: list[TokenLogprob] = []
        if said:
            told, self._held = self._held, []
        run: list[tuple[Span, TokenLogprob]] = []
        placed, self._placed = self._placed, []
        for span, entry in placed:
            run.append((span, entry))
            if span[0] == span[1]:  # not shown: it goes with the next
                continue
            if any(_meet(span, other) for other in said):
                told += [entry for _, entry in run]
            elif span[1] > settled:
                self._placed += run
            elif _meet(span, held):
                self._held += [entry for _, entry in run]
            run = []
        self._placed += run
        return tuple(told)


def _meet(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]
