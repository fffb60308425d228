"""The OpenAI stream as bytes: one template a choice, prepared once, into which each delta's text is put.

A token costs one JSON string and three concatenations; everything that can be known when the stream opens is encoded
then. What is rare (log-probabilities, text too long for one line, ids on the last frame only) takes the slower way
through `_split`. A dialect says how a choice looks and how it writes log-probabilities; the rest is the same for both.

Where ids are on, one record may become several frames, and only the last carries the id: a reader that was cut in
between has not seen the record, and gets all of it again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from json.encoder import encode_basestring
from typing import Any

from tokenflow.core import sse
from tokenflow.core.types import Delta, FinishReason, MessageDelta, TokenLogprob, Usage
from tokenflow.dialects import errors
from tokenflow.dialects.encoder import Encoder
from tokenflow.errors import TokenflowError

DONE = b"data: [DONE]\n\n"

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

_BYTES_PER_CHAR = 6
"""The most that one character takes in JSON: \\u0000."""


def dumps(value: object) -> bytes:
    """Compact JSON in UTF-8, on one line."""
    return utf8(_json(value))


def utf8(text: str) -> bytes:
    """UTF-8, always: what is no text (half a surrogate pair, from a faulty engine) becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def finite(number: float) -> float:
    """A log-probability that JSON can carry: OpenAI writes -9999.0 for what cannot happen."""
    return number if math.isfinite(number) else -9999.0


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class StreamEncoder(Encoder):
    """What both OpenAI streams share."""

    object = ""
    """The chunks' `object`."""

    def __init__(self, id: str, model: str, created: int, include_usage: bool, choices: int = 1) -> None:
        """
        Args:
            id: the stream's id.
            model: the model's id, as the client knows it.
            created: Unix seconds.
            include_usage: end with a chunk of usage; every other chunk then says `"usage":null`, as OpenAI's do.
            choices: how many there are.
        """
        fields = {"id": id, "object": self.object, "created": created, "model": model}
        self._head = b"data: " + dumps(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._choices = choices
        self._before = [self._head + self._choice_open(i) for i in range(choices)]
        close = self._choice_close()
        self._after = close + b'null,"finish_reason":null}' + self._tail
        # What one frame has room for, so that its line keeps to the limit.
        self._room = sse.MAX_LINE_BYTES - len(self._head) - len(self._after) - 512
        if self._room < 8 * 1024:
            raise ValueError("id and model leave no room for text in a line")
        self._short = self._room // _BYTES_PER_CHAR

    # --- what a dialect says ---

    def _choice_open(self, index: int) -> bytes:
        """A choice up to where the text's JSON string goes."""
        raise NotImplementedError

    def _choice_close(self) -> bytes:
        """From after the text up to where the log-probabilities go."""
        raise NotImplementedError

    def _finish_open(self, index: int) -> bytes:
        """A choice that ended, up to where the finish reason's JSON string goes."""
        raise NotImplementedError

    def _logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """The value of a choice's `logprobs`, with so many characters of tokens before them."""
        raise NotImplementedError

    # --- frames ---

    def delta(self, index: int, delta: Delta, *, event_id: str | None = None) -> bytes:
        if type(delta) is MessageDelta:
            return _with_id(list(self._message(index, delta)), event_id)
        text = delta.text
        if not delta.logprobs and len(text) <= self._short:
            if not text:
                return b""
            frame = self._before[index] + utf8(encode_basestring(text)) + self._after
            return frame if event_id is None else _id_line(event_id) + frame
        return _with_id(list(self._split(index, delta)), event_id)

    def _message(self, index: int, delta: MessageDelta) -> Iterator[bytes]:
        """The frames of a delta with more than text in it, for a dialect that can say more."""
        return self._split(index, delta)

    def _pieces(self, text: str) -> Iterator[bytes]:
        """A text as JSON strings that fit into a frame each."""
        for at in range(0, len(text), self._short):
            yield utf8(encode_basestring(text[at : at + self._short]))

    def _split(self, index: int, delta: Delta) -> Iterator[bytes]:
        """As many frames as the line limit makes necessary, nearly always one."""
        share = self._room if not delta.logprobs else self._room // 2
        size = share // _BYTES_PER_CHAR
        texts = [delta.text[at : at + size] for at in range(0, len(delta.text), size)]
        groups = _grouped(delta.logprobs, share)
        middle = self._choice_close()
        offset = delta.offset
        for text, group in zip_longest(texts, groups):
            logprobs = b"null" if group is None else dumps(self._logprobs(group, offset))
            offset += sum([entry.characters for entry in group or ()])
            yield (
                self._before[index]
                + utf8(encode_basestring(text or ""))
                + middle
                + logprobs
                + b',"finish_reason":null}'
                + self._tail
            )

    def end(self, reasons: Sequence[FinishReason], usage: Usage, *, event_id: str | None = None) -> bytes:
        """A finish chunk a choice, usage if asked for, `[DONE]`."""
        return _with_id([self._finish(reasons, usage), DONE], event_id)

    def _finish(self, reasons: Sequence[FinishReason], usage: Usage) -> bytes:
        """The finish chunks, and the usage chunk where it was asked for."""
        frames = [
            self._head + self._finish_open(i) + b'"' + reason.encode() + b'"}' + self._tail
            for i, reason in enumerate(reasons)
        ]
        if self._include_usage:
            frames.append(self._head + b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n")
        return b"".join(frames)

    def failure(self, error: TokenflowError, *, event_id: str | None = None) -> bytes:
        """An error event, `[DONE]`."""
        return _with_id([b"data: " + dumps(errors.envelope(error)) + b"\n\n", DONE], event_id)

    def ping(self, *, ids: bool = False) -> bytes:
        """Where ids are on it has no blank line: some SDKs would dispatch an empty event."""
        return sse.PING_LINE if ids else sse.PING


def _id_line(event_id: str) -> bytes:
    return b"id: " + event_id.encode() + b"\n"


def _with_id(frames: list[bytes], event_id: str | None) -> bytes:
    if event_id is not None and frames:
        frames[-1] = _id_line(event_id) + frames[-1]
    return b"".join(frames)


def _grouped(entries: Sequence[TokenLogprob], room: int) -> list[list[TokenLogprob]]:
    """Entries in groups that fit. One that alone does not loses its alternatives, then its place."""
    groups: list[list[TokenLogprob]] = []
    left = 0
    for entry in entries:
        size = _size(entry)
        if size > room:
            entry = entry._replace(top=())
            size = _size(entry)
            if size > room:
                continue
        if size > left:
            groups.append([])
            left = room
        groups[-1].append(entry)
        left -= size
    return groups


def _size(entry: TokenLogprob) -> int:
    """What it takes as JSON, at most, in either dialect: the token twice, a byte as `255,`, keys and a number."""
    own = 160 + 2 * _BYTES_PER_CHAR * len(entry.token) + 4 * len(entry.bytes)
    return own + sum(map(_size, entry.top))
