"""Coming back, on a real socket: ids, streams by id, named events, the small dialect, and a browser's manners."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate

from tests.e2e.conftest import Server, serving
from tests.e2e.wire import Frame, Wire, ask, chat, completion, connect, directive, eventually, post
from tokenflow.core.sse import Event, Parser

KEYS = {"alice": "a-key", "mallory": "another-key"}
CONFIG = """
[server]
debug = true
drain_s = 1

[replay]
grace_s = 2

[stream]
heartbeat_s = 0.2

[limits]
max_waiting = 1

[models.m]
engine = "synthetic"
directives = true
slots = 4
tokens_per_s = 200

[models.one]
engine = "synthetic"
directives = true
slots = 1
tokens_per_s = 200
""" + "".join(
    f'\n[[auth.keys]]\nname = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n' for name, key in KEYS.items()
)
ALICE = {"Authorization": f"Bearer {KEYS['alice']}"}
MALLORY = {"Authorization": f"Bearer {KEYS['mallory']}"}
SSE = {"Accept": "text/event-stream"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("resume"), CONFIG) as server:
        yield server


@pytest.fixture
def port(server: Server) -> int:
    return server.port


async def opened(wire: Wire, method: str, target: str, body: Any = None, **headers: str) -> str:
    """Send a request that is to stream; the stream's id."""
    await wire.send(method, target, body, ALICE | {k.replace("_", "-"): v for k, v in headers.items()})
    head = await wire.head()
    assert head.status == 200, await wire.body()
    assert head["content-type"] == "text/event-stream; charset=utf-8"
    id = head["x-request-id"]
    assert id is not None
    return id


async def take(wire: Wire, tokens: int) -> list[bytes]:
    """Frames up to the one with so many deltas."""
    frames: list[bytes] = []
    async for frame in wire:
        frames.append(frame.raw)
        if sum(b'"text":"' in raw or b'"token":"' in raw or b'"content":"' in raw for raw in frames) >= tokens:
            break
    return frames


def events(frames: list[bytes]) -> list[Event]:
    """As a browser reads them."""
    return Parser().feed(b"".join(frame + b"\n\n" for frame in frames))


def raws(frames: list[Frame]) -> list[bytes]:
    return [frame.raw for frame in frames]


def tokens_of(read: list[Event]) -> str:
    found = [json.loads(event.data) for event in read if event.data.startswith("{")]
    texts = [item.get("token") or (item.get("choices") or [{}])[0].get("text") for item in found]
    return "".join(text for text in texts if text)


# --- the small dialect ------------------------------------------------------------------------------------------------


async def test_generate_answers_with_text_and_counts(port: int) -> None:
    answer = await ask(port, "POST", "/generate", {"prompt": "hello", "max_tokens": 7}, ALICE)
    assert answer.json == {"text": generate("hello", 7), "usage": {"prompt_tokens": 5, "completion_tokens": 7}}


async def test_a_bare_event_source_gets_an_id_before_anything_else(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "GET", "/stream?prompt=hello&max_tokens=3")
        frames = raws(await wire.frames())
    assert frames[0] == f"id: {id}:0".encode()
    words = generate("hello", 3).split(" ")[1:]
    assert frames[1:4] == [
        f'id: {id}:{n}\ndata: {{"token":" {word}"}}'.encode() for n, word in enumerate(words, start=1)
    ]
    assert frames[4] == f"id: {id}:4\ndata: [DONE]".encode()


async def test_without_a_way_back_there_are_no_ids(port: int) -> None:
    async with connect(port) as wire:
        await opened(wire, "GET", "/stream?prompt=hello&max_tokens=2&on_disconnect=cancel")
        frames = raws(await wire.frames())
    assert [frame.split(b":")[0] for frame in frames] == [b"data"] * 3


async def test_the_chat_stream_says_content(port: int) -> None:
    async with connect(port) as wire:
        await opened(wire, "POST", "/v1/chat/stream", {"prompt": "hello", "max_tokens": 2})
        frames = raws(await wire.frames())
    assert [list(json.loads(frame[6:])) for frame in frames[:2]] == [["content"], ["content"]]
    assert frames[2] == b"data: [DONE]"


