"""Structured output from the real model, over HTTP: what comes is what was asked for, and nobody else pays for it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
import trio
from openai import OpenAI
from pydantic import BaseModel

from tests.e2e.conftest import Server
from tests.e2e.schemas import HOSTILE, SENSIBLE, made
from tests.e2e.wire import CHAT, COMPLETIONS, Answer, Frame, Wire, ask, chat, completion, connect, post, stream
from tokenflow.core.sse import Parser

pytestmark = pytest.mark.model

PROMPT = "Answer in JSON."
MAX_TOKENS = 256
BUDGET_S = 3.0
"""Of the configuration's defaults."""
PATIENCE_S = 30.0
"""On a machine that does other things too."""


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


async def run(port: int, schema: dict[str, Any], seed: int) -> bool:
    """One streamed answer, which is valid, or was cut by the limit: False then."""
    fields = {"response_format": response_format(schema), "max_tokens": MAX_TOKENS, "seed": seed}
    answer = await stream(port, CHAT, chat(PROMPT, **fields))
    if answer.reason == "length":
        return False
    assert answer.reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)
    return True


@pytest.mark.parametrize("name", ["person", "weather"])
async def test_an_answer_is_valid(real: Server, name: str) -> None:
    assert await run(real.port, SENSIBLE[name], 1)


@pytest.mark.stress
async def test_a_hundred_answers_are_valid(real: Server, share: Callable[[int], int]) -> None:
    """A hundred seeds, beside those whose answers the limit cuts, which are the fewer."""
    wanted, valid, cut = share(100), 0, 0
    while valid < wanted:
        seed = valid + cut
        if await run(real.port, [*SENSIBLE.values()][seed % len(SENSIBLE)], seed):
            valid += 1
        else:
            cut += 1
    print(f"{valid} valid, {cut} cut by the limit of {MAX_TOKENS} tokens")
    assert cut < valid


async def test_every_way_to_ask(real: Server) -> None:
    one = r'\{\s*"a"\s*:\s*1\s*\}'
    answers = {
        "regex": ({"structured_outputs": {"regex": "[a-c]{3}[0-9]"}}, "[a-c]{3}[0-9]"),
        "choice": ({"guided_choice": ["Röm", '"a"']}, 'Röm|"a"'),
        "Lark": ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        "GBNF": ({"grammar": 'root ::= "x" [0-9] [0-9]'}, "x[0-9]{2}"),
        "schema": ({"json_schema": {"const": {"a": 1}}}, one),
        "object": ({"response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}}, one),
        "beside": ({"response_format": {"type": "json_schema", "schema": {"const": {"a": 1}}}}, one),
    }
    for name, (fields, pattern) in answers.items():
        for route, body in ((CHAT, chat("Go on")), (COMPLETIONS, completion("Go on"))):
            answer = await post(real.port, route, body | fields | {"max_tokens": 40, "n": 2})
            texts = [choice.get("text") or choice["message"]["content"] for choice in answer.json["choices"]]
            assert all(re.fullmatch(pattern, text) for text in texts), (name, route, texts)


async def test_any_object(real: Server) -> None:
    answer = await post(real.port, CHAT, chat(PROMPT, response_format={"type": "json_object"}, max_tokens=64, seed=1))
    assert answer.text.startswith("{")
    if answer.json["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer.text), dict)


class Person(BaseModel):
    first_name: str
    age: int


def test_the_sdk_parses_it(real: Server) -> None:
    client = OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)
    with client:
        done = client.chat.completions.parse(
            model="smollm2",
            messages=[{"role": "user", "content": "Bob is 7. Answer in JSON."}],
            response_format=Person,
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
    assert isinstance(done.choices[0].message.parsed, Person)


async def test_models_say_that_they_can(real: Server) -> None:
    [model] = (await ask(real.port, "GET", "/v1/models")).json["data"]
    assert {"grammar", "chat"} <= set(model["capabilities"])


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_bad_schema_is_a_400_that_says_where(real: Server, streaming: bool) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "numbr"}}}
    for wanted, place in (
        (response_format(schema), "response_format.json_schema.schema"),
        ({"type": "json_object", "schema": schema}, "response_format.schema"),
    ):
        answer = await post(real.port, CHAT, chat(PROMPT, response_format=wanted, stream=streaming))
        assert answer.status == 400
        assert answer.error["param"] == f"{place}.properties.size"
        assert "numbr" in answer.error["message"]


