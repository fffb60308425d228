"""Case 24, and what goes with it: what browsers ask on behalf of pages, with keys and without."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

from tests.e2e.conftest import Server, serving
from tests.e2e.wire import (
    BODIES,
    CHAT,
    COMPLETIONS,
    Answer,
    Head,
    Streamed,
    ask,
    chat,
    completion,
    connect,
    directive,
    metric,
)

APP, STRANGER = "https://app.example.org", "https://evil.example.org"
KEY = {"Authorization": "Bearer right"}
WITH_KEYS = f"""
[http]
cors_origins = ["{APP}", "http://localhost:3000"]

[[auth.keys]]
name = "app"
sha256 = "{sha256(b"right").hexdigest()}"

[models.m]
engine = "synthetic"
directives = true
"""
MODEL = """
[models.m]
engine = "synthetic"
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with a key, that lets a page of `APP` read."""
    with serving(tmp_path_factory.mktemp("guarded"), WITH_KEYS) as server:
        yield server.port


def assert_readable(head: Head, origin: str = APP) -> None:
    assert head["access-control-allow-origin"] == origin
    assert head["access-control-allow-credentials"] is None
    assert head["access-control-expose-headers"] == "X-Request-Id, Retry-After"
    assert head["vary"] == "Origin"


def assert_not_readable(head: Head) -> None:
    assert not [name for name, _ in head.headers if name.startswith("access-control-")]
    assert head["vary"] == "Origin", "a cache must not give this answer to the page that may read"


# --- with keys: CORS --------------------------------------------------------------------------------------------------

ROUTES = [CHAT, COMPLETIONS, "/v1/models", "/v1/streams/tf-00", "/generate", "/stream", "/health/live"]


@pytest.mark.parametrize("route", ROUTES)
async def test_case_24_a_preflight_needs_no_key(guarded: int, route: str) -> None:
    asked = {
        "Origin": APP,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    answer = await ask(guarded, "OPTIONS", route, headers=asked)
    assert (answer.status, answer.body) == (204, b"")
    assert_readable(answer.head)
    assert answer.head["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert set((answer.head["access-control-allow-methods"] or "").split(", ")) >= {"OPTIONS"}
    assert answer.head["access-control-allow-methods"] == answer.head["allow"]
    assert int(answer.head["access-control-max-age"] or 0) > 0


async def test_case_24_options_without_a_key_or_an_origin(guarded: int) -> None:
    answer = await ask(guarded, "OPTIONS", CHAT)
    assert (answer.status, set((answer.head["allow"] or "").split(", "))) == (204, {"POST", "OPTIONS"})
    assert_not_readable(answer.head)
    answer = await ask(guarded, "OPTIONS", "/v1/streams/some")
    assert {"GET", "DELETE"} < set((answer.head["allow"] or "").split(", ")), "a page may cancel"
    assert (await ask(guarded, "OPTIONS", "/nowhere")).error["code"] == "not_found"


async def refusals(port: int) -> list[Answer]:
    """One of each kind that the page must be able to tell apart."""
    page = {"Origin": APP}
    return [
        await ask(port, "POST", CHAT, chat("hello"), page | {"Authorization": "Bearer wrong"}),
        await ask(port, "POST", CHAT, chat("hello"), page),
        await ask(port, "POST", CHAT, chat("hello", n=0), page | KEY),
        await ask(port, "POST", CHAT, chat("hello", model="nothing"), page | KEY),
        await ask(port, "PUT", CHAT, chat("hello"), page | KEY),
        await ask(port, "POST", CHAT, chat(directive(raise_at=0)), page | KEY),
    ]


async def test_case_24_a_page_can_read_why_it_was_refused(guarded: int) -> None:
    answers = await refusals(guarded)
    assert [answer.status for answer in answers] == [401, 401, 400, 404, 405, 502]
    for answer in answers:
        assert answer.error
        assert_readable(answer.head)


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("origin", [APP, "http://localhost:3000"])
async def test_case_24_a_page_can_read_streams_and_answers(guarded: int, route: str, origin: str) -> None:
    body, page = BODIES[route]("hello", max_tokens=3), KEY | {"Origin": origin}
    answer = await ask(guarded, "POST", route, body, page)
    assert answer.status == 200
    assert_readable(answer.head, origin)
    async with connect(guarded) as wire:
        await wire.send("POST", route, body | {"stream": True}, page)
        head = await wire.head()
        assert Streamed(head, await wire.frames()).text == answer.text
    assert_readable(head, origin)


NEAR_MISSES = [STRANGER, "null", "http://app.example.org", APP + ":444", APP + ".evil.org", "https://example.org", "*"]


@pytest.mark.parametrize("origin", NEAR_MISSES)
async def test_case_24_another_page_cannot(guarded: int, origin: str) -> None:
    for method in ("POST", "OPTIONS"):
        headers = KEY | {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = await ask(guarded, method, CHAT, chat("hello", max_tokens=1), headers)
        assert answer.status == (200 if method == "POST" else 204), "with its key it is served: it cannot read it"
        assert_not_readable(answer.head)


async def test_with_keys_any_name_will_do(guarded: int) -> None:
    assert (await ask(guarded, "GET", "/v1/models", headers=KEY | {"Host": "models.example.org"})).status == 200


# --- without: only this machine ---------------------------------------------------------------------------------------

OURS = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "127.8.8.8", "[::1]", "[::1]:8000"]
NOT_OURS = [
    "rebound.example.org",
    "rebound.example.org:8000",
    "localhost.example.org",
    "10.0.0.1",
    "0.0.0.0",
]
NAMES_OF_NOBODY = ["::1", "[::1]evil.example.org", "127.0.0.1@evil.example.org", "localhost:80:80", "a..b", "a" * 64]


@pytest.mark.parametrize("host", OURS)
async def test_a_name_of_this_machine(port: int, host: str) -> None:
    for headers in ({}, {"Origin": f"http://{host.lower()}"}, {"Sec-Fetch-Site": "same-site"}):
        assert (await ask(port, "GET", "/v1/models", headers={"Host": host} | headers)).status == 200


@pytest.mark.parametrize("host", NOT_OURS)
async def test_a_name_that_was_made_to_point_here(server: Server, host: str) -> None:
    """The page's own name resolves to this machine now, so `Host`, `Origin` and the browser's word all agree."""
    made = await metric(server.port, "tokenflow_engine_generated_tokens_total")
    rebound = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    for method, target, body in [
        ("GET", "/v1/models", None),
        ("GET", "/stream?prompt=hello", None),
        ("POST", CHAT, chat("hello")),
        ("GET", "/v1/streams", None),
        ("GET", "/metrics", None),
        ("OPTIONS", CHAT, None),
    ]:
        answer = await ask(server.port, method, target, body, rebound)
        assert (answer.status, answer.error["code"]) == (421, "host_not_allowed"), target
    assert await metric(server.port, "tokenflow_engine_generated_tokens_total") == made


@pytest.mark.parametrize("host", NAMES_OF_NOBODY)
async def test_what_is_no_name_is_not_looked_at(server: Server, guarded: int, host: str) -> None:
    """Another reader of it may find another host in it; and werkzeug's raises."""
    for port, key in ((server.port, {}), (guarded, KEY)):
        for target in ("/v1/models", "/health/live"):
            answer = await ask(port, "GET", target, headers={"Host": host} | key)
            assert (answer.status, answer.error["type"]) == (421, "invalid_request_error")
    assert "Error in ASGI" not in server.log


