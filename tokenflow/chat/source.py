"""A model's text as it comes, for readers that are generators.

A reader is written as if the whole text lay before it, and yields wherever it needs more:

    mark = yield from source.until(MARKS, message.content)

Whoever drives it pushes what has come and lets it go on. Every step here decides only on what no further text could
change, so a reader sees the same however the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Read = Generator[None, None, T]
"""Part of a reader: yields for more text, returns what it read."""

Sink = Callable[[str], object]
"""Takes text, piece by piece."""

BLANKS = " \t\r\n"


class Marks:
    """Strings to be looked for, none the beginning of another."""

    def __init__(self, *marks: str) -> None:
        heads = {mark[:size] for mark in marks for size in range(1, len(mark))}
        whole = "|".join(map(re.escape, marks))
        begun = "|".join(map(re.escape, sorted(heads, key=len, reverse=True)))
        # What most text has neither of is found out in one search.
        self.find = re.compile(f"({whole})|(?:{begun})\\Z" if begun else f"({whole})").search
        """The first mark, as group 1, or else what may become one at the end of the text, without a group."""
        self.find_whole = re.compile(f"({whole})").search
        """The first mark."""


class Source:
    """What has come and is not read yet."""

    __slots__ = ("_before", "_kept", "at", "cut", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """Everything before this is read."""
        self.ended = False
        """Nothing more comes."""
        self.cut = False
        """Nor is this the end that the model meant: it was stopped."""
        self._kept: list[str] | None = None  # read, but not for good
        self._before = 0  # characters before `text`

    # --- the driver's side ---

    def push(self, piece: str) -> None:
        self._drop_read()
        self.text += piece

    def _drop_read(self) -> None:
        if self.at:
            if self._kept is not None:
                self._kept.append(self.text[: self.at])
            self._before += self.at
            self.text, self.at = self.text[self.at :], 0

    def end(self, *, cut: bool) -> None:
        self.ended, self.cut = True, cut

    # --- places in all that has come ---

    def pushed(self) -> int:
        """How many characters have come."""
        return self._before + len(self.text)

    def read(self) -> int:
        """How many of them are read."""
        return self._before + self.at

    # --- coming back ---

    def keep(self) -> None:
        """Remember this place, to go back to it."""
        self._kept = None
        self._drop_read()
        self._kept = []

    def back(self) -> None:
        """To the place that was kept, if it still is."""
        if self._kept is not None:
            kept = "".join(self._kept)
            self.text, self.at = kept + self.text, 0
            self._before -= len(kept)
            self._kept = None

    def forget(self) -> None:
        """There is no going back any more."""
        self._kept = None

    @property
    def exhausted(self) -> bool:
        """It has been read to its end."""
        return self.ended and self.at == len(self.text)

    # --- reading ---

    def until(self, marks: Marks, sink: Sink, *, within: bool = False) -> Read[str | None]:
        """Hand on what comes before the first mark, and read the mark. None: the end came first.

        Args:
            within: inside a call: if the text was cut in the middle of what may be a mark, take it for one and drop it.
        """
        while True:
            certain = self.ended and not (within and self.cut)
            found = (marks.find_whole if certain else marks.find)(self.text, self.at)
            end = len(self.text) if found is None else found.start()
            if end > self.at:
                piece, self.at = self.text[self.at : end], end
                sink(piece)
            if found is not None and found[1] is not None:
                self.at = found.end()
                return str(found[1])
            if self.ended:
                return None
            yield

    def rest(self, sink: Sink) -> Read[None]:
        """Hand on everything."""
        while True:
            if self.at < len(self.text):
                piece, self.at = self.text[self.at :], len(self.text)
                sink(piece)
            if self.ended:
                return
            yield

    def peek(self) -> Read[str]:
        """The next character, unread; empty at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def sees(self, literal: str) -> Read[bool]:
        """It goes on with `literal`, which stays unread."""
        while not self.ended and len(self.text) - self.at < len(literal) and literal.startswith(self.text[self.at :]):
            yield
        return self.text.startswith(literal, self.at)

    def stopped_in(self, literal: str) -> bool:
        """It was stopped where `literal` may have begun: what that was, nobody can tell."""
        left = self.text[self.at :]
        return self.cut and len(left) < len(literal) and literal.startswith(left)

    def take(self, literal: str) -> Read[bool]:
        """Read `literal`, if it goes on with that."""
        if seen := (yield from self.sees(literal)):
            self.at += len(literal)
        return seen

    def skip(self, chars: str = BLANKS) -> Read[None]:
        """Read past any of `chars`."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in chars:
                    return
                self.at += 1
            if self.ended:
                return
            yield

    def match(self, pattern: re.Pattern[str]) -> Read[str]:
        """Read the longest run of `pattern`, which matches single characters."""
        pieces: list[str] = []
        while True:
            start = self.at
            while self.at < len(self.text) and pattern.match(self.text, self.at):
                self.at += 1
            pieces.append(self.text[start : self.at])
            if self.at < len(self.text) or self.ended:
                return "".join(pieces)
            yield


def nothing(text: str) -> None:
    """A sink for what nobody wants."""


def gathered(read: Callable[[Sink], Read[T]]) -> Read[tuple[T, str]]:
    """What a reader returns, and all that it handed on."""
    pieces: list[str] = []
    result = yield from read(pieces.append)
    return result, "".join(pieces)
