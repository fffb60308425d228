"""A message as its reader finds it: reasoning, content and tool calls, in the pieces in which they go out.

Newlines where these meet belong to the markup: those at either end of the reasoning, and those around tool calls, are
left out; within a text they stay. So a newline is held until it is clear what follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenflow.core.types import CallPiece, Delta, MessageDelta, TokenLogprob, Tools

MAX_NAME_CHARS = 256

Span = tuple[int, int]
"""Where a piece of a message stands in what the model wrote: its start and its end."""


class Channel:
    """One text of a message.

    Args:
        where: the place up to which the model's text is read, which is where an added piece ends.
    """

    __slots__ = ("_held", "_held_end", "_new", "_where", "chars", "end", "fresh", "holds", "spans")

    def __init__(self, where: Callable[[], int], *, fresh: bool, holds: bool) -> None:
        self._where = where
        self._new = ""
        self._held = ""
        self._held_end = 0
        self.end = 0
        """Where what has been said ends."""
        self.spans: list[Span] | None = None
        """Where all stands that has been said and not been asked for; None: nobody asks."""
        self.chars = 0
        """Characters said so far."""
        self.fresh = fresh
        """A block has just begun or ended: newlines that follow at once are its own."""
        self.holds = holds
        """Newlines are held until more follows."""

    def add(self, text: str) -> None:
        end = self._where()
        if self.fresh:
            said = text.lstrip("\n")
            if self.chars and not self._held and len(said) < len(text):
                self._hold("\n", end - len(said))  # what was said before and what follows must not run together
            if not said:
                return
            self.fresh, text = False, said
        said = text.rstrip("\n") if self.holds else text
        if said:
            self.release()
            self._say(said, end - len(text) + len(said))
        if len(said) < len(text):
            self._hold(self._held + text[len(said) :], end)

    def _hold(self, text: str, end: int) -> None:
        self._held, self._held_end = text, end

    def _say(self, text: str, end: int) -> None:
        self.chars += len(text)
        self._new += text
        self.end = end
        if self.spans is not None:
            self.spans.append((end - len(text), end))

    def pause(self) -> None:
        """Another message begins in the same text."""
        if self.chars:
            self._hold("\n\n", 0)  # the model did not write them
        self.fresh = True

    def release(self) -> None:
        """What is held is text."""
        if self._held:
            self._say(self._held, self._held_end)
            self._held = ""

    @property
    def held(self) -> Span:
        """Where what is held stands."""
        return self._held_end - len(self._held), self._held_end

    def take(self) -> str:
        text, self._new = self._new, ""
        return text


class MessageBuilder:
    """Where a reader puts what it finds.

    Args:
        tools: what may be called; None: nothing.
        call_id: the id of the call with that number.
        on_begin: told when a call has begun, from where there is no way back.
        where: the place up to which the model's text is read.
    """

    def __init__(
        self,
        tools: Tools | None,
        call_id: Callable[[int], str],
        on_begin: Callable[[], None] = lambda: None,
        where: Callable[[], int] = lambda: 0,
    ) -> None:
        self._tools = tools
        self._schemas: dict[str, Any] = {}
        for tool in tools.functions if tools is not None else ():
            function = tool["function"]
            self._schemas[function["name"]] = function.get("parameters")
        self._call_id = call_id
        self._on_begin = on_begin
        self._where = where
        self._content = Channel(where, fresh=False, holds=tools is not None)
        self._reasoning = Channel(where, fresh=True, holds=True)
        self._calls: list[CallPiece] = []
        self._calls_end = 0
        self._muted = False
        self.begun = 0
        """Calls so far."""
        self.open = False
        """A call has begun and is not complete."""

    # --- what a reader finds ---

    @property
    def content(self) -> Callable[[str], None]:
        return self._content.add

    @property
    def reasoning(self) -> Callable[[str], None]:
        return self._reasoning.add

    def content_begins(self) -> None:
        """The content's block, or another one."""
        self._content.pause()

    def reasoning_begins(self) -> None:
        self._reasoning.pause()

    @property
    def has_tools(self) -> bool:
        """There is something to call."""
        return self._tools is not None

    def knows(self, name: str) -> bool:
        """There is such a tool."""
        return name in self._schemas

    def schema(self, name: str) -> object:
        """What a tool says of its parameters."""
        return self._schemas.get(name)

    def call(self, name: str) -> None:
        """A call begins. A name beyond reason is cut: there is no such tool, and a frame has only so much room."""
        self._on_begin()
        self._content.fresh = True
        self.open = True
        self._calls_end = self._where()
        index, self.begun = self.begun, self.begun + 1
        self._muted = index > 0 and self._tools is not None and not self._tools.parallel
        if not self._muted:
            self._calls.append(CallPiece(index, self._call_id(index), name[:MAX_NAME_CHARS]))

    def arguments(self, text: str) -> None:
        """More of the open call's arguments: JSON."""
        self._calls_end = self._where()
        if self._muted or not text:
            return
        index = self.begun - 1
        if self._calls and self._calls[-1].at == index:
            last = self._calls[-1]
            self._calls[-1] = last._replace(arguments=last.arguments + text)
        else:
            self._calls.append(CallPiece(index, arguments=text))

    def call_ends(self) -> None:
        """The open call is complete."""
        self.open = False

    # --- what goes out ---

    def finish(self) -> None:
        """Nothing more comes."""
        if not self.begun:
            self._content.release()

    def follow(self) -> None:
        """From now on it will be asked where its content stands."""
        self._content.spans = []

    def content_spans(self) -> list[Span]:
        """Where the content stands that has been said since this was last asked."""
        spans, self._content.spans = self._content.spans, []
        return spans or []

    @property
    def held(self) -> Span:
        """Where content stands that is held."""
        return self._content.held

    @property
    def settled(self) -> int:
        """Up to where it is known what the text is, but for what is held."""
        return max(self._content.end, self._reasoning.end, self._calls_end)

    def take(self, tokens: int, logprobs: tuple[TokenLogprob, ...] = ()) -> Delta | None:
        """What was found since it was last asked; None: nothing."""
        text, reasoning = self._content.take(), self._reasoning.take()
        calls: tuple[CallPiece, ...] = ()
        if self._calls:
            calls = tuple(self._calls)
            self._calls.clear()
        if reasoning or calls:
            return MessageDelta(text, tokens, logprobs, reasoning, calls)
        return Delta(text, tokens, logprobs) if text or logprobs else None
