"""OpenAI completions: bodies in, chunks and one whole answer out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tokenflow.core.types import (
    FinishReason,
    GenerationRequest,
    Message,
    Prompt,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    Usage,
)
from tokenflow.dialects.fields import (
    Fields,
    as_integer,
    as_text,
    body_fields,
    missing,
    wrong_type,
)
from tokenflow.dialects.openai_common import MAX_TOKEN_ID, generation_request
from tokenflow.dialects.openai_frames import StreamEncoder, dumps, finite, usage_object
from tokenflow.errors import InvalidRequest


def parse(body: object, *, stream: bool | None = None) -> GenerationRequest:
    """A body of `POST /v1/completions` to what it asks for.

    Args:
        body: bytes of JSON, or a JSON value already read.
        stream: what the route settles, for routes that always stream; None: the body's own `stream`.

    Raises:
        InvalidRequest: with `param` naming the field.
    """
    fields = body_fields(body)
    prompts = parse_prompts(fields)
    return generation_request(fields, prompts, logprobs=fields.integer("logprobs", least=0), stream=stream)


def parse_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """The field `prompt`: a string, strings, token ids, or arrays of token ids; none of them empty."""
    reading = parse_reading(fields)
    value = fields.get("prompt")
    if value is None:
        raise missing("prompt")
    if isinstance(value, str):
        return (_text_prompt(value, "prompt", reading),)
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, an array of strings, of token ids, or of arrays of token ids", value)
    if not value:
        raise _empty("prompt")
    if isinstance(value[0], int | float):
        return (_token_prompt(value, "prompt"),)
    if isinstance(value[0], str):
        return tuple([_text_prompt(item, f"prompt[{i}]", reading) for i, item in enumerate(value)])
    if isinstance(value[0], list):
        return tuple([_token_prompt(item, f"prompt[{i}]") for i, item in enumerate(value)])
    raise wrong_type("prompt[0]", "a string, a token id or an array of token ids", value[0])


def _text_prompt(value: object, path: str, reading: TextPrompt) -> Prompt:
    text = as_text(value, path)
    if not text:
        raise _empty(path)
    return replace(reading, text=text)


def parse_reading(fields: Fields) -> TextPrompt:
    """How a text is to be read, beside which these fields stand: a prompt without its text.

    Who sends one writes all of it, as model files and front-ends spell it: unless told otherwise it is read so.
    """
    special, ours, theirs = [fields.boolean(name) for name in ("parse_special", "add_special", "add_special_tokens")]
    begins = theirs if ours is None else ours
    return TextPrompt(text="", special=special is not False, begins=begins is not False)


def _token_prompt(value: object, path: str) -> TokenPrompt:
    if not isinstance(value, list):
        raise wrong_type(path, "an array of token ids, like the first one", value)
    if not value:
        raise _empty(path)
    return TokenPrompt(tokens=token_ids(value, path))


def token_ids(values: list[Any], path: str) -> tuple[int, ...]:
    """Token ids, each checked; fast for the many that are right."""
    if all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in values):
        return tuple(values)
    return tuple(as_integer(token, f"{path}[{i}]", least=0, most=MAX_TOKEN_ID) for i, token in enumerate(values))


def _empty(path: str) -> InvalidRequest:
    return InvalidRequest(f"'{path}' is empty; there is nothing to go on from.", param=path)


# --- answers --------------------------------------------------------------------------------------------------------


def _logprobs_object(entries: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    lengths = [entry.characters for entry in entries]
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries] if any(entry.top for entry in entries) else None,
        "text_offset": [offset + before for before in accumulate(lengths[:-1], initial=0)] if entries else [],
    }


def _top(entry: TokenLogprob) -> dict[str, float]:
    """The likeliest by their text, and always the one that was drawn (so there may be one more than asked for)."""
    top: dict[str, float] = {}
    for other in (*entry.top, entry):
        top.setdefault(other.token, finite(other.logprob))  # two halves of characters may look the same: the likelier
    return top


class CompletionsEncoder(StreamEncoder):
    """`text_completion` frames."""

    object = "text_completion"

    def _choice_open(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def _choice_close(self) -> bytes:
        return b',"logprobs":'

    def _finish_open(self, index: int) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":' % index

    def _logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return _logprobs_object(entries, offset)


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
    """The answer without `stream`, as a JSON value (write it with `dumps`). Arguments as in `openai_chat.complete`."""
    return {
        "id": id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": i,
                "text": message.text,
                "logprobs": _logprobs_object(message.logprobs) if logprobs else None,
                "finish_reason": reason,
            }
            for i, (message, reason) in enumerate(zip(messages, reasons, strict=True))
        ],
        "usage": usage_object(usage),
    }


__all__ = ["CompletionsEncoder", "complete", "dumps", "parse", "parse_prompts", "parse_reading", "token_ids"]
