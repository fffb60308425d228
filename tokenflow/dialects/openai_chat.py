"""OpenAI chat completions: bodies in, chunks and one whole answer out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenflow.core.types import FinishReason, GenerationRequest, TokenLogprob, Usage
from tokenflow.dialects.fields import Fields, body_fields, unsupported, wrong_type
from tokenflow.dialects.openai_common import generation_request
from tokenflow.dialects.openai_frames import StreamEncoder, dumps, finite, usage_object
from tokenflow.dialects.openai_messages import parse_messages
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
    _refuse_tools(fields)
    return generation_request(fields, (prompt,), logprobs=_logprobs(fields), stream=stream)


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", least=0)
    if top is not None and not wanted:
        raise InvalidRequest("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
    return (top or 0) if wanted else None


def _refuse_tools(fields: Fields) -> None:
    for name in ("tools", "functions"):
        if fields.array(name):
            raise unsupported(name, "this server does not call tools yet; leave it out.")
    for name in ("tool_choice", "function_call"):
        choice = fields.get(name)
        if choice is None or choice in ("none", "auto"):  # without tools, both mean none
            continue
        if not isinstance(choice, str | dict):
            raise wrong_type(name, "a string or an object", choice)
        raise unsupported(name, "there are no tools to choose; leave it out.")


def _logprob_object(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": finite(entry.logprob), "bytes": list(entry.bytes)}


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return _logprob_object(entry) | {"top_logprobs": [_logprob_object(other) for other in entry.top]}


def logprobs_object(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_entry(entry) for entry in entries], "refusal": None}


class ChatEncoder(StreamEncoder):
    """`chat.completion.chunk` frames."""

    object = "chat.completion.chunk"

    def start(self) -> bytes:
        """The role, once a choice, with empty content: clients take it for the sign that the stream has begun."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self._head + b'{"index":%d,' % i + delta + self._tail for i in range(self._choices))

    def _choice_open(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def _choice_close(self) -> bytes:
        return b'},"logprobs":'

    def _finish_open(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":' % index

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return logprobs_object(entries)


def complete(
    id: str,
    model: str,
    created: int,
    texts: Sequence[str],
    reasons: Sequence[FinishReason],
    usage: Usage,
    logprobs: Sequence[Sequence[TokenLogprob]] | None = None,
) -> dict[str, Any]:
    """The answer without `stream`, as a JSON value (write it with `dumps`).

    Args:
        id: the stream's id.
        model: the model's id, as the client knows it.
        created: Unix seconds.
        texts: by choice.
        reasons: by choice.
        usage: of the whole request.
        logprobs: by choice; None where they were not asked for.
    """
    return {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None if logprobs is None else logprobs_object(logprobs[i]),
                "finish_reason": reason,
            }
            for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ],
        "usage": usage_object(usage),
    }


__all__ = ["ChatEncoder", "complete", "dumps", "parse"]
