"""Where text ends: bytes to characters, and characters to what may be sent before a stop string is ruled out.

`TextAssembler` takes each token's bytes and gives back the text that is certain. It holds two things: the bytes of a
character that is not whole yet, and the longest tail of the text that could still become a stop string. So an event is
always valid UTF-8, a stop string or a part of one is never sent, and a near miss is sent once, in order.
"""

from __future__ import annotations

import codecs

_utf8 = codecs.getincrementaldecoder("utf-8")


class TextAssembler:
    """Text of one sequence, as it may be sent.

    Args:
        stop: strings that end the text. The one that is complete first wins; of several complete at once, the one
            that begins first.
    """

    __slots__ = ("_cut", "_decoder", "_half", "_held", "_stop", "stopped")

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._decoder = _utf8(errors="replace")
        self._half = False  # the decoder has a part of a character
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self._cut = ""  # the stop string, and what came with it
        self.stopped = False
        """A stop string was found; what comes after it is not looked at."""

    def push(self, piece: bytes) -> str:
        """Take one token's bytes; return the text that is certain now (often all of it, sometimes none)."""
        if piece.isascii() and not self._half:
            text = piece.decode()
        else:
            text = self._decoder.decode(piece)
            self._half = bool(self._decoder.getstate()[0])
        return self._release(text) if self._stop else text

    def flush(self) -> str:
        """The sequence has ended by itself: return what was held. Half a character becomes one U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        if self._stop:
            text = self._release(text) + self._held
            self._held = ""
        return text

    @property
    def held_chars(self) -> int:
        """Whole characters that were taken and not returned: held, or cut off by a stop string."""
        return len(self._cut or self._held)

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(at + len(s), at) for s, at in ((s, text.find(s)) for s in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            at = min(found)[1]  # by end first: pieces of any size must give what single characters give
            self._cut = text[at:]
            return text[:at]
        keep = max(_overlap(text, s) for s in self._stop)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest tail of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