FOREIGN: list[dict[str, str]] = [
    {"Origin": STRANGER},
    {"Origin": "null"},
    {"Origin": "http://localhost.example.org"},
    {"Origin": "nonsense"},
    {"Origin": "http://[::1"},
    {"Origin": "http://[::1]evil.example.org"},
    {"Origin": "http://localhost@evil.example.org"},
    {"Origin": "http://localhost/evil"},
    {"Origin": "//localhost"},
    {"Sec-Fetch-Site": "cross-site"},
]


@pytest.mark.parametrize("page", FOREIGN)
async def test_a_page_from_elsewhere(server: Server, page: dict[str, str]) -> None:
    """It could not read the answer, but what it asked for would have been generated."""
    made = await metric(server.port, "tokenflow_engine_generated_tokens_total")
    for method, target, body in [
        ("GET", "/stream?prompt=hello", None),
        ("POST", CHAT, chat("hello")),
        ("POST", COMPLETIONS, completion("hello", stream=True)),
    ]:
        answer = await ask(server.port, method, target, body, page)
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        assert not [name for name, _ in answer.head.headers if name.startswith("access-control-")]
    assert await metric(server.port, "tokenflow_engine_generated_tokens_total") == made


async def test_probes_may_call_it_what_they_like(port: int) -> None:
    for probe in ("/health", "/health/live", "/health/ready"):
        assert (await ask(port, "GET", probe, headers={"Host": "10.1.2.3:8000", "Origin": STRANGER})).status == 200


async def test_http_1_0_without_a_name(port: int) -> None:
    async with connect(port) as wire:
        await wire.stream.send_all(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await wire.closed()).startswith(b"HTTP/1.1 200")


async def test_names_and_pages_that_are_configured(tmp_path_factory: pytest.TempPathFactory) -> None:
    allowed = f'[http]\nhosts = ["Models.example.org"]\ncors_origins = ["{APP}"]\n'
    with serving(tmp_path_factory.mktemp("allowed"), allowed + MODEL) as server:

        async def status(**headers: Any) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await ask(server.port, "POST", CHAT, chat("hello", max_tokens=1), named)).status

        assert await status(Host="models.example.org:443", Origin="https://models.example.org") == 200
        assert await status(Host="models.example.org", Origin=STRANGER) == 403
        assert await status(Host="other.example.org", Origin=APP) == 421
        answer = await ask(server.port, "GET", "/v1/models", headers={"Origin": APP, "Sec-Fetch-Site": "cross-site"})
        assert answer.status == 200
        assert_readable(answer.head)


async def test_any_page_where_that_is_configured(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("any"), '[http]\ncors_origins = ["*"]\n' + MODEL) as server:
        for origin in (STRANGER, "null"):
            answer = await ask(server.port, "GET", "/v1/models", headers={"Origin": origin})
            assert answer.status == 200
            assert_readable(answer.head, origin)
