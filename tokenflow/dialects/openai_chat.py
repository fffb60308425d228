"""OpenAI chat completions: bodies in, chunks and one whole answer out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenflow.core.types import CallPiece, FinishReason, GenerationRequest, Message, MessageDelta, TokenLogprob, Usage
from tokenflow.dialects.fields import Fields, body_fields
from tokenflow.dialects.openai_common import generation_request
from tokenflow.dialects.openai_frames import StreamEncoder, dumps, finite, usage_object
from tokenflow.dialects.openai_messages import parse_messages
from tokenflow.dialects.openai_refused import refuse_in_chat
from tokenflow.errors import InvalidRequest


def parse(body: object, *, stream: bool | None = None) -> GenerationRequest:
    """A body of `POST /v1/chat/completions` to what it asks for.

    Args:
        body: bytes of JSON, or a JSON value already read.
        stream: what the route settles, for routes that always stream; None: the body's own `stream`.

    Raises:
        InvalidRequest: with `param` naming the field.
    """
    fields = body_fields(body)
    prompt = parse_messages(fields)
    refuse_in_chat(fields)
    return generation_request(fields, (prompt,), logprobs=_logprobs(fields), stream=stream)


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", least=0)
    if top is not None and not wanted:
        raise InvalidRequest("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
    return (top or 0) if wanted else None


def _logprob_object(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": finite(entry.logprob), "bytes": list(entry.bytes)}


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return _logprob_object(entry) | {"top_logprobs": [_logprob_object(other) for other in entry.top]}


def logprobs_object(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_entry(entry) for entry in entries], "refusal": None}


def _call_object(call: CallPiece) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _piece_object(piece: CallPiece) -> dict[str, Any]:
    """A piece of a call as a chunk has it: the first says whose it is."""
    said = _call_object(piece) if piece.name else {"function": {"arguments": piece.arguments}}
    return {"index": piece.at, **said}


def message_object(message: Message) -> dict[str, Any]:
    """A whole message, for the answer without `stream`."""
    said: dict[str, Any] = {"role": "assistant", "content": message.text, "refusal": None}
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if calls := message.calls:
        said["tool_calls"] = [_call_object(call) for call in calls]
        said["content"] = message.text or None
    return said


def delta_object(delta: MessageDelta) -> dict[str, Any]:
    """What a delta has beside content, as a chunk's `delta` has it."""
    said: dict[str, Any] = {}
    if delta.reasoning:
        said["reasoning_content"] = delta.reasoning
    if delta.calls:
        said["tool_calls"] = [_piece_object(piece) for piece in delta.calls]
    return said


class ChatEncoder(StreamEncoder):
    """`chat.completion.chunk` frames."""

    object = "chat.completion.chunk"

    def start(self, *, ids: bool = False) -> bytes:
        """The role, once a choice, with empty content: clients take it for the sign that the stream has begun."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self._head + b'{"index":%d,' % i + delta + self._tail for i in range(self._choices))

    def _choice_open(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def _choice_close(self) -> bytes:
        return b'},"logprobs":'

    def _message(self, index: int, delta: MessageDelta) -> Iterator[bytes]:
        """Reasoning, content and calls in frames of their own: some clients look for one of them in each."""
        for text in self._pieces(delta.reasoning):
            yield self._frame(index, b'"reasoning_content":' + text)
        if delta.text or delta.logprobs:
            yield from self._split(index, delta)
        for piece in delta.calls:
            if piece.name:
                opening = _piece_object(piece._replace(arguments=""))
                yield self._frame(index, b'"tool_calls":[' + dumps(opening) + b"]")
            for text in self._pieces(piece.arguments):
                yield self._frame(index, b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (piece.at, text))

    def _frame(self, index: int, delta: bytes) -> bytes:
        return self._head + b'{"index":%d,"delta":{' % index + delta + self._after

    def _finish_open(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":' % index

    def _logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return logprobs_object(entries)


def complete(
    id: str,
    model: str,
    created: int,
    messages: Sequence[Message],
    reasons: Sequence[FinishReason],
    usage: Usage,
    *,
    logprobs: bool = False,
) -> dict[str, Any]:
    """The answer without `stream`, as a JSON value (write it with `dumps`).

    Args:
        id: the stream's id.
        model: the model's id, as the client knows it.
        created: Unix seconds.
        messages: by choice.
        reasons: by choice.
        usage: of the whole request.
        logprobs: they were asked for.
    """
    return {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": i,
                "message": message_object(message),
                "logprobs": logprobs_object(message.logprobs) if logprobs else None,
                "finish_reason": reason,
            }
            for i, (message, reason) in enumerate(zip(messages, reasons, strict=True))
        ],
        "usage": usage_object(usage),
    }


__all__ = ["ChatEncoder", "complete", "dumps", "parse"]
