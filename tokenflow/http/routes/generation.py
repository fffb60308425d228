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

from tokenflow.core.types import Delta, FinishReason, GenerationRequest, TokenLogprob, Usage
from tokenflow.dialects import openai_chat, openai_completions
from tokenflow.http.answers import answer
from tokenflow.http.connection import hold
from tokenflow.http.events import HEADERS, Encoder, EventBody
from tokenflow.service.records import Ended, Failed, StreamEvent
from tokenflow.service.service import Service
from tokenflow.service.stream import StreamReader


class Complete(Protocol):
    """A dialect's whole answer in one body."""

    def __call__(
        self,
        id: str,
        model: str,
        created: int,
        texts: list[str],
        reasons: tuple[FinishReason, ...],
        usage: Usage,
        logprobs: list[list[TokenLogprob]] | None,
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
    asked = dialect.parse(await request.get_data(True, False, False))
    stream, reader = await service.open(asked, key=g.key, route=path)
    hold(closing(reader))
    identity, created = stream.identity, int(time.time())
    if asked.stream:
        choices = len(asked.prompts) * asked.n
        encoder = dialect.encoder(identity.id, identity.model, created, asked.include_usage, choices)
        events = EventBody(reader, encoder, service.config.stream.heartbeat_s)
        return Response(events, headers=HEADERS | {"X-Request-Id": identity.id})
    whole = Whole(asked)
    await whole.read(reader)
    body = dialect.complete(
        identity.id, identity.model, created, whole.texts, whole.end.reasons, whole.end.usage, whole.logprobs
    )
    return answer(body, headers={"X-Request-Id": identity.id})


class Whole:
    """A stream read to its end, for an answer in one body."""

    end: Ended

    def __init__(self, asked: GenerationRequest) -> None:
        choices = len(asked.prompts) * asked.n
        self._pieces: list[list[str]] = [[] for _ in range(choices)]
        self.logprobs: list[list[TokenLogprob]] | None = (
            None if asked.logprobs is None else [[] for _ in range(choices)]
        )

    @property
    def texts(self) -> list[str]:
        return ["".join(pieces) for pieces in self._pieces]

    async def read(self, reader: StreamReader) -> None:
        """Read everything. Raises the error that the stream ended with."""
        while records := await reader.read():
            for record in records:
                self._take(record.source, record.event)
            reader.ack(records[-1].n)

    def _take(self, source: int, event: StreamEvent) -> None:
        if isinstance(event, Delta):
            self._pieces[source].append(event.text)
            if self.logprobs is not None:
                self.logprobs[source] += event.logprobs
        elif isinstance(event, Failed):
            raise event.error
        else:
            self.end = event
