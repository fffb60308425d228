"""The wire contract, sentence by sentence, as far as no case (tests/cases) has it already.

One server with the synthetic engine for all but the last tests, which end theirs. Bodies that must be large or slow are
made so by configuration: 64 kB are too many, half a second is too slow.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate

from tests.e2e.conftest import Serve, Server, serving
from tests.e2e.wire import (
    BODIES,
    CHAT,
    COMPLETIONS,
    Answer,
    Journal,
    Streamed,
    ask,
    chat,
    checked_error,
    completion,
    connect,
    directive,
    eventually,
    metric,
    post,
    stream,
)

MODEL = """
[models.m]
engine = "synthetic"
directives = true
slots = 4
"""
LOUD = "\u0001" * 20_000
"""Said in one step; JSON makes six bytes of each character."""
CONFIG = (
    """
[server]
max_body_bytes = 65536
body_timeout_s = 0.5
drain_s = 1

[stream]
heartbeat_s = 0.2
"""
    + MODEL
    + f"""
[models.loud]
engine = "synthetic"
context_length = 65536
tokens_per_step = 65536
text = {json.dumps(LOUD)}
"""
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("wire"), CONFIG) as server:
        yield server


@pytest.fixture
def port(server: Server) -> int:
    return server.port


# --- headers and ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", BODIES)
async def test_the_headers_of_a_stream_are_exactly_these(port: int, route: str) -> None:
    async with connect(port) as wire:
        head = await wire.open(route, BODIES[route]("hello", max_tokens=3))
        await wire.body()
    found = dict(head.headers)
    assert len(found) == len(head.headers), "none comes twice"
    assert found.pop("x-request-id").startswith("tf-")
    assert found.pop("date")
    assert found == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache, no-transform",
        "x-accel-buffering": "no",
        "transfer-encoding": "chunked",
    }


async def test_no_encoding_even_for_a_client_that_takes_some(port: int) -> None:
    for streaming in (False, True):
        body = completion("hello", max_tokens=3, stream=streaming)
        answer = await ask(port, "POST", COMPLETIONS, body, {"Accept-Encoding": "gzip, br, zstd, deflate"})
        assert answer.head["content-encoding"] is None
        assert (answer.head["content-length"] is None) == streaming


@pytest.mark.parametrize("route", BODIES)
async def test_one_id_in_every_chunk_and_the_header(port: int, route: str) -> None:
    streamed = await stream(port, route, BODIES[route]("hello", max_tokens=3, stream_options={"include_usage": True}))
    assert {chunk["id"] for chunk in streamed.chunks} == {streamed.head["x-request-id"]}
    whole = await post(port, route, BODIES[route]("hello", max_tokens=3))
    assert whole.json["id"] == whole.head["x-request-id"]


async def test_an_id_has_the_replicas_name_and_128_random_bits(port: int) -> None:
    async with connect(port) as wire:
        ids = [(await wire.ask("POST", COMPLETIONS, completion("a", max_tokens=1))).json["id"] for _ in range(200)]
    numbers = [int(re.fullmatch(r"tf-([0-9a-f]{32})", id)[1], 16) for id in ids]  # type: ignore[index]  # fails the test
    assert len(set(numbers)) == 200
    # Every bit is drawn: that one of 128 stays the same in 200 draws has a chance of 2**-192.
    assert not [bit for bit in range(128) if len({number >> bit & 1 for number in numbers}) < 2]


@pytest.mark.parametrize("route", BODIES)
async def test_headers_within_200_ms_though_the_first_token_is_far(port: int, route: str) -> None:
    async with connect(port) as wire:
        began = trio.current_time()
        head = await wire.open(route, BODIES[route](directive(prefill_ms=20_000)))
        assert head.at - began < 0.2
        wire.close()


# --- frames ---------------------------------------------------------------------------------------------------------


async def test_the_frames_of_a_chat(port: int) -> None:
    body = chat("hello", max_tokens=3, stream_options={"include_usage": True})
    streamed = await stream(port, CHAT, body)
    first, *deltas, finish, usage = streamed.chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(deltas) == 3
    assert all(set(delta["choices"][0]["delta"]) == {"content"} for delta in deltas)
    assert [chunk["choices"][0]["finish_reason"] for chunk in (first, *deltas)] == [None] * 4
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "length")
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3
    assert streamed.frames[-1].is_done
    assert {chunk["object"] for chunk in streamed.chunks} == {"chat.completion.chunk"}
    assert all("usage" in chunk and chunk["usage"] is None for chunk in streamed.chunks[:-1])


async def test_each_choice_ends_once(port: int) -> None:
    streamed = await stream(port, CHAT, chat("hello", max_tokens=4, n=3))
    ends = [c for chunk in streamed.chunks for c in chunk["choices"] if c["finish_reason"]]
    assert [choice["index"] for choice in ends] == [0, 1, 2]
    assert [choice["delta"] for choice in ends] == [{}, {}, {}]
    assert sum(frame.is_done for frame in streamed.frames) == 1 and streamed.frames[-1].is_done


@pytest.mark.parametrize("route", BODIES)
async def test_bytes_of_a_stream_with_a_silence_in_it(port: int, route: str) -> None:
    """No `id:`, no `event:`, no `retry:`: data lines, and pings with a blank line of their own."""
    async with connect(port) as wire:
        await wire.open(route, BODIES[route](directive(prefill_ms=500), max_tokens=3))
        body = await wire.body()
    assert re.fullmatch(rb"(data: \{[^\r\n]*\}\n\n|: ping\n\n)*data: \[DONE\]\n\n", body), body
    assert body.count(b": ping\n\n") == 2


async def test_no_line_is_longer_than_64_kb(port: int) -> None:
    streamed = await stream(port, COMPLETIONS, completion("say it", model="loud"))
    assert streamed.text == LOUD and len(streamed.frames) < 10
    assert max(len(frame.raw) for frame in streamed.frames) <= 64 * 1024


# --- refusals -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str, int, str]] = {
    "no such route": ("GET", "/nowhere", 404, "not_found"),
    "no such route, POST": ("POST", "/v1/nowhere", 404, "not_found"),
    "the root, POST": ("POST", "/", 405, "method_not_allowed"),
    "no such model": ("GET", "/v1/models/nothing", 404, "model_not_found"),
    "a model with slashes": ("GET", "/v1/models/a/b/c", 404, "model_not_found"),
    "GET where POST is": ("GET", CHAT, 405, "method_not_allowed"),
    "POST where GET is": ("POST", "/v1/models", 405, "method_not_allowed"),
    "PUT": ("PUT", COMPLETIONS, 405, "method_not_allowed"),
    "DELETE of everything": ("DELETE", "/v1/models", 405, "method_not_allowed"),
    "a method of one's own": ("BREW", COMPLETIONS, 405, "method_not_allowed"),
    "no handshake": ("GET", "/v1/ws", 400, "upgrade_required"),
    "metrics without a sink": ("GET", "/metrics", 404, "not_found"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_http_itself_refuses_has_the_envelope(port: int, what: str) -> None:
    method, target, status, code = REFUSED[what]
    answer = await ask(port, method, target)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.error["type"] == "invalid_request_error"
    assert (answer.head["allow"] is not None) == (status == 405)


async def test_it_is_a_line_in_the_log_and_a_count(serve: Serve) -> None:
    """An operator whose clients are set up wrongly sees it."""
    with serve(MODEL + "[sinks.prometheus]") as server:
        for method, target, reason in [("GET", "/v1/nowhere", "not_found"), ("DELETE", CHAT, "method_not_allowed")]:
            answer = await ask(server.port, method, target)
            assert await metric(server.port, "tokenflow_refusals_total", reason=reason) == 1
            line = f"{answer.head['x-request-id']} {method} {target} - from 127.0.0.1: {answer.status} {reason}"
            assert await eventually(lambda line=line: line in server.log)


async def test_an_error_in_one_body_has_its_streams_id(server: Server) -> None:
    answer = await post(server.port, COMPLETIONS, completion(directive(raise_at=2)))
    assert answer.status == 502
    assert (await Journal(server.folder).ended(answer.head["x-request-id"] or ""))["how"] == "engine_error"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/v1/embeddings", "embeddings are not offered"),
        ("/api/tags", "with a base URL that ends in /v1"),
        ("/chat/completions", "the base URL must end in /v1"),
        ("/v1/v1/chat/completions", "must not begin with it again"),
    ],
)
async def test_a_client_that_is_set_up_for_another_api_is_told_so(port: int, target: str, words: str) -> None:
    assert words in (await post(port, target, {})).error["message"]


NO_ROUTE = "There is no route '/v1/nowhere'; those of the API begin with /v1/ and end without a slash."


@pytest.mark.parametrize(
    ("target", "status", "code", "words"),
    [
        ("/v1/nowhere", 404, "not_found", NO_ROUTE),
        ("/v1/models", 400, "bad_request", "This route is no WebSocket; ask for it without an upgrade."),
        (COMPLETIONS, 405, "method_not_allowed", "This route does not take that method; `Allow` says which it takes."),
    ],
)
async def test_a_websocket_where_there_is_none(port: int, target: str, status: int, code: str, words: str) -> None:
    """Its connection ends after the answer, and the answer says so (RFC 9112 section 9.6)."""
    asked = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    async with connect(port) as wire:
        answer = await wire.ask("GET", target, headers=asked | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
        assert (answer.status, answer.error["code"], answer.error["message"]) == (status, code, words)
        assert answer.head["connection"] == "close"
        assert await wire.closed() == b""


async def test_a_refusal_is_one_line_in_the_log(server: Server) -> None:
    """A path may hold line ends and terminal codes; the log's lines stay ours."""
    for path in ("%0d%0aforged", "forged%1b%5b2J%e2%80%a8forged%9b"):
        assert (await ask(server.port, "GET", f"/v1/models/{path}")).status == 404
    lines = await eventually(lambda: [line for line in server.log.split("\n") if "forged" in line])
    for line in lines:
        assert re.search(r" info tokenflow\.http: \S+ GET /v1/models/", line) and line.isprintable()


