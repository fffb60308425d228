"""openai-python reads streams that can be come back to: a script without tokenflow, for any interpreter with the SDK.

`python openai_resumable.py URL BODIES` streams each body of a JSON list, chat or completion by what is in it, and
prints a list of what came of each: the text, the reason, the completion's token count, or the error.
openai_resumable.mjs is the same for openai-node; test_openai_resumable.py judges both.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai


def read(client: openai.OpenAI, body: dict[str, Any]) -> dict[str, Any]:
    chats = "messages" in body
    seen: dict[str, Any] = {"text": "", "reason": None, "tokens": None, "error": None}
    extra = {name: body.pop(name) for name in ("timeouts", "coalesce_ms") if name in body}  # the SDK knows neither
    try:
        create = client.chat.completions.create if chats else client.completions.create
        for chunk in create(**body, extra_body=extra):
            if chunk.usage:
                seen["tokens"] = chunk.usage.completion_tokens
            for choice in chunk.choices:
                seen["text"] += (choice.delta.content if chats else choice.text) or ""
                seen["reason"] = choice.finish_reason or seen["reason"]
    except openai.APIError as exc:
        seen["error"] = exc.code
    return seen


def main(url: str, bodies: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        print(json.dumps([read(client, body) for body in json.loads(bodies)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
