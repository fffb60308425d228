"""Each proxy of `conf/proxies/` in front of two replicas, as it is there: nothing may be lost on the way through.

Each test names what it is about in the proxy's configuration; most fail without that one line.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate

from tests.cutproxy import Cut, cutting
from tests.e2e.proxies import KINDS, Replicas, fronted, replicas
from tests.e2e.talk import talk
from tests.e2e.wire import PATIENCE_S, Frame, Journal, Wire, ask, completion, connect, directive, eventually, post
from tokenflow.core.sse import Event, Parser

INTERVAL_S = 1 / 50
"""Between two tokens of the replicas' engine."""
SSE = {"Accept": "text/event-stream"}
PATIENT = {
    "nginx": {"proxy_read_timeout 620s": "proxy_read_timeout 1s"},
    "haproxy": {"timeout server 620s": "timeout server 1s", "timeout client 620s": "timeout client 1s"},
    "caddy": {"read_timeout 620s": "read_timeout 1s"},
    "envoy": {"stream_idle_timeout: 620s": "stream_idle_timeout: 1s"},
}
"""Timeouts of the proxy that a silent stream would not outlive."""
EAGER = {"proxy_buffering off;": "proxy_buffering on;", "gzip off;": "gzip on; gzip_types text/event-stream;"}
"""What nginx does by default, and worse."""
UNCHECKED = {"caddy": {"health_uri /health/ready": ""}}
"""Of the one that sends nothing to a replica that has failed a single check."""
LOST = {"caddy": 1}
"""POSTs that fail where a replica has just gone: Caddy before 2.11.2 cannot send a body on to the other."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(tmp_path_factory.mktemp("replicas")) as servers:
        yield servers


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def port(kind: str, servers: Replicas, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The proxy's."""
    with fronted(kind, tmp_path_factory.mktemp("proxy") / kind, servers.ports) as port:
        yield port


def streaming(prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    return completion(prompt, stream=True) | fields


def resumable(**fields: Any) -> dict[str, Any]:
    return streaming(stream_options={"on_disconnect": "pause"}, **fields)


async def opened(wire: Wire, body: dict[str, Any]) -> str:
    """The stream's id."""
    head = await wire.open("/v1/completions", body)
    id = head["x-request-id"]
    assert id is not None
    return id


def events(frames: list[Frame]) -> list[Event]:
    return Parser().feed(b"".join(frame.raw + b"\n\n" for frame in frames))


def text_of(read: list[Event]) -> str:
    found = [json.loads(event.data) for event in read if event.data != "[DONE]"]
    return "".join(item.get("token") or (item.get("choices") or [{}])[0].get("text") or "" for item in found)


async def made_on(server: Any, tokens: int = 40) -> tuple[str, list[Event]]:
    """A stream that its client left after five tokens, asking that it wait; past the proxy, so that it is certain whose
    it is."""
    async with connect(server.port) as wire:
        id = await opened(wire, resumable(max_tokens=tokens))
        return id, events([await anext(wire) for _ in range(5)])


# --- evenness ---------------------------------------------------------------------------------------------------------


def even(times: list[float]) -> None:
    """One token at a time: neither held nor gathered. Gathered ones would have no gap at all in the median."""
    gaps = [after - before for before, after in pairwise(times)]
    figures = median(gaps), quantiles(gaps, n=10)[-1]
    print(f"gaps of {len(gaps)}: median {figures[0] * 1000:.1f} ms, p90 {figures[1] * 1000:.1f} ms")
    assert INTERVAL_S / 2 < figures[0] < 2 * INTERVAL_S, figures
    assert figures[1] < 2 * INTERVAL_S, figures


async def test_tokens_pass_as_they_come(port: int) -> None:
    async with connect(port) as wire:
        await opened(wire, streaming(max_tokens=100))
        frames = await wire.frames()
    assert text_of(events(frames)) == generate("hello", 100)
    even([frame.at for frame in frames if frame.text])


async def test_case_10_tokens_pass_through_nginx_that_buffers_and_zips(servers: Replicas, tmp_path: Path) -> None:
    with fronted("nginx", tmp_path / "eager", servers.ports, EAGER) as port:
        async with connect(port) as wire:
            await wire.send("POST", "/v1/completions", streaming(max_tokens=100), {"Accept-Encoding": "gzip"})
            head = await wire.head()
            unzip, body, times = zlib.decompressobj(wbits=31), b"", []
            while (piece := await wire.piece()) is not None:
                plain = unzip.decompress(piece)
                body += plain
                times += [trio.current_time()] * plain.count(b'"text":" ')
    assert head["content-encoding"] == "gzip", "or this shows nothing"
    assert text_of(Parser().feed(body)) == generate("hello", 100)
    even(times)


async def test_heartbeats_pass_and_keep_a_silent_stream_alive(kind: str, servers: Replicas, tmp_path: Path) -> None:
    with fronted(kind, tmp_path / kind, servers.ports, PATIENT[kind]) as port:
        async with connect(port) as wire:
            prompt = directive(hang_at=1)
            await opened(wire, streaming(prompt, timeouts={"idle_timeout_s": 2.5}))
            frames = await wire.frames()
    assert sum(frame.is_ping for frame in frames) >= 10
    assert frames[-2].json["error"]["code"] == "idle_timeout", "the replica ends it, not the proxy"


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [False, True], ids=["decoding", "silent"])
async def test_a_client_that_leaves_is_missed_at_once(port: int, servers: Replicas, silent: bool) -> None:
    async with connect(port) as wire:
        id = await opened(wire, streaming(directive(hang_at=1) if silent else "hello", max_tokens=4000))
        await wire.until(1)
        wire.close()
        await missed(servers, id)


