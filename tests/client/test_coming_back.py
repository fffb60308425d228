"""Cut anywhere, however often: the text is exact, each record once, and the end is the server's own."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import httpx2
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.client.fake import HELLO, ID, Cut, Server
from tokenflow.client import BadAnswer, CutOff, ResumeWindowLost, ServerError, Unreachable
from tokenflow.client.patience import LONGEST_S, Patience

TEXTS = ["Zwölf ", "🦆 ", "ducks\n\n", '"swim"', " " + "lo" * 6_000 + "ng", "\u2028", "."]
WHOLE = len(Server(TEXTS).transcript())
BROKEN = httpx2.ReadError("reset by peer")
REFUSED = httpx2.ConnectError("refused")

ways = st.sampled_from([None, BROKEN, httpx2.RemoteProtocolError("incomplete chunked read")])
# The interesting places are the frames; most of the transcript is one long text, in two.
places = st.one_of(st.integers(0, 2_500), st.integers(10_000, WHOLE - 1))
cuts = st.lists(st.builds(Cut, places, ways), max_size=8)


@pytest.fixture
def clock(autojump_clock: MockClock) -> Iterator[MockClock]:
    yield autojump_clock


@given(cuts=cuts, piece=st.sampled_from([7, 100, 4096, 1 << 20]), overlap=st.integers(0, 3))
@settings(max_examples=120)
def test_any_cuts(cuts: list[Cut], piece: int, overlap: int) -> None:
    async def read() -> None:
        server = Server(TEXTS, list(cuts), piece=piece, overlap=overlap)
        ns = []
        async with server.client(patience_s=1000) as client, client.chat(HELLO) as stream:
            async for delta in stream:
                assert "".join(server.texts).startswith(stream.received[0])
                ns.append(delta.n)
            assert stream.received == {0: "".join(TEXTS)}
            assert sorted(set(ns)) == list(range(1, len(TEXTS) + 1)) and ns == sorted(ns)
            assert (stream.finish_reason, stream.usage["completion_tokens"], stream.finished) == ("stop", 7, True)
            assert stream.n == len(TEXTS) + 1
        assert [line.split()[0] for line in server.log] == ["POST"] + ["GET"] * (stream.connections - 1)

    trio.run(read, clock=MockClock(autojump_threshold=0))


async def test_it_asks_for_what_comes_next(clock) -> None:
    first = len(Server(["a", "b"]).transcript()) - len(Server(["a", "b"]).transcript(after=1))
    server = Server(["a", "b"], [Cut(first + 20, BROKEN), Cut(0)])
    async with server.client(key="secret") as client, client.chat(HELLO, model="m", max_tokens=5) as stream:
        assert await stream.text() == "ab"
    assert server.log == ["POST /v1/chat/completions", f"GET /v1/streams/{ID} {ID}:1", f"GET /v1/streams/{ID} {ID}:1"]
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}
    assert {request.headers["accept"] for request in server.requests} == {"text/event-stream"}
    options = {"on_disconnect": "pause", "include_usage": True}
    assert server.json() == {
        "model": "m",
        "messages": HELLO,
        "max_tokens": 5,
        "stream": True,
        "stream_options": options,
    }


async def test_patience_is_per_outage_and_ends(clock) -> None:
    server = Server(["a"] * 4, [Cut(600, BROKEN)], instead=[None] + [REFUSED] * 1000)
    async with server.client(patience_s=15) as client, client.chat(HELLO) as stream:
        with pytest.raises(CutOff, match="cannot be reached: refused") as caught:
            await stream.text()
        assert not stream.finished
    assert caught.value.received == stream.received and set(stream.received[0]) == {"a"}
    attempts = [at for at, request in zip(server.times, server.requests, strict=True) if request.method == "GET"]
    assert 15 - LONGEST_S <= attempts[-1] <= 15
    assert len(attempts) < 40


async def test_a_server_that_takes_connections_and_says_nothing_new(clock) -> None:
    server = Server(["a"], [Cut(0)] * 1000)
    async with server.client() as client, client.chat(HELLO) as stream:
        with pytest.raises(CutOff, match="closed before the end"):
            await stream.text()
    assert server.times[-1] <= 15


async def test_silence_is_a_break(clock) -> None:
    server = Server(["a"], [Cut(300, httpx2.ReadTimeout(""))])
    async with server.client() as client, client.chat(HELLO) as stream:
        assert await stream.text() == "a"
    assert stream.connections == 2
    # The deadlines are the transport's to keep.
    assert [request.extensions["timeout"]["read"] for request in server.requests] == [45.0, 45.0]
    assert [request.extensions["timeout"]["connect"] for request in server.requests] == [10.0, 10.0]


def wait(status: int, after: str | None) -> httpx2.Response:
    return httpx2.Response(status, headers={} if after is None else {"Retry-After": after}, json={"error": ERROR})


ERROR = {"message": "Busy.", "type": "overloaded_error", "param": None, "code": "queue_full"}


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_before_anything_came(status: int, clock) -> None:
    server = Server(["a"], instead=[wait(status, "3"), wait(status, None)])
    async with server.client() as client, client.chat(HELLO) as stream:
        assert await stream.text() == "a"
    assert 3 <= server.times[2] < 3 + LONGEST_S
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1


async def test_retry_after_beyond_the_patience(clock) -> None:
    server = Server(["a"], instead=[wait(503, "60")])
    async with server.client() as client:
        with pytest.raises(ServerError) as caught:
            async with client.chat(HELLO):
                pass
    assert (caught.value.code, caught.value.retry_after_s, trio.current_time()) == ("queue_full", 60, 0)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 502])
async def test_other_refusals_are_final(status: int, clock) -> None:
    server = Server(["a"], instead=[httpx2.Response(status, json={"error": ERROR | {"param": "n", "code": "x"}})])
    async with server.client() as client:
        with pytest.raises(ServerError) as caught:
            async with client.chat(HELLO):
                pass
    error = caught.value
    assert (error.message, error.code, error.status, error.param, error.kind) == (
        "Busy.",
        "x",
        status,
        "n",
        "overloaded_error",
    )
    assert server.log == ["POST /v1/chat/completions"]


async def test_asked_again_with_the_same_key_when_no_answer_came(clock) -> None:
    server = Server(["a"], instead=[httpx2.RemoteProtocolError("no response"), httpx2.WriteError("x")])
    async with server.client() as client, client.completions("hello") as stream:
        assert await stream.text() == "a"
    assert server.log == ["POST /v1/completions"] * 3
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_refusal_that_may_pass_while_coming_back(status: int, clock) -> None:
    server = Server(["a", "b"], [Cut(400, BROKEN)], instead=[None, httpx2.Response(status)])
    async with server.client() as client, client.chat(HELLO) as stream:
        assert await stream.text() == "ab"


GONE = {"code": "resume_window_lost", "message": "Gone.", "oldest": 7, "last": 9, "state": "live"}
FINAL = {
    "410": (httpx2.Response(410, json={"error": GONE}), ResumeWindowLost, "Gone."),
    "410 without words": (httpx2.Response(410), ResumeWindowLost, "the server answered 410"),
    "404": (httpx2.Response(404), CutOff, "does not have the stream any more"),
    "401": (httpx2.Response(401, json={"error": {"message": "No key."}}), ServerError, "No key."),
    "no stream": (httpx2.Response(200, text="hello"), BadAnswer, "no event stream"),
}


@pytest.mark.parametrize(("answer", "kind", "words"), FINAL.values(), ids=FINAL)
async def test_what_ends_coming_back(answer: httpx2.Response, kind: type[Exception], words: str, clock) -> None:
    first = len(Server(["a", "b"]).transcript()) - len(Server(["a", "b"]).transcript(after=1))
    server = Server(["a", "b"], [Cut(first)], instead=[None, answer])
    async with server.client() as client, client.chat(HELLO) as stream:
        with pytest.raises(kind, match=words) as caught:
            await stream.text()
        assert stream.received == {0: "a"}
    if isinstance(caught.value, ResumeWindowLost) and "Gone" in words:
        assert caught.value.details == {"oldest": 7, "last": 9, "state": "live"}


async def test_nobody_there(clock) -> None:
    server = Server([], instead=[REFUSED])
    async with server.client() as client:
        with pytest.raises(Unreachable, match="cannot reach http://server:1: refused"):
            async with client.chat(HELLO):
                pass
    assert trio.current_time() == 0


async def test_without_ids_there_is_no_coming_back(clock) -> None:
    cut = len(Server(["a", "b"], numbered=False).transcript()) - 40
    server = Server(["a", "b"], [Cut(cut, BROKEN)], numbered=False)
    options = {"on_disconnect": "cancel"}
    async with server.client() as client, client.chat(HELLO, stream_options=options) as stream:
        with pytest.raises(CutOff) as caught:
            await stream.text()
    assert caught.value.received == {0: "ab"}
    assert server.log == ["POST /v1/chat/completions"]
    assert server.json()["stream_options"] == {"on_disconnect": "cancel", "include_usage": True}


async def test_another_server_of_the_dialect(clock) -> None:
    """Its request id is not the stream's: what comes is handed on at once, and it is not come back to."""
    server = Server(["a", "b"], [Cut(600)], numbered=False)
    server.instead = [lambda: _renamed(server.events())]
    async with server.client() as client, client.chat(HELLO) as stream:
        assert (await anext(stream)).text == "a"
        with pytest.raises(CutOff):
            await stream.text()
    assert server.log == ["POST /v1/chat/completions"]


