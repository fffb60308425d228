"""Answering in a dialect: the table of them, a stream as events, a stream as one body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quart import Response, g, request

from tokenflow.core.types import Delta, FinishReason, GenerationRequest, Message, Usage
from tokenflow.dialects import named, openai_chat, openai_completions, small
from tokenflow.dialects.encoder import Encoder
from tokenflow.http.answers import answer
from tokenflow.http.connection import at_end
from tokenflow.http.events import HEADERS, EventBody
from tokenflow.http.transport import direct
from tokenflow.service.reader import StreamReader
from tokenflow.service.records import Ended, Failed, StreamEvent
from tokenflow.service.service import Service
from tokenflow.service.stream import Stream


class Complete(Protocol):
    """A dialect's whole answer in one body."""

    def __call__(
        self,
        id: str,
        model: str,
        created: int,
        messages: list[Message],
        reasons: tuple[FinishReason, ...],
        usage: Usage,
        *,
        logprobs: bool,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one route speaks."""

    name: str
    """As `?dialect=` has it."""
    parse: Callable[[bytes], GenerationRequest]
    encoder: Callable[[str, str, int, bool, int], Encoder]
    """(id, model, created, include_usage, choices) -> an encoder."""
    complete: Complete
    called: Mapping[str, str] = field(default_factory=dict)
    """Its own names for fields of a request that it has under another one: an error names them so."""


CHAT = Dialect(name="openai", parse=openai_chat.parse, encoder=openai_chat.ChatEncoder, complete=openai_chat.complete)
COMPLETIONS = Dialect(
    name="openai",
    parse=openai_completions.parse,
    encoder=openai_completions.CompletionsEncoder,
    complete=openai_completions.complete,
)
NAMED = Dialect(name="named", parse=named.parse, encoder=named.NamedEncoder, complete=openai_chat.complete)
TOKENS = Dialect(name="small", parse=small.parse_generate, encoder=small.SmallEncoder, complete=small.complete)
CONTENT = Dialect(
    name="small",
    parse=small.parse_chat,
    encoder=small.ContentEncoder,
    complete=small.complete,
    called={"messages": "prompt"},
)

DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions_stream": NAMED,
    "/generate": TOKENS,
    "/stream": TOKENS,
    "/v1/chat/stream": CONTENT,
}
"""By the route that makes a stream: one that is asked for later is spoken as it was made, unless the client says."""


def as_events(service: Service, stream: Stream, reader: StreamReader, dialect: Dialect, *, ids: bool) -> Response:
    """`stream` from where `reader` is, as server-sent events. The reader leaves with the request."""
    at_end(reader.close)
    identity, asked = stream.identity, stream.asked
    encoder = dialect.encoder(identity.id, identity.model, stream.created, asked.include_usage, asked.choices)
    body = EventBody(
        reader,
        encoder,
        service.config.stream.heartbeat_s,
        event_id=identity.id if ids else None,
        direct=direct(request.scope),
    )
    return Response(body, headers=HEADERS | {"X-Request-Id": identity.id})


async def as_body(stream: Stream, reader: StreamReader, dialect: Dialect) -> Response:
    """`stream` read to its end, as one body. Raises the error that it ended with."""
    at_end(reader.close)
    identity, whole = stream.identity, Whole(stream.asked)
    g.stream = identity.id  # what an error is found by
    await whole.read(reader)
    body = dialect.complete(
        identity.id,
        identity.model,
        stream.created,
        whole.messages,
        whole.end.reasons,
        whole.end.usage,
        logprobs=stream.asked.logprobs is not None,
    )
    return answer(body, headers={"X-Request-Id": identity.id})


class Whole:
    """A stream read to its end, for an answer in one body."""

    end: Ended

    def __init__(self, asked: GenerationRequest) -> None:
        self.messages = [Message() for _ in range(asked.choices)]

    async def read(self, reader: StreamReader) -> None:
        """Read everything. Raises the error that the stream ended with."""
        while records := await reader.read():
            for record in records:
                self._take(record.source, record.event)
            reader.ack(records[-1].n)

    def _take(self, source: int, event: StreamEvent) -> None:
        if isinstance(event, Delta):
            self.messages[source].add(event)
        elif isinstance(event, Failed):
            raise event.error
        else:
            self.end = event