async def test_a_prompt_that_is_too_long_is_called_prompt(port: int) -> None:
    for path in ("/v1/chat/stream", "/generate"):
        answer = await ask(port, "POST", path, {"prompt": "x" * 100_000, "model": "m"}, headers=ALICE)
        assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("query", ["", "prompt=", "prompt=a&max_tokens=x", "prompt=a&on_disconnect=never"])
async def test_a_wrong_query_is_a_400(port: int, query: str) -> None:
    answer = await ask(port, "GET", f"/stream?{query}", headers=ALICE)
    assert answer.status == 400 and answer.error["param"]


async def test_what_a_query_says_is_text_and_read_as_what_it_means(port: int) -> None:
    query = "/stream?prompt=hello&model=m&max_tokens=3&temperature=0.5&seed=7&stream=true&ignore_eos=false&nobody=knows"
    async with connect(port) as wire:
        await opened(wire, "GET", query)
        assert tokens_of(events(raws(await wire.frames())[1:])) == generate("hello", 3, seed=7)
    for wrong in ("stream=yes", "max_tokens=1.5", "temperature=hot", "ignore_eos=1", "grace_s=999", "retention_s=nan"):
        answer = await ask(port, "GET", f"/stream?prompt=hello&model=m&{wrong}", headers=ALICE)
        assert (answer.status, answer.error["param"]) == (400, wrong.partition("=")[0])


@pytest.mark.parametrize("plan", [{"prefill_ms": 9999}, {"hang_at": 3}], ids=["before the first token", "after some"])
async def test_a_whole_answer_that_is_cancelled_is_no_empty_success(port: int, plan: dict[str, Any]) -> None:
    said: dict[str, Any] = {}

    async def generate(route: str) -> None:
        said[route] = await ask(port, "POST", route, completion(directive(**plan), model="m"), ALICE)

    async def live() -> list[dict[str, Any]]:
        streams = (await ask(port, "GET", "/v1/streams", headers=ALICE)).json["data"]
        state = "decode" if "hang_at" in plan else "prefill"
        tokens = plan.get("hang_at", 0)
        return [s for s in streams if (s["state"], s["usage"]["completion_tokens"]) == (state, tokens)]

    async with trio.open_nursery() as nursery:
        for route in ("/generate", "/v1/completions"):
            nursery.start_soon(generate, route)
        with trio.fail_after(5):
            while len(found := await live()) < 2:
                await trio.sleep(0.01)
        for stream in found:
            await ask(port, "DELETE", f"/v1/streams/{stream['id']}", headers=ALICE)
    small, openai = said["/generate"], said["/v1/completions"]
    assert (small.status, small.error["code"]) == (409, "cancelled"), "it has no other place to say so"
    assert (openai.status, openai.json["choices"][0]["finish_reason"]) == (200, "cancelled")


async def test_a_browser_that_is_cut_comes_back_by_its_own_url(port: int) -> None:
    url, read = "/stream?prompt=hello&max_tokens=60&model=m", list[Event]()
    last: str | None = None
    for count in (0, 5, 20, 1, 1000):
        async with connect(port) as wire:
            id = await opened(wire, "GET", url, **({"Last_Event_ID": last} if last else {}))
            frames = await take(wire, count) if count < 1000 else raws(await wire.frames())
        got = events(frames)
        read += got
        last = got[-1].id if got else f"{id}:0"
    assert tokens_of(read) == generate("hello", 60)
    assert [event.id for event in read] == [f"{id}:{n}" for n in range(1, 62)]
    counted = (await ask(port, "GET", "/_debug/generated", headers=ALICE)).json
    assert (counted["last_stream"], counted["last"]) == (id, 60), "nothing was generated twice"
    assert last is not None
    done = await ask(port, "GET", url, headers=ALICE | {"Last-Event-ID": last})
    assert (done.status, done.body) == (204, b""), "which stops an EventSource"


