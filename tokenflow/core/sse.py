"""Server-sent events, both ways: values to bytes, and bytes in any pieces to events.

The encoder writes the plainest form there is: `id:`, `event:`, `retry:`, then `data:`, then a blank line, each ended by
LF, so that the blank line always follows the data. The parser is the algorithm of the WHATWG HTML standard, section
9.2.6 "Interpreting an event stream", made incremental: it keeps one unfinished line and the fields of one unfinished
event, and the pieces in which the bytes arrive make no difference to what comes out.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

MAX_LINE_BYTES = 64_000
"""No line that we write is longer (without its LF). Clients' line readers have limits, 64 kB being a usual one."""

PING = b": ping\n\n"
"""A comment that keeps a connection alive, for streams whose events carry no ids."""

PING_LINE = b": ping\n"
"""The same where events carry ids: with the blank line, some SDKs would dispatch an empty event and crash on it."""

_EOL = re.compile(r"\r\n|\r|\n")
_EOL_BYTES = re.compile(rb"\r\n|\r|\n")
_utf8 = codecs.getincrementaldecoder("utf-8")


def event(
    data: str | bytes,
    *,
    event: str | None = None,
    id: str | None = None,
    retry: int | None = None,
) -> bytes:
    """One event as bytes. Newlines in data make several `data:` lines, which a reader joins again with LF.

    Args:
        data: text, or its UTF-8 bytes.
        event: the event's type; None is `message`, unnamed on the wire.
        id: what a reader sends back as `Last-Event-ID`.
        retry: milliseconds that a reader waits before it reconnects.

    Raises:
        ValueError: a field cannot be written so that a reader gets it back, or a line is longer than 64 kB.
    """
    lines = []
    if id is not None:
        lines.append(b"id: " + _field("id", id))
    if event is not None:
        lines.append(b"event: " + _field("event", event))
    if retry is not None:
        if retry < 0:
            raise ValueError(f"retry is milliseconds, at least 0; got {retry}")
        lines.append(b"retry: %d" % retry)
    raw = data.encode() if isinstance(data, str) else data
    lines += [b"data: " + line for line in _EOL_BYTES.split(raw)]
    if len(raw) > MAX_LINE_BYTES - 16:  # cheap test first: nearly every event is far below
        longest = max(map(len, lines))
        if longest > MAX_LINE_BYTES:
            raise ValueError(f"a line of {longest} bytes is over the limit of {MAX_LINE_BYTES}; split the data")
    return b"\n".join(lines) + b"\n\n"


def _field(name: str, value: str) -> bytes:
    # A reader ignores an id with U+0000, and takes CR or LF for the end of the line (9.2.6).
    if any(c in value for c in "\r\n\0"):
        raise ValueError(f"{name} must not contain CR, LF or NUL: {value!r}")
    raw = value.encode()
    if len(raw) > 1024:
        raise ValueError(f"{name} is longer than 1024 bytes")
    return raw


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event."""

    data: str
    event: str = "message"
    id: str = ""
    """The last event id as of this event: the newest `id:` seen, not necessarily in this event."""


class Parser:
    """Event stream bytes in, events out.

    Args:
        limit_chars: the most that one unfinished event may hold; what bounds the memory against a hostile peer.
        retry_ms: the reconnection time that the peer asked for on the connection before.
    """

    def __init__(self, *, limit_chars: int = 16_777_216, retry_ms: int | None = None) -> None:
        self.last_event_id = ""
        """What to send as `Last-Event-ID` when reconnecting."""
        self.retry_ms = retry_ms
        """The reconnection time that the peer asked for last."""
        self._decoder = _utf8(errors="replace")
        self._begun = False
        self._after_cr = False
        self._line: list[str] = []
        self._data: list[str] = []
        self._type = ""
        self._id = ""
        self._limit = limit_chars
        self._line_held = 0
        self._data_held = 0

    def feed(self, data: bytes) -> list[Event]:
        """Take bytes as they came; return the events that they complete.

        At the end of the stream an event without its blank line is dropped, as the standard says: just stop feeding.

        Raises:
            ValueError: an event grew over the limit.
        """
        text = self._decoder.decode(data)
        if not text:
            return []
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\ufeff")
        if self._after_cr:  # CR LF is one line end, also when the bytes part between them
            text = text.removeprefix("\n")
        self._after_cr = text.endswith("\r")
        *lines, rest = _EOL.split(text)
        events = []
        for line in lines:
            if self._line:
                line = "".join(self._line) + line
                self._line.clear()
                self._line_held = 0
            if (dispatched := self._take(line)) is not None:
                events.append(dispatched)
        if rest:
            self._line.append(rest)
            self._line_held += len(rest)
            self._check_held()
        return events

    def _check_held(self) -> None:
        if self._line_held + self._data_held > self._limit:
            raise ValueError(f"an event is longer than {self._limit} characters")

    def _take(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")  # a comment has the empty name, which is unknown and so ignored
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._data_held += len(value) + 1
            self._check_held()
        elif name == "event":
            self._type = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_ms = int(value[:12])  # more digits are more than 30 years; int() refuses very many
        return None

    def _dispatch(self) -> Event | None:
        self.last_event_id = self._id
        data, kind = self._data, self._type
        self._data, self._type, self._data_held = [], "", 0
        if not data:
            return None
        return Event("\n".join(data), kind or "message", self._id)