async def test_also_one_that_waits_for_a_whole_answer(port: int, servers: Replicas) -> None:
    prompt = directive(hang_at=9)
    async with connect(port) as wire:
        await wire.send("POST", "/v1/completions", completion(prompt, max_tokens=4000))
        id = await live(servers, prompt)
        wire.close()
        await missed(servers, id)


async def live(servers: Replicas, prompt: str) -> str:
    """The id of the stream of that prompt, by its length, as soon as there is one that has not ended."""
    with trio.fail_after(PATIENCE_S):
        while True:
            for port in servers.ports:
                for state in (await ask(port, "GET", "/v1/streams")).json["data"]:
                    if state["state"] != "done" and state["usage"]["prompt_tokens"] == len(prompt):
                        return state["id"]


async def missed(servers: Replicas, id: str) -> None:
    """The client has left this moment; the stream's replica must hear of it."""
    left = trio.current_time()
    ended = await Journal(servers[id[0]].folder).ended(id)
    took = trio.current_time() - left
    print(f"missed after {took * 1000:.0f} ms: {ended}")
    assert took < 0.25 and ended["by"] == "client", (took, ended)


# --- coming back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_stream_is_read_on_by_its_id_at_its_own_replica(port: int, servers: Replicas, name: str) -> None:
    id, read = await made_on(servers[name])
    assert id.startswith(f"{name}-")
    async with connect(port) as wire:
        await wire.send("GET", f"/v1/streams/{id}", headers=SSE | {"Last-Event-ID": read[-1].id or ""})
        assert (await wire.head())["x-request-id"] == id
        read += events(await wire.frames())
    assert text_of(read) == generate("hello", 40)
    for _ in range(3):  # by chance it would be the other's turn
        assert (await ask(port, "GET", f"/v1/streams/{id}?after=41", headers=SSE)).status == 204


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_browser_comes_back_by_its_own_url(port: int, servers: Replicas, name: str) -> None:
    id, read = await made_on(servers[name])
    url = "/stream?prompt=hello&max_tokens=40"
    async with connect(port) as wire:
        await wire.send("GET", url, headers={"Last-Event-ID": read[-1].id or ""})
        assert (await wire.head())["x-request-id"] == id
        read += events(await wire.frames())
    assert text_of(read) == generate("hello", 40)
    for _ in range(3):  # by chance it would be the other's turn
        assert (await ask(port, "GET", url, headers={"Last-Event-ID": read[-1].id or ""})).status == 204


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_stream_is_held_and_cancelled_at_its_own_replica(port: int, servers: Replicas, name: str) -> None:
    id, _ = await made_on(servers[name], 4000)
    for action in "pause", "resume":
        assert (await ask(port, "POST", f"/v1/streams/{id}/{action}")).json["id"] == id
    assert (await ask(port, "DELETE", f"/v1/streams/{id}")).status == 204
    assert (await Journal(servers[name].folder).ended(id))["by"] == "client"