async def test_an_unknown_id_is_a_404_and_generates_nothing(port: int) -> None:
    before = (await ask(port, "GET", "/_debug/generated", headers=ALICE)).json["total"]
    answer = await ask(port, "GET", "/stream?prompt=hello", headers=ALICE | {"Last-Event-ID": "tf-00:3"})
    assert (answer.status, answer.error["code"]) == (404, "stream_not_found")
    assert (await ask(port, "GET", "/_debug/generated", headers=ALICE)).json["total"] == before


async def test_a_busy_server_answers_a_browser_so_that_it_tries_again(server: Server, port: int) -> None:
    async with connect(port) as hog, connect(port) as waiting:
        await opened(hog, "GET", "/stream?prompt=hog&model=one&on_disconnect=cancel&max_tokens=4000")
        await opened(waiting, "GET", "/stream?prompt=waits&model=one&on_disconnect=cancel")
        async with connect(port) as wire:
            await wire.send("GET", "/stream?prompt=hello&model=one", headers=ALICE)
            head = await wire.head()
            frames = raws(await wire.frames())
        assert head.status == 200
        assert re.fullmatch(rb'event: error\nretry: 1000\ndata: \{"error":\{.*"code":"queue_full"\}\}', frames[0])
    [line] = [line for line in server.log.splitlines() if str(head["x-request-id"]) in line]
    assert "GET /stream alice from 127.0.0.1: 503 queue_full" in line


# --- streams by id ----------------------------------------------------------------------------------------------------


def resumable(prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    options = {"on_disconnect": "pause", "include_usage": True}
    return completion(prompt, stream=True, model="m", stream_options=options) | fields


async def test_openai_events_carry_ids_and_are_read_on_from_any_of_them(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=40))
        read = events(await take(wire, 10))
    assert [event.id for event in read] == [f"{id}:{n}" for n in range(1, 11)]
    async with connect(port) as wire:
        assert await opened(wire, "GET", f"/v1/streams/{id}", Last_Event_ID=f"{id}:10", **SSE) == id
        read += events(raws(await wire.frames()))
    assert tokens_of(read) == generate("hello", 40)
    # The end is one record of several frames: only its last one carries the id.
    assert [event.data[:6] for event in read[-3:]] == ['{"id":', '{"id":', "[DONE]"]
    assert json.loads(read[-2].data)["usage"]["completion_tokens"] == 40
    assert [event.id for event in read[-3:]] == [f"{id}:40", f"{id}:40", f"{id}:41"]
    answer = await ask(port, "GET", f"/v1/streams/{id}?after=41", headers=ALICE | SSE)
    assert answer.status == 204


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2, "n": 3}, {"coalesce_ms": 20, "logprobs": 1}])
async def test_read_on_from_anywhere_the_rest_is_the_same_bytes(port: int, fields: dict[str, Any]) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=12, **fields))
        whole = await wire.body()
    for n in range(1, whole.count(b"\nid: ")):
        async with connect(port) as wire:
            await opened(wire, "GET", f"/v1/streams/{id}", Last_Event_ID=f"{id}:{n}", **SSE)
            rest = await wire.body()
        assert whole.endswith(b"\n\n" + rest) and rest.startswith((f"id: {id}:{n + 1}\n".encode(), b"data: {"))


async def test_heartbeats_on_a_stream_with_ids_are_one_line(port: int) -> None:
    async with connect(port) as wire:
        prompt = directive(hang_at=2)
        id = await opened(wire, "POST", "/v1/completions", resumable(prompt, timeouts={"idle_timeout_s": 0.7}))
        body = await wire.body()
    assert len(re.findall(rb'\n\n: ping\n: ping\n: ping\ndata: \{"error"', body)) == 1
    assert b'"code":"idle_timeout"' in body and body.endswith(f"id: {id}:3\ndata: [DONE]\n\n".encode())


