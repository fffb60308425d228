"""Cases 23, 25 and 26: what clients send that is wrong, and what is only unusual.

Each wrong body goes to every route that takes one, on one connection, which must stay usable: after each refusal the
same connection serves a good request.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest

from tests.e2e.conftest import Server
from tests.e2e.talk import say, talk
from tests.e2e.wire import BODIES, CHAT, COMPLETIONS, Answer, ask, chat, completion, connect, post, stream

TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: chat("hello", max_tokens=2),
    COMPLETIONS: completion("hello", max_tokens=2),
    TOKENIZE: {"prompt": "hello"},
    DETOKENIZE: {"tokens": [104, 105]},
}

NOT_JSON: list[bytes] = [
    b"",
    b" ",
    b"{",
    b"nonsense",
    b"null",
    b"true",
    b"0",
    b'"text"',
    b"[]",
    b"[{}]",
    b"{}{}",
    b"{'prompt': 'single quotes'}",
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a",}',
    b'\xef\xbb\xbf{"prompt": "a"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\x00"}',
    '{"prompt": "hello"}'.encode("utf-16"),
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt": ' + b"9" * 100_000 + b"}",
    b"--boundary\r\nContent-Disposition: form-data; name=prompt\r\n\r\nhello\r\n--boundary--",
    b"prompt=hello&max_tokens=5",
    b"\x00" * 1000,
    b"{}",
    b'{"unknown": 1}',
]
"""Wrong on every route."""

WRONG_PROMPTS: list[Any] = [
    1,
    1.5,
    True,
    {},
    {"text": "a"},
    [1, "a"],
    ["a", 1],
    [[1], "a"],
    [-1],
    [2**40],
    [{}],
    ["\ud800"],
]
WRONG_MESSAGES: list[Any] = [
    1,
    "hello",
    {},
    [1],
    ["hello"],
    [[]],
    [None],
    [{}],
    [{"role": "user"}],
    [{"content": "hello"}],
    [{"role": "nobody", "content": "hello"}],
    [{"role": 1, "content": "hello"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    [{"role": "user", "content": {"type": "text", "text": "a"}}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "assistant", "content": "a", "tool_calls": [1]}],
]
WRONG_FIELDS: list[tuple[str, Any]] = [
    ("model", 1),
    ("model", ["m"]),
    ("stream", "true"),
    ("stream", 1),
    ("n", 0),
    ("n", 1.5),
    ("n", 10**6),
    ("n", "2"),
    ("temperature", -1),
    ("temperature", 10.1),
    ("temperature", "hot"),
    ("temperature", 10**400),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("seed", "a"),
    ("seed", 2**64),
    ("frequency_penalty", 3),
    ("presence_penalty", -3),
    ("repetition_penalty", 0),
    ("stop", 1),
    ("stop", [1]),
    ("stop", {"a": "b"}),
    ("stop", ["x"] * 1000),
    ("stop", "x" * 100_000),
    ("logit_bias", "1"),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": "a"}),
    ("logit_bias", {"1": 101}),
    ("stream_options", 1),
    ("stream_options", {"include_usage": True}),  # without stream
    ("timeouts", 1),
    ("timeouts", {"idle_timeout_s": -1}),
    ("timeouts", {"idle_timeout_s": 10**9}),
    ("timeouts", {"unknown_s": 1}),
    ("coalesce_ms", -1),
    ("coalesce_ms", 10**9),
    ("ignore_eos", "yes"),
    ("response_format", "json"),
    ("response_format", {"type": "json_object"}),  # not with this engine
    ("grammar", "start: /a/"),
    ("echo", True),
    ("suffix", "a"),
    ("best_of", 5),
    ("stop_token_ids", [1]),
    ("allowed_token_ids", [1]),
    ("bad_words", ["a"]),
    ("min_tokens", 2),
    ("use_beam_search", True),
    ("include_stop_str_in_output", True),
    ("truncate_prompt_tokens", 2),
    ("prompt_logprobs", 0),
    ("top_n_sigma", 2),
    ("samplers", ["temperature", "top_p"]),
]
"""Fields that both routes that generate know."""
WRONG_CHAT_FIELDS: list[tuple[str, Any]] = [
    ("logprobs", 5),
    ("top_logprobs", 3),
    ("tools", 1),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", 1),
    ("continue_final_message", True),
    ("add_generation_prompt", "no"),
    ("modalities", ["audio"]),
    ("audio", {"voice": "ash", "format": "mp3"}),
    ("documents", [{"text": "a"}]),
]
WRONG_COMPLETION_FIELDS: list[tuple[str, Any]] = [
    ("logprobs", True),
    ("logprobs", -1),
    ("logprobs", 1000),
]
WRONG: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"messages": value} for value in WRONG_MESSAGES]
    + [GOOD[CHAT] | {name: value} for name, value in WRONG_FIELDS + WRONG_CHAT_FIELDS],
    COMPLETIONS: [{"prompt": value} for value in WRONG_PROMPTS]
    + [GOOD[COMPLETIONS] | {name: value} for name, value in WRONG_FIELDS + WRONG_COMPLETION_FIELDS],
    TOKENIZE: [{"prompt": value} for value in (1, [], {}, ["a"], "\ud800")]
    + [{"messages": value} for value in WRONG_MESSAGES]
    + [
        {"prompt": "a", "messages": GOOD[CHAT]["messages"]},
        {"prompt": "a", "model": 1},
        {"prompt": "a", "add_special": 1},
    ],
    DETOKENIZE: [
        {"tokens": value} for value in (1, "a", {}, ["a"], [1.5], [True], [-1], [2**31], [2**70], [300_000], [[1]])
    ]
    + [{"tokens": [1], "model": 1}],
}


def assert_refused(answer: Answer) -> None:
    assert answer.status == 400, answer
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("route", GOOD)
async def test_case_23_wrong_bodies_get_the_one_envelope_and_the_next_is_served(port: int, route: str) -> None:
    wrong = NOT_JSON + [json.dumps(body).encode() for body in WRONG[route]]
    assert len(wrong) >= 30
    async with connect(port) as wire:
        for body in wrong:
            refused = await wire.ask("POST", route, body)
            assert refused.status == 400, (body[:200], refused)
            assert refused.error["type"] == "invalid_request_error"
            good = await wire.ask("POST", route, GOOD[route])
            assert good.status == 200, (body[:200], good)


@pytest.mark.parametrize("route", BODIES)
async def test_case_23_a_wrong_field_is_named(port: int, route: str) -> None:
    for name, value in WRONG_FIELDS:
        refused = await post(port, route, GOOD[route] | {name: value})
        assert (refused.error["param"] or "").startswith(name), refused


@pytest.mark.parametrize("route", BODIES)
async def test_case_23_refused_before_the_first_byte_also_when_streaming(port: int, route: str) -> None:
    for name, value in WRONG_FIELDS:
        if name in ("stream", "stream_options"):
            continue
        assert_refused(await post(port, route, GOOD[route] | {"stream": True, name: value}))


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("streaming", [False, True])
async def test_case_23_token_ids_that_the_model_has_not(port: int, route: str, streaming: bool) -> None:
    """Only the model's size tells that they are wrong, and still it is told before the first byte."""
    wrong: list[tuple[str, Any]] = [("logit_bias", {"600": 1})]
    if route == COMPLETIONS:
        wrong += [("prompt", [515]), ("prompt", [[1], [600]])]
    for name, value in wrong:
        refused = await post(port, route, GOOD[route] | {"stream": streaming, name: value})
        assert_refused(refused)
        assert refused.error["param"] == name


