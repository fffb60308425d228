"""`/v1/tokenize` and `/v1/detokenize`, in the shape that vLLM gave them.

Unlike a prompt to generate from, nothing is a good question here: an empty text has no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenflow.core.types import ChatPrompt, TextPrompt
from tokenflow.dialects.fields import body_fields, missing
from tokenflow.dialects.openai_completions import parse_reading, token_ids
from tokenflow.dialects.openai_messages import parse_messages
from tokenflow.dialects.openai_refused import refuse_in_messages
from tokenflow.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """Count or see the tokens of a text, or of messages as the model's template renders them."""

    model: str
    prompt: TextPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """The text of some tokens."""

    model: str
    tokens: tuple[int, ...]


def parse_tokenize(body: object) -> TokenizeRequest:
    """A body of `POST /v1/tokenize`: `prompt` or `messages`, not both.

    Raises:
        InvalidRequest: with `param` naming the field.
    """
    fields = body_fields(body)
    text = fields.text("prompt")
    prompt: TextPrompt | ChatPrompt
    if text is not None:
        if fields.get("messages") is not None:
            raise InvalidRequest("Send either 'prompt' or 'messages', not both.", param="messages")
        prompt = replace(parse_reading(fields), text=text)
    elif fields.get("messages") is not None:
        prompt = parse_messages(fields)
        refuse_in_messages(fields)
    else:
        raise missing("prompt")
    return TokenizeRequest(model=fields.text("model") or "", prompt=prompt)


def tokenized(tokens: Sequence[int], max_model_len: int) -> dict[str, Any]:
    """The answer to tokenize."""
    return {"tokens": list(tokens), "count": len(tokens), "max_model_len": max_model_len}


def parse_detokenize(body: object) -> DetokenizeRequest:
    """A body of `POST /v1/detokenize`.

    Raises:
        InvalidRequest: with `param` naming the field.
    """
    fields = body_fields(body)
    tokens = fields.array("tokens")
    if tokens is None:
        raise missing("tokens")
    return DetokenizeRequest(model=fields.text("model") or "", tokens=token_ids(tokens, "tokens"))


def detokenized(text: str) -> dict[str, Any]:
    """The answer to detokenize."""
    return {"prompt": text}
