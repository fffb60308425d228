"""The small dialect: for lessons, curl and a browser's bare `EventSource`.

    POST /generate        {"prompt","max_tokens"}  ->  {"text","usage"}
    GET  /stream          ?prompt=&max_tokens=     ->  data: {"token":"…"} …, data: [DONE]
    POST /v1/chat/stream  {"prompt"}               ->  data: {"content":"…"} …, data: [DONE]

Failures are `event: error`. A browser repeats its own URL when it reconnects, so everything that `GET /stream` takes is
in the query, and what it needs to come back is in the ids alone: the first frame is an id without data, so that a
client cut before its first token comes back to the same generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenflow.core import sse
from tokenflow.core.types import ChatPrompt, Delta, FinishReason, GenerationRequest, Message, TextPrompt, Usage
from tokenflow.dialects.encoder import Encoder
from tokenflow.dialects.errors import envelope
from tokenflow.dialects.fields import Fields, body_fields, missing
from tokenflow.dialects.openai_common import attendance, generation_request
from tokenflow.dialects.openai_frames import DONE, dumps
from tokenflow.errors import Cancelled, InvalidRequest, TokenflowError

_NUMBERS = frozenset(
    {"max_tokens", "seed", "top_k", "mirostat", "mirostat_mode", "dry_allowed_length", "dry_range", "coalesce_ms", "n"}
    | {"n_predict", "min_tokens", "truncate_prompt_tokens", "prompt_logprobs", "best_of"}
)
_FRACTIONS = frozenset(
    {"temperature", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"}
    | {"mirostat_tau", "mirostat_eta", "repetition_penalty", "repeat_penalty", "frequency_penalty", "presence_penalty"}
    | {"grace_s", "retention_s", "top_n_sigma", "dynatemp_range", "min_keep", "n_indent", "t_max_predict_ms"}
)
MAX_DIGITS = 400
"""More than that no number has, and Python has a limit of its own."""
_WHOLE = re.compile("-?[0-9]+")  # Python's `int` takes other scripts' digits too, spaces, and 1_000
_FRACTION = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_BOOLEANS = {"stream", "ignore_eos", "echo", "include_stop_str_in_output", "use_beam_search"}
_TRUTHS = {"true": True, "false": False}
CANCELLED = "The stream was cancelled."
TEXT_CHARS = 10_000
"""Characters in one frame, so that its line keeps to the limit whatever they are."""


def parse_generate(body: object) -> GenerationRequest:
    """A body of `POST /generate`."""
    return _request(body_fields(body), stream=False)


def parse_chat(body: object) -> GenerationRequest:
    """A body of `POST /v1/chat/stream`: the prompt is one user's message."""
    fields = body_fields(body)
    request = _request(fields, stream=True)
    message = {"role": "user", "content": _prompt(fields)}
    return replace(request, prompts=(ChatPrompt(messages=(message,)),))


def parse_query(query: Mapping[str, str]) -> GenerationRequest:
    """The query of `GET /stream`."""
    fields = Fields({name: _value(name, text) for name, text in query.items()})
    return replace(_request(fields, stream=True), attendance=attendance(fields, "pause"))


def _request(fields: Fields, *, stream: bool) -> GenerationRequest:
    if (fields.integer("n") or 1) != 1:
        raise InvalidRequest("This dialect has one choice; ask for more in OpenAI's.", param="n")
    return generation_request(fields, (TextPrompt(text=_prompt(fields)),), logprobs=None, stream=stream)


def _prompt(fields: Fields) -> str:
    prompt = fields.text("prompt")
    if not prompt:
        raise missing("prompt")
    return prompt


def _value(name: str, text: str) -> object:
    if name in _BOOLEANS:
        return _TRUTHS.get(text, text)
    if name not in _NUMBERS | _FRACTIONS:
        return text
    if len(text) > MAX_DIGITS or not _FRACTION.fullmatch(text):
        raise InvalidRequest(f"'{name}' is a number, not {text[:40]!r}.", param=name)
    return int(text) if name in _NUMBERS and _WHOLE.fullmatch(text) else float(text)


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
    """The answer to `POST /generate`, which has no place to say that it was cut short.

    Raises:
        Cancelled: it was.
    """
    if "cancelled" in reasons:
        raise Cancelled(CANCELLED)
    return {
        "text": messages[0].text,
        "usage": {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion},
    }


class SmallEncoder(Encoder):
    """One JSON object per token.

    Args:
        id: the stream's id; the rest is taken so that every dialect's encoder is made alike.
    """

    key = "token"

    def __init__(self, id: str, model: str, created: int, include_usage: bool, choices: int = 1) -> None:
        self._id = id

    def start(self, *, ids: bool = False) -> bytes:
        """With ids, a frame that only says who this is."""
        return f"id: {self._id}:0\n\n".encode() if ids else b""

    def delta(self, index: int, delta: Delta, *, event_id: str | None = None) -> bytes:
        texts = [delta.text[at : at + TEXT_CHARS] for at in range(0, len(delta.text), TEXT_CHARS)]
        last = len(texts) - 1
        return b"".join(
            sse.event(dumps({self.key: text}), id=event_id if i == last else None) for i, text in enumerate(texts)
        )

    def end(self, reasons: Sequence[FinishReason], usage: Usage, *, event_id: str | None = None) -> bytes:
        if "cancelled" in reasons:
            return self.failure(Cancelled(CANCELLED), event_id=event_id)
        return sse.event("[DONE]", id=event_id) if event_id else DONE

    def failure(self, error: TokenflowError, *, event_id: str | None = None) -> bytes:
        retry = None if error.retry_after_s is None else int(error.retry_after_s * 1000)
        return sse.event(dumps(envelope(error)), event="error", id=event_id, retry=retry)

    def ping(self, *, ids: bool = False) -> bytes:
        return sse.PING_LINE if ids else sse.PING


class ContentEncoder(SmallEncoder):
    """The same, as `POST /v1/chat/stream` spells it."""

    key = "content"


__all__ = ["ContentEncoder", "SmallEncoder", "complete", "parse_chat", "parse_generate", "parse_query"]