async def test_a_refusal_can_be_quoted_and_is_counted(server: Server) -> None:
    async def refusals() -> float:
        page = (await ask(server.port, "GET", "/metrics")).body.decode()
        found = re.search(r'^tokenflow_refusals_total\{reason="model_not_found"\} (\S+)$', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = await refusals()
    refused = await post(server.port, CHAT, chat("hello", model="another\none"))
    assert refused.status == 404
    id = refused.head["x-request-id"] or ""
    [line] = [line for line in server.log.splitlines() if id in line]
    assert f"POST {CHAT} - from 127.0.0.1: 404 model_not_found (model): The model 'another" in line
    assert await refusals() == before + 1


async def test_case_23_frames_that_are_no_json_objects(port: int) -> None:
    async with talk(port) as socket:
        for body in NOT_JSON:
            with suppress(UnicodeDecodeError):  # a text frame cannot carry the rest at all
                refused = await socket.refused(body.decode())
                assert refused["type"] == "invalid_request_error", body[:200]
        assert (await socket.refused(b'{"prompt": "binary"}'))["type"] == "invalid_request_error"
        assert (await socket.say(GOOD[COMPLETIONS])).reason == "length"


@pytest.mark.parametrize("route", BODIES)
async def test_case_23_over_websocket_each_error_is_the_same(port: int, route: str) -> None:
    async with connect(port) as wire, talk(port) as socket:
        for body in WRONG[route]:
            if "stream" not in body and "stream_options" not in body:  # there is nothing but streams
                expected = (await wire.ask("POST", route, body | {"stream": True})).error
                assert await socket.refused(action="generate", **body) == expected
        assert (await socket.say(GOOD[route])).reason == "length"


EMPTY: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [""]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {}, "prompt"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("route", "body", "param"), EMPTY)
@pytest.mark.parametrize("streaming", [False, True])
async def test_case_25_nothing_to_go_on_from(
    port: int, route: str, body: dict[str, Any], param: str, streaming: bool
) -> None:
    async with connect(port) as wire:
        refused = await wire.ask("POST", route, body | {"stream": streaming})
        assert_refused(refused)
        assert refused.error["param"] == param
        assert (await wire.ask("POST", route, GOOD[route])).status == 200
    if body.keys() & {"prompt", "messages"} and None not in body.values():  # else it could be of either kind
        async with talk(port) as socket:
            assert await socket.refused(**body) == refused.error
            assert (await socket.say(GOOD[route])).reason == "length"