async def test_an_unknown_model_is_404_before_the_stream(port: int) -> None:
    for route in BODIES:
        answer = await post(port, route, BODIES[route]("hello", model="nothing", stream=True))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_413_for_a_body_that_is_too_large(port: int, framing: str) -> None:
    body = json.dumps(completion("x" * 70_000)).encode()
    if framing == "length":
        answer = await post(port, COMPLETIONS, body)
        assert_error(answer, 413)
        assert "65536 bytes that this server takes (server.max_body_bytes)" in answer.error["message"]
        return
    async with connect(port) as wire:
        await wire.stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"%x\r\n%b\r\n" % (len(body), body)
        )
        await assert_raw_error(wire, 413)


async def test_a_body_that_just_fits(port: int) -> None:
    empty = len(json.dumps(completion("")))
    answer = await post(port, COMPLETIONS, completion("x" * (65536 - empty)))
    assert answer.error["code"] == "context_length_exceeded"


async def test_408_for_a_body_that_stops_arriving(port: int) -> None:
    async with connect(port) as wire:
        await wire.stream.send_all(
            b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"prompt":'
        )
        began = trio.current_time()
        await assert_raw_error(wire, 408)
        assert trio.current_time() - began < 1.0


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "nonsense"])
async def test_415_for_a_body_in_a_coding_that_is_not_read(port: int, coding: str) -> None:
    async with connect(port) as wire:
        refused = await wire.ask("POST", COMPLETIONS, b"\x1f\x8b" * 100, {"Content-Encoding": coding})
        assert_error(refused, 415)
        assert (await wire.ask("POST", COMPLETIONS, completion("hello", max_tokens=1))).status == 200