@pytest.mark.parametrize("dialect", ["named", "small", "openai"])
async def test_it_can_be_read_in_another_dialect(port: int, dialect: str) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=5))
        await wire.frames()
    async with connect(port) as wire:
        await opened(wire, "GET", f"/v1/streams/{id}?dialect={dialect}", **SSE)
        read = events(raws(await wire.frames()))
    if dialect == "named":
        assert [event.event for event in read if event.event != "message"] == ["start", "done"]
    if dialect == "small":
        assert tokens_of(read) == generate("hello", 5)
    assert read[-1].data == "[DONE]"
    assert (await ask(port, "GET", f"/v1/streams/{id}?dialect=morse", headers=ALICE | SSE)).status == 400


async def test_several_choices_have_no_place_in_the_small_dialect(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=2, n=2))
        await wire.frames()
    for target, headers in [
        (f"/v1/streams/{id}?dialect=small", SSE),
        ("/stream?prompt=a", {"Last-Event-ID": f"{id}:1"}),
    ]:
        answer = await ask(port, "GET", target, headers=ALICE | headers)
        assert (answer.status, answer.error["param"]) == (400, "dialect")


async def test_looking_pausing_resuming_and_cancelling_by_id(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=4000))
        await take(wire, 3)
        state = (await ask(port, "POST", f"/v1/streams/{id}/pause", headers=ALICE)).json
        assert (state["state"], state["paused"], state["readers"]) == ("decode", True, 1)
        state = (await ask(port, "POST", f"/v1/streams/{id}/resume", headers=ALICE)).json
        assert state["paused"] is False
        listed = (await ask(port, "GET", "/v1/streams", headers=ALICE)).json["data"]
        assert id in [stream["id"] for stream in listed]
        for _ in range(2):
            assert (await ask(port, "DELETE", f"/v1/streams/{id}", headers=ALICE)).status == 204
        rest = events(raws(await wire.frames()))
    assert [json.loads(e.data)["choices"][0]["finish_reason"] for e in rest[-3:-2]] == ["cancelled"]
    state = (await ask(port, "GET", f"/v1/streams/{id}", headers=ALICE)).json
    assert (state["state"], state["finish_reasons"]) == ("done", ["cancelled"])
    assert state["first_n"] == 1 and state["usage"]["completion_tokens"] >= state["last_n"] - 1


async def test_to_cancel_what_has_ended_is_no_error(port: int) -> None:
    ended = await ask(port, "POST", "/v1/completions", completion("hello", model="m", max_tokens=1), ALICE)
    path = f"/v1/streams/{ended.json['id']}"
    assert (await ask(port, "DELETE", path, headers=ALICE)).status == 204
    assert (await ask(port, "DELETE", path, headers=MALLORY)).status == 404


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("TEXT/EVENT-STREAM", "text/event-stream; charset=utf-8"),
        ("application/json, text/event-stream", "text/event-stream; charset=utf-8"),
        ("text/event-stream; charset=utf-8", "text/event-stream; charset=utf-8"),
        ("text/event-stream;q=0, application/json", "application/json"),
    ],
)
async def test_events_are_for_who_accepts_them(port: int, accept: str, kind: str) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=3))
        await wire.frames()
    assert (await ask(port, "GET", f"/v1/streams/{id}", headers=ALICE | {"Accept": accept})).head[
        "content-type"
    ] == kind


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_somebody_elses_stream_and_none_at_all_are_the_same(port: int, method: str) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=2))
        await wire.frames()
    rest = "/pause" if method == "POST" else ""
    theirs = await ask(port, method, f"/v1/streams/{id}{rest}", headers=MALLORY)
    never = await ask(port, method, f"/v1/streams/{id[:-1]}{rest}", headers=MALLORY)
    assert theirs.status == never.status == 404
    assert theirs.body.replace(id.encode(), b"") == never.body.replace(id[:-1].encode(), b"")
    assert (await ask(port, "GET", "/v1/streams", headers=MALLORY)).json["data"] == []