OPTIONAL = """
model n max_tokens max_completion_tokens temperature top_p top_k min_p typical_p xtc_probability xtc_threshold
dry_multiplier dry_base dry_allowed_length dry_range dry_sequence_breakers mirostat mirostat_tau mirostat_eta
banned_strings repetition_penalty repeat_penalty frequency_penalty presence_penalty seed logit_bias stop stream
stream_options logprobs top_logprobs ignore_eos coalesce_ms timeouts user tools tool_choice functions function_call
response_format structured_outputs json_schema grammar guided_json parallel_tool_calls metadata store service_tier
reasoning_effort echo suffix best_of stop_token_ids allowed_token_ids bad_words min_tokens use_beam_search
include_stop_str_in_output truncate_prompt_tokens prompt_logprobs continue_final_message add_generation_prompt
modalities audio n_predict top_n_sigma dynatemp_range min_keep n_indent t_max_predict_ms lora samplers documents
chat_template mirostat_mode parse_special add_special add_special_tokens
"""


def without_what_differs(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("id", "created")}


@pytest.mark.parametrize("route", BODIES)
async def test_case_26_null_is_absent_everywhere(port: int, route: str) -> None:
    bare = BODIES[route]("x" * 4000)  # the engine's own end is far, so the context's counts
    bare_answer = without_what_differs((await post(port, route, bare)).json)
    for name in OPTIONAL.split():
        answer = await post(port, route, bare | {name: None})
        assert without_what_differs(answer.json) == bare_answer, name
    everything = await post(port, route, bare | dict.fromkeys(OPTIONAL.split()))
    assert without_what_differs(everything.json) == bare_answer
    nulls = dict.fromkeys([*OPTIONAL.split(), "id", "credit"])
    assert (await say(port, bare | nulls | {"id": "say"})).text == everything.text


@pytest.mark.parametrize("route", BODIES)
async def test_case_26_null_within_options(port: int, route: str) -> None:
    nulls = {"stream_options": {"include_usage": None}, "timeouts": {"idle_timeout_s": None}}
    plain = await stream(port, route, GOOD[route])
    assert (await stream(port, route, GOOD[route] | nulls)).text == plain.text


async def test_case_26_unknown_fields_are_ignored(port: int) -> None:
    body = GOOD[COMPLETIONS]
    plain = await post(port, COMPLETIONS, body)
    assert (await post(port, COMPLETIONS, body | {"nobody": {"knows": ["this"]}})).text == plain.text