async def test_a_body_that_says_it_is_plain_is_read(port: int) -> None:
    body = completion("hello", max_tokens=2)
    for headers in ({"Content-Encoding": "identity"}, {"Content-Type": "text/plain"}, {"Content-Type": "nonsense"}):
        assert (await ask(port, "POST", COMPLETIONS, body, headers)).text == generate("hello", 2)


HEAD = b"POST /v1/completions HTTP/1.1\r\n"
WRONG_HEADS: dict[str, tuple[bytes, int]] = {
    "headers too long": (HEAD + b"Host: a\r\nX-Long: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    "a slash in the host": (HEAD + b"Host: a/b\r\nContent-Length: 0\r\n\r\n", 421),
    "a question mark in the host": (HEAD + b"Host: a?b\r\nContent-Length: 0\r\n\r\n", 421),
    "an @ in the host": (HEAD + b"Host: a@b\r\nContent-Length: 0\r\n\r\n", 421),
    "no host": (HEAD + b"Content-Length: 0\r\n\r\n", 400),
    "two framings": (HEAD + b"Host: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a negative length": (HEAD + b"Host: a\r\nContent-Length: -3\r\n\r\n", 400),
    "a target that is no path": (b"GET ?a=1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "no HTTP": (b"hello there\r\n\r\n", 400),
}


@pytest.mark.parametrize("what", WRONG_HEADS)
async def test_what_the_transport_refuses_has_the_envelope(port: int, what: str) -> None:
    data, status = WRONG_HEADS[what]
    async with connect(port) as wire:
        await wire.stream.send_all(data)
        await assert_raw_error(wire, status)


def assert_error(answer: Answer, status: int) -> None:
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"


async def assert_raw_error(wire: Any, status: int) -> None:
    """The answer to something that h11 would not have sent; then the server closes."""
    answer = await wire.closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status), answer
    assert b"content-type: application/json" in head.lower()
    assert checked_error(json.loads(body))["type"] == "invalid_request_error"


FAILURES = {
    "engine": (directive(raise_at=2), {}, 502, "engine_error"),
    "prefill": (directive(prefill_ms=9999), {"prefill_timeout_s": 0.2}, 504, "prefill_timeout"),
    "idle": (directive(hang_at=1), {"idle_timeout_s": 0.2}, 504, "idle_timeout"),
    "total": (directive(tokens_per_s=20), {"total_timeout_s": 0.2}, 504, "total_timeout"),
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("route", BODIES)
async def test_without_stream_a_failure_has_a_status(port: int, route: str, what: str) -> None:
    prompt, timeouts, status, code = FAILURES[what]
    answer = await post(port, route, BODIES[route](prompt, timeouts=timeouts))
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.head["retry-after"] is None


# --- connections ----------------------------------------------------------------------------------------------------


async def test_one_connection_serves_many_requests(port: int) -> None:
    async with connect(port) as wire:
        for i in range(3):
            prompt = f"request {i}"
            answer = await wire.ask("POST", COMPLETIONS, completion(prompt, max_tokens=4))
            assert answer.text == generate(prompt, 4)
            head = await wire.open(COMPLETIONS, completion(prompt, max_tokens=4))
            assert Streamed(head, await wire.frames()).text == generate(prompt, 4)
            assert (await wire.ask("GET", "/nowhere")).status == 404


async def test_a_body_in_pieces_that_waits_to_be_asked_for(port: int) -> None:
    """`Expect: 100-continue`, which curl sends with large bodies, and chunks."""
    data = json.dumps(completion("hello", max_tokens=2)).encode()
    async with connect(port) as wire:
        await wire.stream.send_all(
            b"POST http://localhost/v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        )
        with trio.fail_after(2):
            assert (await wire.stream.receive_some()).startswith(b"HTTP/1.1 100")
        for byte in data:
            await wire.stream.send_all(b"1\r\n%c\r\n" % byte)
        await wire.stream.send_all(b"0\r\n\r\n")
        answer = await wire.closed()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == generate("hello", 2)


async def test_a_body_that_is_too_long_is_not_asked_for(port: int) -> None:
    """RFC 9110 section 10.1.1: whoever waits to be told to go on may be told the end of it instead."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    for length, status in ((65_536, b"100"), (65_537, b"413")):
        async with connect(port) as wire:
            await wire.stream.send_all(head % length)
            with trio.fail_after(2):
                assert (await wire.stream.receive_some()).startswith(b"HTTP/1.1 " + status)


async def test_requests_sent_ahead_are_answered_in_order(port: int) -> None:
    async with connect(port) as wire:
        for i in range(3):
            data = json.dumps(completion(f"request {i}", max_tokens=5, stream=True)).encode()
            close = b"Connection: close\r\n" if i == 2 else b""
            await wire.stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n" % (close, len(data))
                + data
            )
        answers = (await wire.closed()).decode()
    said = re.findall(r'"text":"( ?[^"]*)"', answers)
    assert "".join(said) == "".join(generate(f"request {i}", 5) for i in range(3))
    assert answers.count("data: [DONE]") == answers.count("HTTP/1.1 200") == 3


@pytest.mark.parametrize("streaming", [False, True])
async def test_connection_close_is_honoured(port: int, streaming: bool) -> None:
    async with connect(port) as wire:
        body = completion("hello", max_tokens=3, stream=streaming)
        answer = await wire.ask("POST", COMPLETIONS, body, {"Connection": "close"})
        assert answer.status == 200 and answer.head["connection"] == "close"
        assert await wire.closed(within_s=1.0) == b""


async def test_http_1_0_gets_its_stream_ended_by_the_close(port: int) -> None:
    async with connect(port) as wire:
        body = json.dumps(completion("hello", max_tokens=3, stream=True)).encode()
        await wire.stream.send_all(
            b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        head, _, events = (await wire.closed()).partition(b"\r\n\r\n")
    assert b" 200" in head.splitlines()[0] and b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


async def test_head_is_get_without_the_body(port: int) -> None:
    for target in ("/v1/models", "/health/ready", "/nowhere"):
        full = await ask(port, "GET", target)
        async with connect(port) as wire:
            await wire.stream.send_all(
                b"HEAD %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % target.encode()
            )
            answer = await wire.closed()
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert rest == b""
        assert head.startswith(b"HTTP/1.1 %d" % full.status)
        assert b"content-length: %d" % len(full.body) in head


async def test_options_tells_the_methods_and_starts_nothing(port: int) -> None:
    answer = await ask(port, "OPTIONS", CHAT)
    assert 200 <= answer.status < 300 and answer.body == b""
    assert set((answer.head["allow"] or "").split(", ")) == {"POST", "OPTIONS"}


# --- keys -----------------------------------------------------------------------------------------------------------


async def test_keys(serve: Serve) -> None:
    words = "schlüssel".encode()
    keys = "".join(
        f'[[auth.keys]]\nname = "{name}"\nsha256 = "{sha256(key).hexdigest()}"\n'
        for name, key in (("me", b"sk-right"), ("you", words))
    )
    with serve(keys + MODEL) as server:
        port = server.port
        for method, target in [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere")]:
            assert_unauthorized(await ask(port, method, target), "missing_api_key")
            for wrong in ("Bearer sk-wrong", "Bearer sk-right2", "Bearer \xff\xfe"):
                assert_unauthorized(await asked_with(port, method, target, wrong), "invalid_api_key")
            for none in ("Bearer", "Basic c2stcmlnaHQ=", "sk-right", ""):
                assert_unauthorized(await asked_with(port, method, target, none), "missing_api_key")
        unnamed = await asked_with(port, "GET", "/v1/models", "sk-right")
        assert unnamed.error["message"].startswith("The Authorization header has no `Bearer` before a key")
        for probe in ("/health", "/health/live", "/health/ready"):
            assert (await ask(port, "GET", probe)).json == {"status": "ok"}
        for right in ("Bearer sk-right", "bearer sk-right", "Bearer " + words.decode("latin-1")):
            assert (await asked_with(port, "GET", "/v1/models", right)).status == 200
        # Refused before anything of the body is looked at.
        assert_unauthorized(await post(port, CHAT, b"nonsense"), "missing_api_key")
        assert "sk-wrong" not in server.log


async def asked_with(port: int, method: str, target: str, authorization: str) -> Answer:
    return await ask(port, method, target, None, {"Authorization": authorization})


def assert_unauthorized(answer: Answer, code: str) -> None:
    assert (answer.status, answer.error["code"], answer.error["type"]) == (401, code, "authentication_error")


# --- starting and ending --------------------------------------------------------------------------------------------


def test_a_busy_port_is_one_line_and_exit_code_1(server: Server) -> None:
    command = [sys.executable, "-m", "tokenflow", "serve", "-c", "tokenflow.toml", "--port", str(server.port)]
    done = subprocess.run(command, cwd=server.folder, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert str(server.port) in line and "in use" in line


def test_the_port_is_free_again_at_once(serve: Serve) -> None:
    with serve(MODEL) as server:
        with socket.create_connection(("127.0.0.1", server.port)):
            assert server.stop() == 0
        socket.create_server(("127.0.0.1", server.port)).close()
