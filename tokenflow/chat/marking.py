"""Keeping user text from spelling control tokens.

A template's output is tokenized with control tokens read out of it: `<|im_end|>` in it ends a turn. The same characters
in a user's text must stay characters. Engines can do that for pieces of text: a control token is only found whole, so
text that is cut inside one is safe. The question is where to cut, for after rendering nobody knows who wrote what. So:

1. `Marker.mark` puts an invisible mark (a noncharacter that occurs nowhere else) into each user string wherever a
   control token could come about: inside each one that it contains, and at its ends where its first or last characters
   could be completed by what the template, or another user string, puts next to them.
2. The template renders the marked strings. Marks lie inside words or beside non-blank characters, so trimming and the
   like go as they would have.
3. `Marker.split` takes the marks out and cuts at those that really lie inside a control token of the rendered text.
   The rest did no harm and make no cut: cutting elsewhere could change how ordinary text is tokenized. Pieces in a row
   that hold no whole token are joined again, as one that is read without control tokens.

A mark one character after a token's start breaks every token that starts there, whatever order the tokenizer prefers
them in. A token of one character cannot be cut; in user text it is fenced by two other marks, and becomes a piece of
its own to be read without control tokens. Tokens of blanks alone (some vocabularies count a newline as one) are taken
for text: there is no harm in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tokenflow.errors import InvalidRequest

TRUSTED = {
    "role": frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"}),
    "type": frozenset(
        {"function", "text", "string", "number", "integer", "boolean", "object", "array", "null"}  # JSON Schema's
    ),
}
"""Values that are words of the protocol, by their key: templates compare them, and spell tokens with them."""


class Segment(NamedTuple):
    """A piece of a rendered template."""

    text: str
    special: bool
    """Read control tokens out of it; False: it is text, whatever it looks like."""


class SpecialTokens:
    """The control tokens of one model, ready to be looked for."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(token for token in tokens if token.strip())
        self._long = frozenset(token for token in self.tokens if len(token) > 1)
        self._longest = max(map(len, self._long), default=0)
        self._tails = frozenset(token[at:] for token in self._long for at in range(1, len(token)))
        self._heads = frozenset(token[:at] for token in self._long for at in range(1, len(token)))
        # By the character at the edge, how long they are: most text has another there, and is done with at once.
        self._tail_sizes = _sizes((tail[0], tail) for tail in self._tails)
        self._head_sizes = _sizes((head[-1], head) for head in self._heads)
        self._blob = chr(0xD800).join(sorted(self._long))  # half a surrogate pair: no text has it
        # In a lookahead, so that tokens that overlap are all found. Without tokens: a pattern that never matches.
        self._any = re.compile(f"(?=({_trie(self.tokens)}))" if self.tokens else r"(?!)", re.DOTALL)

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of the longest token at each place where one starts, overlapping ones too."""
        for match in self._any.finditer(text):
            yield match.span(1)

    def open_at(self, text: str, at: int, end: int) -> bool:
        """`text[at:]`, with something before it, could be part of a token that began there. Its core ends at `end`."""
        if at < len(text):
            for size in self._tail_sizes.get(text[at], ()):
                if text[at : at + size] in self._tails:
                    return True
        return self._inside(text, at, len(text)) or self._inside(text, at, end)

    def open_before(self, text: str, at: int, begin: int) -> bool:
        """`text[:at]`, with something after it, could be part of a token that goes on. Its core begins at `begin`."""
        if at > 0:
            for size in self._head_sizes.get(text[at - 1], ()):
                if size <= at and text[at - size : at] in self._heads:
                    return True
        return self._inside(text, 0, at) or self._inside(text, begin, at)

    def _inside(self, text: str, start: int, stop: int) -> bool:
        """The piece of text lies within some token."""
        if not 0 < stop - start < self._longest:
            return False
        piece = text[start:stop]
        return piece in self._blob and not piece.isspace()


def _sizes(edged: Iterable[tuple[str, str]]) -> dict[str, list[int]]:
    sizes: dict[str, set[int]] = {}
    for edge, piece in edged:
        sizes.setdefault(edge, set()).add(len(piece))
    return {edge: sorted(found) for edge, found in sizes.items()}


def _trie(tokens: Iterable[str]) -> str:
    """A pattern that matches the longest of the tokens, in time that does not grow with their number.

    Vocabularies have thousands of control tokens with one common beginning; tried one after the other, a text full of
    that beginning would take minutes.
    """
    root: dict[str, Any] = {}
    for token in tokens:
        node = root
        for char in token:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(root)


def _pattern(node: dict[str, Any]) -> str:
    ends = "" in node
    branches = []
    for char, below in sorted(node.items()):
        if char:
            text = re.escape(char)
            while (
                len(below) == 1 and "" not in below
            ):  # a run without forks, so that recursion is only as deep as forks
                (char, below), *_ = below.items()
                text += re.escape(char)
            branches.append(text + _pattern(below))
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return joined + "?" if ends else joined


class Marks(NamedTuple):
    """Characters that occur nowhere else, and a pattern that finds them."""

    cut: str
    open: str
    close: str
    end: str
    """Where the text ends that is to be gone on from."""
    any: re.Pattern[str]


def marks_beside(used: frozenset[str]) -> Marks:
    """Marks that are none of the characters `used`. InvalidRequest if there are not enough."""
    free = (char for char in _candidates() if char not in used)
    marks = [char for char, _ in zip(free, range(4), strict=False)]
    if len(marks) < 4:
        raise InvalidRequest("The messages use up every private character.", param="messages")
    cut, opening, closing, end = marks
    return Marks(cut, opening, closing, end, re.compile(f"[{''.join(marks)}]"))


class Marker:
    """Marks for one rendering.

    Args:
        specials: the model's control tokens.
        marks: characters that nothing in this rendering has.
    """

    def __init__(self, specials: SpecialTokens, marks: Marks) -> None:
        self._specials = specials
        self._cut, self._open, self._close, _, self._marks = marks
        self.marked = False
        """Some string got a mark."""

    def mark(self, value: Any, key: str = "") -> Any:
        """The value with every string in it marked.

        Keys are looked at too, for a tool's arguments are named by whoever writes them; but only for whole tokens,
        since a mark in a key that the template asks for would hide it.

        Args:
            value: a JSON value.
            key: the key it stands under.
        """
        if isinstance(value, str):
            return value if value in TRUSTED.get(key, ()) else self._mark_text(value)
        if isinstance(value, Mapping):
            return {self._mark_key(name): self.mark(item, name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, key) for item in value]
        return value

    def _mark_key(self, name: str) -> str:
        return name if next(self._specials.find(name), None) is None else self._mark_text(name)

    def _mark_text(self, text: str) -> str:
        puts = self._puts(text)
        if not puts:
            return text
        self.marked = True
        pieces, last = [], 0
        for at, mark in sorted(puts, key=lambda put: put[0]):
            pieces += [text[last:at], mark]
            last = at
        return "".join([*pieces, text[last:]])

    def _puts(self, text: str) -> list[tuple[int, str]]:
        """Which marks go where; at one place in the order in which they are to stand."""
        specials = self._specials
        # A template may trim, so the ends are also where the blanks end.
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        puts = []
        for at in (0, begin) if begin else (0,):
            if specials.open_at(text, at, end):
                puts.append((at, self._cut))
        for at in (len(text), end) if end < len(text) else (end,):
            if specials.open_before(text, at, begin):
                puts.append((at, self._cut))
        for start, stop in specials.find(text):
            if stop - start > 1:
                puts.append((start + 1, self._cut))
            if text[start] in specials.tokens:
                puts += [(start, self._open), (start + 1, self._close)]
        return puts

    def split(self, rendered: str) -> list[Segment]:
        """The rendered text in pieces that joined are the text without marks."""
        cuts, fenced = [], []
        plain, last, size = [], 0, 0
        for match in self._marks.finditer(rendered):
            plain.append(rendered[last : match.start()])
            size += match.start() - last
            last = match.end()
            if match[0] == self._cut:
                cuts.append(size)
            elif match[0] == self._open:
                fenced.append(size)
        text = "".join([*plain, rendered[last:]])
        edges = dict.fromkeys(self._needed(text, cuts), True)
        for at in fenced:  # the piece from `at` is no token's; the one after it is like any other
            edges.setdefault(at + 1, True)
        edges |= dict.fromkeys(fenced, False)
        return list(self._merged(_pieces(text, edges)))

    def _merged(self, pieces: Iterable[Segment]) -> Iterator[Segment]:
        """Neighbours without a whole token are one piece of text: a thousand attempts cost no thousand pieces."""
        run: list[str] = []
        for piece in pieces:
            if piece.special and next(self._specials.find(piece.text), None) is not None:
                if run:
                    yield Segment("".join(run), False)
                    run = []
                yield piece
            else:
                run.append(piece.text)
        if run:
            yield Segment("".join(run), False)

    def _needed(self, text: str, cuts: list[int]) -> Iterator[int]:
        """The cuts that lie inside some control token of the text."""
        tokens = self._specials.find(text)
        token = next(tokens, None)
        reach = 0
        for cut in cuts:
            while token is not None and token[0] < cut:
                reach = max(reach, token[1])
                token = next(tokens, None)
            if cut < reach:
                yield cut


def _pieces(text: str, edges: Mapping[int, bool]) -> Iterator[Segment]:
    """Cut the text at the edges; each says whether the piece that begins there is read for control tokens."""
    start, special = 0, True
    for at in sorted(edges):
        if at > start:
            yield Segment(text[start:at], special)
        start, special = at, edges[at]
    if start < len(text):
        yield Segment(text[start:], special)


def _candidates() -> Iterator[str]:
    """Characters that no text has a use for: noncharacters (Unicode 23.7), then a private plane (Unicode 23.5)."""
    yield from map(chr, range(0xFDD0, 0xFDF0))
    yield from map(chr, range(0xF0000, 0xFFFFE))