def _renamed(response: httpx2.Response) -> httpx2.Response:
    response.headers["X-Request-Id"] = "req_1"
    return response


async def test_a_stream_that_is_there_already(clock) -> None:
    server = Server(["a", "b", "c"], [Cut(50)])
    async with server.client() as client:
        async with client.attach(ID, after=1) as stream:
            assert (await anext(stream)).n == 2
        async with client.attach(ID, after=1) as stream:
            assert await stream.text() == "bc"
        with pytest.raises(ValueError, match="no stream's id"):
            client.attach("../models")
        server.instead = [httpx2.Response(204)]
        async with client.attach(ID, after=4) as stream:
            assert await stream.text() == "" and stream.finished
    assert not [line for line in server.log if line.startswith("DELETE")]


def test_pauses_are_jittered_and_bounded() -> None:
    patience = Patience(15, Random(3))
    bounds = [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    pauses = [patience.next_pause_s(0.0) for _ in bounds]
    assert all(0 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert len(set(pauses)) == len(pauses)
    assert patience.next_pause_s(14.0, 1.0) is not None
    assert patience.next_pause_s(14.0, 1.5) is None
    patience.progress()
    assert patience.next_pause_s(100.0) <= 0.2
    assert all(patience.next_pause_s(100.0) is not None for _ in range(2000))