async def test_where_a_reader_may_not_be(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=2))
        await wire.frames()
    for query, headers, status, param in [
        ("?after=1000", {}, 400, "after"),
        ("?after=-1", {}, 400, "after"),
        ("?after=x", {}, 400, "after"),
        ("?after=1000", {"Last-Event-ID": ""}, 400, "after"),
        ("", {"Last-Event-ID": "nonsense"}, 400, "Last-Event-ID"),
        ("", {"Last-Event-ID": "tf-00:1"}, 404, None),
        ("", {"Last-Event-ID": f"{id}:1000"}, 400, "Last-Event-ID"),
        ("?after=1", {"Last-Event-ID": f"{id}:1000"}, 400, "Last-Event-ID"),
    ]:
        answer = await ask(port, "GET", f"/v1/streams/{id}{query}", headers=ALICE | SSE | headers)
        assert (answer.status, answer.error["param"]) == (status, param), (query, headers)
    answer = await ask(port, "GET", "/stream?prompt=a", headers=ALICE | {"Last-Event-ID": f"{id}:1000"})
    assert (answer.status, answer.error["param"]) == (400, "Last-Event-ID"), "what was sent, by its name"


async def test_after_grace_it_is_gone_and_after_a_cancelled_one_nothing_is_kept(port: int) -> None:
    async with connect(port) as wire:
        body = completion("hello", stream=True, model="m", max_tokens=4000)
        id = await opened(wire, "POST", "/v1/completions", body)
        await take(wire, 3)

    async def status() -> int:
        return (await ask(port, "GET", f"/v1/streams/{id}", headers=ALICE)).status

    while await status() != 404:
        pass


# --- named events -----------------------------------------------------------------------------------------------------


