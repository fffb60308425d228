"""Cases 13 to 18: how a generation ends, on both routes, streaming and not, and over WebSocket.

`Streamed.reason` is what makes each of these a test of the terminal sequence: it fails unless there is exactly one end
(a finish reason or an error), then exactly one `[DONE]`, and nothing after it.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.e2e.talk import say, talk
from tests.e2e.wire import BODIES, CHAT, COMPLETIONS, Streamed, completion, connect, directive, post, stream

HANG = directive(hang_at=1)
SOON = 0.3
ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    "length": ({}, {"max_tokens": 5}, "length", 200),
    "the engine stops": ({"stop_at": 3}, {}, "stop", 200),
    "the engine stops before the first token": ({"stop_at": 0}, {}, "stop", 200),
    "stop string": ({"text": "before STOP after"}, {"stop": ["STOP"]}, "stop", 200),
    "error in the middle": ({"raise_at": 3}, {}, "engine_error", 502),
    "error before the first token": ({"raise_at": 0}, {}, "engine_error", 502),
    "refused by the engine": ({"raise_in_add": True}, {}, "engine_error", 502),
    "the engine breaks": ({"break_at": 3}, {}, "engine_error", 502),
    "prefill_timeout": ({"prefill_ms": 20_000}, {"timeouts": {"prefill_timeout_s": SOON}}, "prefill_timeout", 504),
    "idle_timeout": ({"hang_at": 2}, {"timeouts": {"idle_timeout_s": SOON}}, "idle_timeout", 504),
    "total_timeout": ({"tokens_per_s": 20}, {"timeouts": {"total_timeout_s": SOON}}, "total_timeout", 504),
    "queue_timeout": ({}, {"model": "one", "timeouts": {"queue_timeout_s": SOON}}, "queue_timeout", 503),
}
"""What the engine does, what the request asks, and the end: its reason or code, and its status without `stream`."""


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("route", BODIES)
async def test_case_13_every_end_is_one_end(port: int, route: str, end: str) -> None:
    plan, fields, reason, status = ENDS[end]
    body = BODIES[route](directive(**plan), **fields)
    async with trio.open_nursery() as nursery, connect(port) as wire:
        if end == "queue_timeout":
            await nursery.start(hold_the_slot, port)
        for usage in (None, {"include_usage": True}):
            head = await wire.open(route, body | {"stream_options": usage})
            streamed = Streamed(head, await wire.frames())
            assert streamed.reason == reason
            assert (streamed.usage is not None) == (usage is not None and status == 200)
        assert (await say(port, body)).reason == reason
        # The connection is as good as before: what follows `[DONE]` is the next answer.
        answer = await wire.ask("POST", route, body)
        assert answer.status == status
        if status == 200:
            assert answer.json["choices"][0]["finish_reason"] == reason
        else:
            assert answer.error["code"] == reason
        assert (answer.head["retry-after"] is not None) == (status == 503)
        nursery.cancel_scope.cancel()


async def hold_the_slot(port: int, task_status: trio.TaskStatus[None]) -> None:
    """Hold the slot of model `one` until cancelled."""
    async with connect(port) as hog:
        await hog.open(COMPLETIONS, completion(HANG, model="one"))
        await hog.until(tokens=1)
        task_status.started()
        await trio.sleep_forever()


@pytest.mark.parametrize("fault", [{"raise_at": 0}, {"raise_in_add": True}, {"prefill_ms": 100, "raise_at": 0}])
@pytest.mark.parametrize("route", BODIES)
async def test_case_14_an_error_before_the_first_token_is_no_empty_success(
    port: int, route: str, fault: dict[str, Any]
) -> None:
    streamed = await stream(port, route, BODIES[route](directive(**fault)))
    assert streamed.reason == "engine_error"
    assert streamed.text == ""
    assert "planned fault" in streamed.chunks[-1]["error"]["message"]
    said = await say(port, BODIES[route](directive(**fault)))
    assert (said.reason, said.text, said.frames[-1]["error"]) == ("engine_error", "", streamed.chunks[-1]["error"])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("route", BODIES)
async def test_case_15_a_prompt_longer_than_the_context(port: int, route: str, streaming: bool) -> None:
    body = BODIES[route]("x" * 5000, max_tokens=77, stream=streaming)
    counted = {key: body[key] for key in ("messages", "prompt") if key in body}
    count = (await post(port, "/v1/tokenize", counted)).json["count"]
    answer = await post(port, route, body)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["param"] == ("messages" if route == CHAT else "prompt")
    for number in ("4096", str(count), "77"):
        assert number in answer.error["message"]
    async with talk(port) as socket:
        assert await socket.refused(**body) == answer.error


async def test_case_15_the_last_prompt_that_fits(port: int) -> None:
    answer = await post(port, COMPLETIONS, completion("x" * 4095))
    assert answer.json["usage"]["completion_tokens"] == 1
    assert (await post(port, COMPLETIONS, completion("x" * 4096))).error["code"] == "context_length_exceeded"


LENGTHS: list[tuple[Any, int | None]] = [
    (..., 50),
    (None, 50),
    (0, None),
    (-1, 50),
    (10**9, 50),
    (10**30, 50),
    ("5", None),
    (1.5, None),
    (True, None),
    ([5], None),
    (5, 5),
    (5.0, 5),
]
"""`max_tokens` (...: absent), and how much comes where 50 tokens are left; None: it is a 400."""


@pytest.mark.parametrize(("asked", "made"), LENGTHS)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("route", BODIES)
async def test_case_16_every_max_tokens_is_defined(
    port: int, route: str, name: str, asked: Any, made: int | None
) -> None:
    room = 4096 - 50
    overhead = 0
    if route == CHAT:
        overhead = (await post(port, "/v1/tokenize", {"messages": BODIES[CHAT]("x")["messages"]})).json["count"] - 1
    body = BODIES[route]("x" * (room - overhead)) | ({} if asked is ... else {name: asked})
    whole = await post(port, route, body)
    if made is None:
        assert (whole.status, whole.error["param"]) == (400, name)
        streamed = await post(port, route, body | {"stream": True})
        assert (streamed.status, streamed.error["param"]) == (400, name)
        async with talk(port) as socket:
            assert await socket.refused(**body) == whole.error
        return
    assert whole.json["usage"]["prompt_tokens"] == room, "the prompt is never shortened"
    assert whole.json["usage"]["completion_tokens"] == made
    streamed = await stream(port, route, body | {"stream_options": {"include_usage": True}})
    assert (streamed.text, streamed.reason, streamed.usage) == (whole.text, "length", whole.json["usage"])
    said = await say(port, body)
    assert (said.text, said.reason, said.usage) == (whole.text, "length", whole.json["usage"])


async def every_way(port: int, route: str, body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason, the same with and without streaming, and over WebSocket."""
    whole = await post(port, route, body)
    streamed = await stream(port, route, body)
    assert (streamed.text, streamed.reason) == (whole.text, whole.json["choices"][0]["finish_reason"])
    said = await say(port, body)
    assert (said.text, said.reason) == (streamed.text, streamed.reason)
    return streamed.text, streamed.reason


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("route", BODIES)
async def test_case_17_a_stop_string_and_a_near_miss(port: int, route: str, size: int) -> None:
    stop = "uvwxyz"[:size]  # a byte is a token, so it lies over so many
    near = stop[:-1] + "Q"
    for said, expected in [
        (f"see {stop} and more", ("see ", "stop")),
        (f"see {near} and more", (f"see {near} and more", "stop")),
        (f"see {stop[:-1]}", (f"see {stop[:-1]}", "stop")),  # the text ends within a near miss
        (f"see {near}{stop} and more", (f"see {near}", "stop")),
        (stop, ("", "stop")),
    ]:
        plan = directive(text=said, one_byte=True)
        assert await every_way(port, route, BODIES[route](plan, stop=stop)) == expected
    # The limit falls within what is held: it was no stop string, so it is text.
    plan = directive(text=f"see {stop} and more", one_byte=True)
    held = await every_way(port, route, BODIES[route](plan, stop=stop, max_tokens=4 + size - 1))
    assert held == (f"see {stop[:-1]}", "length")


@pytest.mark.parametrize("route", BODIES)
async def test_case_17_words_as_tokens_and_several_stops(port: int, route: str) -> None:
    said = " amber stone river moon owl leaf sand"
    plan = directive(text=said)
    assert await every_way(port, route, BODIES[route](plan, stop=["er mo", "leaf"])) == (" amber stone riv", "stop")
    assert await every_way(port, route, BODIES[route](plan, stop=["er mop", "sandy"])) == (said, "stop")


MANY_BYTES = "né 🌍👩‍🚀 漢字かな ü"


@pytest.mark.parametrize("route", BODIES)
async def test_case_18_a_limit_inside_a_character(port: int, route: str) -> None:
    data = MANY_BYTES.encode()
    plan = directive(text=MANY_BYTES, one_byte=True)
    for limit in range(1, len(data) + 1):
        text, _ = await every_way(port, route, BODIES[route](plan, max_tokens=limit))
        whole = data[:limit].decode(errors="ignore")
        assert text in (whole, whole + "\N{REPLACEMENT CHARACTER}")
    assert text == MANY_BYTES