async def test_the_same_idempotency_key_finds_the_same_stream(port: int) -> None:
    for key in "one", "two", "three", "four":
        answers = [await _keyed(port, key) for _ in range(2)]
        assert answers[0].body == answers[1].body, "made once"


async def _keyed(port: int, key: str) -> Any:
    return await ask(port, "POST", "/v1/completions", completion("hello", max_tokens=1), {"Idempotency-Key": key})


# --- WebSocket --------------------------------------------------------------------------------------------------------


async def test_a_websocket_passes(port: int) -> None:
    async with talk(port) as socket:
        for _ in range(2):
            said = await socket.say({"prompt": "hello", "max_tokens": 20})
            assert (said.text, said.reason) == (generate("hello", 20), "length")


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_websocket_that_says_a_stream_in_its_url_finds_it(port: int, servers: Replicas, name: str) -> None:
    id, read = await made_on(servers[name])
    for _ in range(4):  # by chance it would be the other's turn
        async with talk(port, f"/v1/ws?stream={id}") as socket:
            await socket.send(action="attach", id="x", stream=id, after=5)
            said = (await socket.until_end("x"))["x"]
            assert (text_of(read) + said.text, said.reason) == (generate("hello", 40), "length")


async def test_a_websockets_end_is_its_generations_disconnect(port: int, servers: Replicas) -> None:
    async with talk(port) as socket:
        await socket.send(action="generate", id="x", prompt="left", max_tokens=4000)
        id = await live(servers, "left")
    await missed(servers, id)


# --- what is not for everybody ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/metrics", "/_debug/generated"])
async def test_what_each_replica_has_of_its_own_is_not_passed_on(port: int, servers: Replicas, target: str) -> None:
    assert (await ask(servers.a.port, "GET", target)).status == 200
    assert (await ask(port, "GET", target)).status == 404


# --- replicas that fail -----------------------------------------------------------------------------------------------


async def test_a_post_that_was_sent_is_never_sent_again(kind: str, servers: Replicas, tmp_path: Path) -> None:
    reset = [Cut(1, "rst")] * 9
    async with cutting(servers.a.port, reset) as a, cutting(servers.b.port, reset) as b:
        with fronted(kind, tmp_path / kind, (a.port, b.port), UNCHECKED.get(kind)) as port:
            answer = await post(port, "/v1/completions", streaming(max_tokens=5))
        sent = [bytes(connection.up) for connection in a.log + b.log]
    assert answer.status in (502, 503)
    assert sum(up.startswith(b"POST /v1/completions") for up in sent) == 1


async def test_a_replica_that_is_gone_is_passed_over(kind: str, servers: Replicas, tmp_path: Path) -> None:
    """Before any health check has missed it: one has just found it well."""
    with ExitStack() as stack:
        async with cutting(servers.a.port) as a:
            port = stack.enter_context(fronted(kind, tmp_path / kind, (a.port, servers.b.port)))
            found = {""}
            with trio.fail_after(PATIENCE_S):
                while not found >= {"a", "b"}:
                    found.add((await one(port)).json["id"][0])
            if kind != "nginx":
                await eventually(lambda: any(b"GET /health" in c.up and b'"ok"' in c.down for c in a.log))
        await goes_on(kind, port, "b")


async def test_a_replica_that_drains_says_so_and_the_other_goes_on(kind: str, tmp_path: Path) -> None:
    with replicas(tmp_path) as servers, fronted(kind, tmp_path / kind, servers.ports) as port:
        async with connect(port) as wire:
            id = await opened(wire, streaming(max_tokens=4000))
            await wire.until(3)
            servers[id[0]].process.terminate()
            frames = await wire.frames()
        assert frames[-2].json["error"]["code"] == "draining" and frames[-1].is_done
        await trio.to_thread.run_sync(servers[id[0]].process.wait)
        await goes_on(kind, port, "b" if id[0] == "a" else "a")


async def one(port: int) -> Any:
    return await post(port, "/v1/completions", completion("hello", max_tokens=1))


async def goes_on(kind: str, port: int, name: str) -> None:
    """The one replica that is left answers all that comes."""
    answers = [await one(port) for _ in range(8)]
    lost = [answer.status for answer in answers if answer.status != 200]
    assert lost in ([], [502] * LOST.get(kind, 0))
    assert {answer.json["id"][0] for answer in answers if answer.status == 200} == {name}
