"""What a program written with openai-python sees: a script without tokenflow, for any interpreter that has the SDK.

`python openai_client.py URL trio|asyncio|sync` runs every scenario one after the other (never two at once: texts of a
real model are only equal at the same batch shape) and prints one JSON object. The first failing scenario's traceback
goes to stderr; what was seen is judged by test_openai_sdk.py.

The server has the models `smollm2` (real) and `synthetic` (which takes planned faults), and the API key `KEY`.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import openai

KEY = "sk-right"
MODEL = "smollm2"
# Short, for a prompt's tokens are most of the time that this takes; the template adds a longer system message itself.
QUESTION: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]
PROMPT = "Once upon a time, by the sea,"
SHORT = {"model": MODEL, "max_tokens": 8}
FAULT = '{"synthetic": {"raise_at": 3, "tokens_per_s": 200}}'
WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 1234}
STOPPED: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "stop": ["e"]}


def options(url: str, key: str = KEY) -> dict[str, Any]:
    return {"base_url": url + "/v1", "api_key": key, "max_retries": 0, "timeout": 60.0}


def error(exc: openai.APIError) -> dict[str, Any]:
    """What a program can ask of an error. One that comes within a stream has no status."""
    return {
        "class": type(exc).__name__,
        "status": getattr(exc, "status_code", None),
        "code": exc.code,
        "param": exc.param,
        "type": exc.type,
        "message": exc.message,
        "retry_after": exc.response.headers.get("retry-after") if isinstance(exc, openai.APIStatusError) else None,
    }


def whole(answer: Any) -> dict[str, Any]:
    """An answer without `stream`, of either kind."""
    return {
        "id": answer.id,
        "model": answer.model,
        "texts": [choice.message.content if hasattr(choice, "message") else choice.text for choice in answer.choices],
        "reasons": [choice.finish_reason for choice in answer.choices],
        "usage": answer.usage.model_dump() if answer.usage else None,
        "logprobs": [choice.logprobs and choice.logprobs.model_dump() for choice in answer.choices],
    }


class Gathered:
    """A stream's chunks as one answer."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, list[str]] = {}
        self.usages: list[Any] = []
        self.roles: list[str] = []
        self.logprobs: list[Any] = []
        self.chunks = 0

    def take(self, chunk: Any) -> None:
        self.chunks += 1
        self.ids.add(chunk.id)
        if chunk.usage is not None:
            self.usages.append(chunk.usage.model_dump())
            assert not chunk.choices
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            self.texts[choice.index] = self.texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                self.reasons.setdefault(choice.index, []).append(choice.finish_reason)
            if getattr(getattr(choice, "delta", None), "role", None):
                self.roles.append(choice.delta.role)
            if choice.logprobs:
                self.logprobs.append(choice.logprobs.model_dump())

    def seen(self) -> dict[str, Any]:
        return {
            "ids": sorted(self.ids),
            "texts": [self.texts[i] for i in sorted(self.texts)],
            "reasons": [self.reasons[i] for i in sorted(self.reasons)],
            "usages": self.usages,
            "roles": self.roles,
            "logprobs": self.logprobs,
            "chunks": self.chunks,
        }


