"""Case 19: what was counted, told the same by the stream, the whole answer, the ledger and the metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.conftest import ledger
from tests.e2e.conftest import Server
from tests.e2e.talk import say
from tests.e2e.wire import BODIES, connect, directive, eventually, metric, post, stream

WINDOW = 64


@pytest.mark.parametrize("options", [..., None, {}, {"include_usage": None}, {"include_usage": False}])
@pytest.mark.parametrize("route", BODIES)
async def test_case_19_usage_only_where_it_was_asked_for(port: int, route: str, options: Any) -> None:
    body = BODIES[route]("hello", max_tokens=3) | ({} if options is ... else {"stream_options": options})
    streamed = await stream(port, route, body)
    assert not [chunk for chunk in streamed.chunks if "usage" in chunk or not chunk["choices"]]


@pytest.mark.parametrize("ways", [{}, {"n": 3}, {"stop": ["a"]}, {"max_tokens": 1}, {"coalesce_ms": 20}])
@pytest.mark.parametrize("route", BODIES)
async def test_case_19_usage_equals_that_without_streaming(port: int, route: str, ways: dict[str, Any]) -> None:
    body = BODIES[route]("hello there", **{"max_tokens": 30, "temperature": 0} | ways)
    whole = (await post(port, route, body)).json["usage"]
    streamed = await stream(port, route, body | {"stream_options": {"include_usage": True}})
    [last] = [chunk for chunk in streamed.chunks if chunk["usage"] is not None]
    assert (last["choices"], last["usage"]) == ([], whole)
    assert (await say(port, body)).usage == whole
    counted = {key: body[key] for key in ("messages", "prompt") if key in body}
    prompt = (await post(port, "/v1/tokenize", counted)).json["count"]
    assert whole["prompt_tokens"] == prompt, "once, however many answers there are to it"
    if "stop" not in ways:
        assert whole["completion_tokens"] == ways.get("max_tokens", 30) * ways.get("n", 1)


@pytest.mark.parametrize("tokens", [1, 10, 40])
@pytest.mark.parametrize("route", BODIES)
async def test_case_19_a_stream_dropped_after_k_tokens(server: Server, route: str, tokens: int) -> None:
    port = server.port
    body = BODIES[route](directive(tokens_per_s=200), model="one")
    counted = {key: body[key] for key in ("messages", "prompt") if key in body}
    prompt = (await post(port, "/v1/tokenize", counted | {"model": "one"})).json["count"]
    before = await metric(port, "tokenflow_streams_ended_total", model="one", reason="disconnected")
    engine_before = await metric(port, "tokenflow_engine_generated_tokens_total", model="one")
    async with connect(port) as wire:
        head = await wire.open(route, body)
        await wire.until(tokens)
        wire.close()
    [record] = await eventually(lambda: ledger(server, head["x-request-id"] or ""))
    assert (record["reason"], record["by"], record["phase"]) == ("disconnected", "client", "decode")
    assert (record["route"], record["model"], record["stream"]) == (route, "one", True)
    assert record["prompt_tokens"] == prompt
    # The client has read k; more may have been on their way to it, at 200 a second.
    assert tokens <= record["delivered_tokens"] <= record["generated_tokens"] <= tokens + WINDOW
    assert record["after_leaving_tokens"] <= 2
    assert record["release_s"] <= 0.25
    engine_after = await metric(port, "tokenflow_engine_generated_tokens_total", model="one")
    assert engine_after - engine_before == record["generated_tokens"], "the engine says the same"
    assert await metric(port, "tokenflow_streams_ended_total", model="one", reason="disconnected") == before + 1
