"""What every peer says: OpenAI's chunks, and tokenflow's WebSocket frames, as dicts."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import Any

import orjson

TOKEN = " harbor"
MODEL = "words"
DONE = b"data: [DONE]\n\n"
ROLE = {"role": "assistant", "content": ""}


class Stream:
    """One answer's chunks."""

    def __init__(self) -> None:
        self.id = f"tf-{token_hex(16)}"
        self.created = int(time.time())

    def chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": MODEL,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
        }

    def token(self, text: str) -> dict[str, Any]:
        return self.chunk({"content": text})

    def begun(self) -> dict[str, Any]:
        return {"id": self.id, "stream": self.id, "n": 0}

    def frame(self, n: int, text: str) -> dict[str, Any]:
        return self.begun() | {"n": n, "index": 0, "delta": {"content": text}}


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def text(value: dict[str, Any]) -> str:
    return orjson.dumps(value).decode()