async def test_a_named_stream(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/chat/completions_stream", chat("hello", max_tokens=2, model="m"))
        read = events(raws(await wire.frames()))
    assert [event.event for event in read] == ["start", *["message"] * 4, "done"]
    assert json.loads(read[0].data) | {"created": 0} == {"id": id, "model": "m", "created": 0}
    assert json.loads(read[-2].data)["choices"][0]["finish_reason"] == "length"
    assert read[-1].data == "[DONE]"


@pytest.mark.parametrize(
    ("how", "last"),
    [
        ("error", ("error", "engine_error")),
        ("cancel", ("aborted", "cancelled")),
    ],
)
async def test_a_named_stream_that_ends_otherwise(port: int, how: str, last: tuple[str, str]) -> None:
    async with connect(port) as wire:
        prompt = directive(raise_at=2) if how == "error" else "hello"
        id = await opened(wire, "POST", "/v1/chat/completions_stream", chat(prompt, max_tokens=4000, model="m"))
        if how == "cancel":
            await take(wire, 2)
            await ask(port, "DELETE", f"/v1/streams/{id}", headers=ALICE)
        read = events(raws(await wire.frames()))
    data = json.loads(read[-1].data)
    assert (read[-1].event, data.get("reason") or data["error"]["code"]) == last


async def test_a_named_heartbeat(port: int) -> None:
    async with connect(port) as wire:
        body = chat(directive(hang_at=1), model="m", timeouts={"idle_timeout_s": 0.5})
        await opened(wire, "POST", "/v1/chat/completions_stream", body)
        read = events(raws(await wire.frames()))
    assert [event.data for event in read if event.event == "ping"] == ["{}", "{}"]


# --- idempotency ------------------------------------------------------------------------------------------------------


async def test_the_same_key_and_body_is_the_same_generation(port: int) -> None:
    body, name = completion("hello", model="m", max_tokens=30), {"Idempotency-Key": "once"}
    first = await ask(port, "POST", "/v1/completions", body, ALICE | name)
    second = await ask(port, "POST", "/v1/completions", body, ALICE | name)
    assert first.body == second.body
    other = await ask(port, "POST", "/v1/completions", body | {"max_tokens": 31}, ALICE | name)
    assert (other.status, other.error["code"]) == (422, "idempotency_key_reused")
    somebody = await ask(port, "POST", "/v1/completions", body, MALLORY | name)
    assert somebody.json["id"] != first.json["id"]


async def test_a_client_that_retries_while_the_first_try_runs_joins_it(port: int) -> None:
    body = completion("hello", model="m", max_tokens=100, stream=True)
    async with connect(port) as one, connect(port) as two:
        id = await opened(one, "POST", "/v1/completions", body, Idempotency_Key="join")
        await take(one, 5)
        assert await opened(two, "POST", "/v1/completions", body, Idempotency_Key="join") == id
        one.close()
        text = tokens_of(events(raws(await two.frames())))
    assert text == generate("hello", 100)


async def test_unauthorized_is_unauthorized_here_too(port: int) -> None:
    for method, target in [("GET", "/v1/streams"), ("GET", "/stream?prompt=a"), ("POST", "/generate")]:
        answer = await ask(port, method, target)
        assert (answer.status, answer.error["code"]) == (401, "missing_api_key")


async def test_drained_it_says_aborted_or_draining(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("drained"), CONFIG) as server:
        async with connect(server.port) as named, connect(server.port) as small:
            await opened(named, "POST", "/v1/chat/completions_stream", chat("hello", model="m", max_tokens=8000))
            await opened(small, "GET", "/stream?prompt=hello&max_tokens=8000")
            server.process.terminate()
            aborted = events(raws(await named.frames()))[-1]
            failed = events(raws(await small.frames()))[-1]
        assert (aborted.event, json.loads(aborted.data)) == ("aborted", {"reason": "draining"})
        assert (failed.event, json.loads(failed.data)["error"]["code"]) == ("error", "draining")
        assert await eventually(lambda: server.process.poll() is not None)
        assert server.process.returncode == 0


async def test_a_post_that_asks_for_what_only_streams_have_is_refused(port: int) -> None:
    answer = await post(port, "/v1/completions", completion("a", stream_options={"on_disconnect": "pause"}))
    assert answer.status in (400, 401)


async def test_to_look_is_not_to_generate(port: int) -> None:
    before = (await ask(port, "GET", "/_debug/generated", headers=ALICE)).json["total"]
    head = await ask(port, "HEAD", "/stream?prompt=hello&max_tokens=5", headers=ALICE)
    assert (head.status, head.body) == (200, b"")
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=2))
        await wire.frames()
    assert (await ask(port, "HEAD", f"/v1/streams/{id}", headers=ALICE | SSE)).status == 200
    assert (await ask(port, "GET", "/_debug/generated", headers=ALICE)).json["total"] == before + 2


async def test_no_content_is_none_at_all(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=2))
        await wire.frames()
    for method, target in [("DELETE", f"/v1/streams/{id}"), ("GET", f"/v1/streams/{id}?after=3")]:
        answer = await ask(port, method, target, headers=ALICE | SSE)
        assert answer.status == 204
        assert (answer.head["content-length"], answer.head["content-type"]) == (None, None)


async def test_a_last_event_id_is_enough_to_be_read_on(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=4))
        await wire.frames()
    async with connect(port) as wire:
        await opened(wire, "GET", f"/v1/streams/{id}", Last_Event_ID=f"{id}:3")
        assert next(event.id for event in events(raws(await wire.frames()))) == f"{id}:4"


async def test_a_401_says_how(port: int) -> None:
    answer = await ask(port, "GET", "/v1/streams")
    assert (answer.status, answer.head["www-authenticate"]) == (401, "Bearer")


async def test_how_a_stream_ended_can_be_seen(port: int) -> None:
    async with connect(port) as wire:
        id = await opened(wire, "POST", "/v1/completions", resumable(max_tokens=4000))
        await take(wire, 2)
        await ask(port, "DELETE", f"/v1/streams/{id}", headers=ALICE)
        await wire.frames()
    assert (await ask(port, "GET", f"/v1/streams/{id}", headers=ALICE)).json["reason"] == "cancelled"