class Scenarios:
    """Each method is one; what it returns goes into the output under its name."""

    def __init__(self, client: openai.AsyncOpenAI, url: str) -> None:
        self.client = client
        self.url = url

    async def chat(self, **fields: Any) -> dict[str, Any]:
        return whole(await self.client.chat.completions.create(messages=QUESTION, **SHORT | fields))

    async def chat_streamed(self, **fields: Any) -> dict[str, Any]:
        gathered = Gathered()
        fields = {"messages": QUESTION} | SHORT | fields
        async for chunk in await self.client.chat.completions.create(stream=True, **fields):
            gathered.take(chunk)
        return gathered.seen()

    async def completion(self, **fields: Any) -> dict[str, Any]:
        return whole(await self.client.completions.create(prompt=PROMPT, **SHORT | fields))

    async def completion_streamed(self, **fields: Any) -> dict[str, Any]:
        gathered = Gathered()
        async for chunk in await self.client.completions.create(prompt=PROMPT, stream=True, **SHORT | fields):
            gathered.take(chunk)
        return gathered.seen()

    async def texts(self) -> dict[str, Any]:
        """Each whole and streamed."""
        return {
            "chat greedy": [await self.chat(**GREEDY), await self.chat_streamed(**GREEDY, **WITH_USAGE)],
            "chat seeded": [await self.chat(**SEEDED), await self.chat_streamed(**SEEDED)],
            "completion greedy": [await self.completion(**GREEDY), await self.completion_streamed(**GREEDY)],
            "completion stopped": [
                await self.completion(**STOPPED),
                await self.completion_streamed(**STOPPED, **WITH_USAGE),
            ],
        }

    async def choices(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"n": 2, "temperature": 0.8, "seed": 7, "max_tokens": 4}
        return {"whole": await self.chat(**fields), "streamed": await self.chat_streamed(**fields)}

    async def logprobs(self) -> dict[str, Any]:
        chat: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 4}
        plain: dict[str, Any] = {"logprobs": 2, "temperature": 0, "max_tokens": 4}
        return {
            "chat": [await self.chat(**chat), await self.chat_streamed(**chat)],
            "completion": [await self.completion(**plain), await self.completion_streamed(**plain)],
        }

    async def models(self) -> dict[str, Any]:
        listed = [model.id async for model in self.client.models.list()]
        one = await self.client.models.retrieve(MODEL)
        return {"listed": listed, "one": one.model_dump()}

    async def errors(self) -> dict[str, Any]:
        attempts: dict[str, Any] = {
            "unknown model": lambda: self.chat(model="gpt-nothing"),
            "unknown model streamed": lambda: self.chat_streamed(model="gpt-nothing"),
            "no such model": lambda: self.client.models.retrieve("gpt-nothing"),
            "temperature": lambda: self.chat(temperature=11),
            "temperature streamed": lambda: self.chat_streamed(temperature=11),
            "too long": lambda: self.client.completions.create(prompt="word " * 6000, **SHORT),
            "engine": lambda: self.client.completions.create(model="synthetic", prompt=FAULT),
            "timeout": lambda: self.client.completions.create(
                model="synthetic",
                prompt='{"synthetic": {"hang_at": 0}}',
                extra_body={"timeouts": {"prefill_timeout_s": 0.2}},
            ),
            "no path": lambda: self.client.post("/nowhere", cast_to=object, body={}),
            "wrong key": self._wrong_key,
        }
        seen = {}
        for name, attempt in attempts.items():
            try:
                seen[name] = {"class": None, "answer": str(await attempt())}
            except openai.APIError as exc:
                seen[name] = error(exc)
        return seen

    async def _wrong_key(self) -> None:
        async with openai.AsyncOpenAI(**options(self.url, "sk-wrong")) as client:
            await client.models.list()

    async def failure_within_a_stream(self) -> dict[str, Any]:
        seen = {}
        for name, fields in {"engine": {"content": FAULT}, "first": {"content": FAULT.replace("3", "0", 1)}}.items():
            pieces: list[str] = []
            try:
                stream = await self.client.chat.completions.create(
                    model="synthetic", messages=[{"role": "user", **fields}], stream=True
                )
                async for chunk in stream:
                    pieces.append(chunk.choices[0].delta.content or "")
                seen[name] = {"class": None, "pieces": pieces}
            except openai.APIError as exc:
                seen[name] = error(exc) | {"pieces": pieces}
        return seen

    async def leaving(self) -> dict[str, Any]:
        """`break` and close, on the model with one slot: the next request has it."""
        alone = await self.client.completions.create(model="synthetic", prompt="next", max_tokens=5)
        texts = []
        for _ in range(3):
            stream = await self.client.completions.create(
                model="synthetic", prompt='{"synthetic": {"tokens_per_s": 20}}', stream=True
            )
            async for _chunk in stream:
                break
            await stream.close()
            answer = await self.client.completions.create(model="synthetic", prompt="next", max_tokens=5)
            texts.append(answer.choices[0].text)
        return {"alone": alone.choices[0].text, "after leaving": texts}

    async def raw(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"messages": QUESTION, "model": "synthetic", "max_tokens": 3}
        response = await self.client.chat.completions.with_raw_response.create(**fields)
        return {"request_id": response.headers["x-request-id"], "id": response.parse().id}


NAMES = ["texts", "choices", "logprobs", "models", "errors", "failure_within_a_stream", "leaving", "raw"]


async def run(url: str) -> dict[str, Any]:
    async with openai.AsyncOpenAI(**options(url)) as client:
        scenarios = Scenarios(client, url)
        return {"version": openai.__version__} | {name: await getattr(scenarios, name)() for name in NAMES}


def run_sync(url: str) -> dict[str, Any]:
    """The sync client, once: it shares the parsing and only reads differently."""
    with openai.OpenAI(**options(url)) as client:
        answer = whole(client.chat.completions.create(messages=QUESTION, temperature=0, **SHORT))
        gathered = Gathered()
        for chunk in client.chat.completions.create(messages=QUESTION, temperature=0, stream=True, **SHORT):
            gathered.take(chunk)
        with client.completions.create(model="synthetic", prompt="left", stream=True) as stream:
            next(iter(stream))
        after = client.completions.create(model="synthetic", prompt="next", max_tokens=5)
        try:
            client.chat.completions.create(messages=QUESTION, model="gpt-nothing")
            failure: Any = None
        except openai.APIError as exc:
            failure = error(exc)
        return {
            "version": openai.__version__,
            "whole": answer,
            "streamed": gathered.seen(),
            "after": after.choices[0].text,
            "failure": failure,
        }


def main(url: str, backend: str) -> None:
    if backend == "trio":
        import trio

        seen = trio.run(run, url)
    elif backend == "asyncio":
        import asyncio

        seen = asyncio.run(run(url))
    else:
        seen = run_sync(url)
    print(json.dumps(seen))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        sys.exit(1)
