"""Named events: the same chunks as OpenAI's chat, with what is not a chunk told apart by the event's name.

event: start     {"id","model","created"}
(unnamed)        chunks
event: ping      {}
event: done      [DONE]        or    event: aborted {"reason"}    or    event: error {"error":{…}}
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenflow.core import sse
from tokenflow.core.types import FinishReason, GenerationRequest, Usage
from tokenflow.dialects import openai_chat
from tokenflow.dialects.errors import envelope
from tokenflow.dialects.openai_frames import dumps
from tokenflow.errors import Draining, TokenflowError


def parse(body: object) -> GenerationRequest:
    """A body of `POST /v1/chat/completions_stream`: chat's, and always a stream."""
    return openai_chat.parse(body, stream=True)


class NamedEncoder(openai_chat.ChatEncoder):
    """Chunks as chat's; the rest by name."""

    def __init__(self, id: str, model: str, created: int, include_usage: bool, choices: int = 1) -> None:
        super().__init__(id, model, created, include_usage, choices)
        self._opening = {"id": id, "model": model, "created": created}

    def start(self, *, ids: bool = False) -> bytes:
        return sse.event(dumps(self._opening), event="start") + super().start()

    def ping(self, *, ids: bool = False) -> bytes:
        return sse.event("{}", event="ping")

    def end(self, reasons: Sequence[FinishReason], usage: Usage, *, event_id: str | None = None) -> bytes:
        chunks = self._finish(reasons, usage)
        if "cancelled" in reasons:
            return chunks + sse.event(dumps({"reason": "cancelled"}), event="aborted", id=event_id)
        return chunks + sse.event("[DONE]", event="done", id=event_id)

    def failure(self, error: TokenflowError, *, event_id: str | None = None) -> bytes:
        if isinstance(error, Draining):
            return sse.event(dumps({"reason": error.code}), event="aborted", id=event_id)
        return sse.event(dumps(envelope(error)), event="error", id=event_id)


__all__ = ["NamedEncoder", "parse"]
