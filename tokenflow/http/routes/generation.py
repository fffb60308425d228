"""Generating: `POST /v1/chat/completions` and `POST /v1/completions`, streaming or not.

A dialect parses, the service judges and opens the stream, and the answer reads from it. A new dialect of this kind is
one more line in `DIALECTS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from quart import Response, g, request
from quart_trio import QuartTrio

from tokenflow.core.types import Delta, FinishReason, GenerationRequest, Usage
from tokenflow.dialects import openai_chat, openai_completions
from tokenflow.http.answers import answer
from tokenflow.http.connection import hold
from tokenflow.http.events import HEADERS, Encoder, EventBody
from tokenflow.service.records import Failed
from tokenflow.service.service import Service
from tokenflow.service.stream import Stream, StreamReader


class Complete(Protocol):
    """A dialect's whole answer in one body."""

    def __call__(
        self,
        id: str,
        model: str,
        created: int,
        deltas: list[list[Delta]],
        reasons: tuple[FinishReason, ...],
        usage: Usage,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one route speaks."""

    parse: Callable[[bytes], GenerationRequest]
    encoder: Callable[[str, str, int, bool, int], Encoder]
    """(id, model, created, include_usage, choices) -> an encoder."""
    complete: Complete


DIALECTS = {
    "/v1/chat/completions": Dialect(openai_chat.parse, openai_chat.ChatEncoder, openai_chat.complete),
    "/v1/completions": Dialect(
        openai_completions.parse, openai_completions.CompletionsEncoder, openai_completions.complete
    ),
}


def register(app: QuartTrio, service: Service) -> None:
    for path, dialect in DIALECTS.items():

        async def generate(path: str = path, dialect: Dialect = dialect) -> Response:
            return await _generate(service, path, dialect)

        app.add_url_rule(path, f"generate {path}", generate, methods=["POST"])


async def _generate(service: Service, path: str, dialect: Dialect) -> Response:
    asked = dialect.parse(await request.get_data())
    stream, reader = await service.open(asked, key=g.key, route=path)
    hold(request, closing(reader))
    identity, created = stream.identity, int(time.time())
    if asked.stream:
        choices = len(asked.prompts) * asked.n
        encoder = dialect.encoder(identity.id, identity.model, created, asked.include_usage, choices)
        body = EventBody(reader, encoder, service.config.stream.heartbeat_s)
        return Response(body, headers=HEADERS | {"X-Request-Id": identity.id})
    whole = await _complete(stream, reader, dialect, created, len(asked.prompts) * asked.n)
    return answer(whole, headers={"X-Request-Id": identity.id})


async def _complete(
    stream: Stream, reader: StreamReader, dialect: Dialect, created: int, choices: int
) -> dict[str, Any]:
    """Read the stream to its end. Raises the error that it ended with."""
    deltas: list[list[Delta]] = [[] for _ in range(choices)]
    while records := await reader.read():
        for record in records:
            event = record.event
            if isinstance(event, Delta):
                deltas[record.source].append(event)
            elif isinstance(event, Failed):
                raise event.error
            else:
                reasons, usage = event.reasons, event.usage
        reader.ack(records[-1].n)
    return dialect.complete(stream.identity.id, stream.identity.model, created, deltas, reasons, usage)