async def test_who_comes_back_in_the_middle_gets_the_rest_of_it(real: Server) -> None:
    """Paused when its reader left, it goes on from the same place in its grammar."""
    schema = SENSIBLE["weather"]
    kept = {"stream_options": {"on_disconnect": "pause"}, "stream": True, "max_tokens": MAX_TOKENS, "temperature": 0}
    async with connect(real.port) as wire:
        await wire.send("POST", CHAT, chat(PROMPT, response_format=response_format(schema), **kept))
        id = (await wire.head())["x-request-id"]
        first = [frame.raw async for frame in _until(wire, 6)]
        wire.close()
    seen = Parser().feed(b"".join(frame + b"\n\n" for frame in first))
    headers = {"Accept": "text/event-stream", "Last-Event-ID": seen[-1].id}
    rest = Parser().feed((await ask(real.port, "GET", f"/v1/streams/{id}", None, headers)).body)
    chunks = [json.loads(event.data) for event in seen + rest if event.data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    jsonschema.validate(json.loads("".join(choice["delta"].get("content", "") for choice in choices)), schema)
    assert choices[-1]["finish_reason"] == "stop"


async def _until(wire: Wire, tokens: int) -> AsyncIterator[Frame]:
    """Frames up to the one with so many tokens."""
    async for frame in wire:
        yield frame
        tokens -= b'"content":"' in frame.raw and b'"content":""' not in frame.raw
        if not tokens:
            return


# --- who means harm -------------------------------------------------------------------------------------------------


async def attempt(port: int, schema: Any) -> Answer:
    """What becomes of a schema, within the budget and what a busy machine adds: tokens, or a 400 that names it."""
    began = trio.current_time()
    with trio.fail_after(PATIENCE_S):
        answer = await post(port, CHAT, chat("Hi", response_format=response_format(schema), max_tokens=4, seed=1))
    assert trio.current_time() - began < PATIENCE_S
    assert answer.status in (200, 400), answer.body
    if answer.status == 400:
        assert (answer.error["param"] or "").startswith("response_format"), answer.error
    return answer


@asynccontextmanager
async def neighbour(port: int) -> AsyncIterator[list[float]]:
    """A stream that goes on all the while; the times at which its tokens came."""
    times: list[float] = []
    async with connect(port) as wire, trio.open_nursery() as nursery:
        await wire.open(COMPLETIONS, completion("Once upon a time", max_tokens=3900, ignore_eos=True))

        async def read() -> None:
            async for frame in wire:
                if frame.text:
                    times.append(frame.at)

        nursery.start_soon(read)
        yield times
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", ["deep", "references"])
async def test_hostile_schemas(real: Server, name: str) -> None:
    async with neighbour(real.port) as times:
        before = len(times)
        answer = await attempt(real.port, HOSTILE[name])
        assert answer.status == 400
        with trio.fail_after(PATIENCE_S):
            while len(times) <= before:
                await trio.sleep(0.01)


@pytest.mark.stress
async def test_all_hostile_schemas(real: Server) -> None:
    async with neighbour(real.port) as times:
        for schema in HOSTILE.values():
            await attempt(real.port, schema)
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < BUDGET_S
    assert (await ask(real.port, "GET", "/health/ready")).status == 200


@pytest.mark.stress
async def test_any_schema(real: Server, share: Callable[[int], int]) -> None:
    """Seeded; every one is answered, and the server is as it was."""
    answered = [(await attempt(real.port, made(random.Random(seed)))).status for seed in range(share(400))]
    assert {200, 400} >= set(answered)
    assert await run(real.port, SENSIBLE["person"], 1)
