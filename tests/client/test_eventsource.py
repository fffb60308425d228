"""The client as browsers' own tests have an `EventSource` (web-platform-tests, eventsource/): what it asks for, which
answers it reads and which it refuses, when it comes back and with what, and what may stand in the stream.

Where it means to differ, the test says so: it knows this protocol's end, asks again after 503, and wants each record.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
import trio
from trio.testing import MockClock

from tests.client.fake import EVENTS, HELLO, ID, Cut, Server
from tokenflow.client import BadAnswer, CutOff, ServerError

FIRST = len(Server(["a", "b"]).transcript()) - len(Server(["a", "b"]).transcript(after=1))
"""Bytes up to the end of the first record."""


@pytest.fixture
def clock(autojump_clock: MockClock) -> Iterator[MockClock]:
    yield autojump_clock


async def read(server: Server) -> str:
    async with server.client() as client, client.chat(HELLO) as stream:
        return await stream.text()


def answers(server: Server, headers: dict[str, str], status: int = 200) -> httpx2.Response:
    """The whole stream with other headers."""
    response = server.events()
    response.status_code = status
    response.headers = httpx2.Headers({"X-Request-Id": ID} | headers)
    return response


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_what_it_asks_for(clock) -> None:
    server = Server(["a", "b"], [Cut(FIRST)])
    await read(server)
    for request in server.requests:
        assert request.headers["accept"] == "text/event-stream"
        assert request.headers["cache-control"] == "no-store"
        assert request.headers["accept-encoding"] == "identity"
    assert [request.headers.get("last-event-id") for request in server.requests] == [None, f"{ID}:1"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_it_comes_back_through_redirects(status: int, clock) -> None:
    moved = httpx2.Response(status, headers={"Location": f"http://other:2/v1/streams/{ID}"})
    server = Server(["a", "b"], [Cut(FIRST)], instead=[None, moved])
    async with server.client(key="secret") as client, client.chat(HELLO) as stream:
        assert await stream.text() == "ab"
    last = server.requests[-1]
    assert (last.method, last.url.host, last.headers["last-event-id"]) == ("GET", "other", f"{ID}:1")
    assert "authorization" not in last.headers, "a key is for the server that it was given for"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_what_makes_a_stream_is_sent_nowhere_else(status: int, clock) -> None:
    server = Server(
        ["a"], instead=[httpx2.Response(status, headers={"Location": "https://server/v1/chat/completions"})]
    )
    with pytest.raises(BadAnswer, match="redirects to https://server/v1/chat/completions; use that URL"):
        await read(server)
    assert len(server.requests) == 1


async def test_redirects_in_a_circle(clock) -> None:
    around = httpx2.Response(302, headers={"Location": f"/v1/streams/{ID}"})
    server = Server(["a", "b"], [Cut(FIRST)], instead=[None, *[around] * 100])
    with pytest.raises(BadAnswer, match="circle"):
        await read(server)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "text/event-stream",
        "text/event-stream;",
        "text/event-stream; charset=utf-8",
        "text/event-stream;charset=windows-1251",
        "text/event-stream;nonsense",
        "Text/Event-Stream ; a=b",
    ],
)
async def test_types_that_are_event_streams_in_utf_8(kind: str, clock) -> None:
    server = Server(["ok…"])
    server.instead = [lambda: answers(server, {"Content-Type": kind})]
    assert await read(server) == "ok…"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/x-bogus"},
        {"Content-Type": "text/html"},
        {"Content-Type": "text/event-streams"},
        {"Content-Type": "text/event-stream, text/html"},
        {"Content-Type": "application/json; text/event-stream"},
        EVENTS | {"Content-Encoding": "gzip"},
    ],
)
async def test_types_that_are_not(headers: dict[str, str], clock) -> None:
    server = Server(["a"])
    server.instead = [lambda: answers(server, headers)]
    with pytest.raises(BadAnswer, match="no event stream"):
        await read(server)
    assert len(server.requests) == 1, "and it does not come back"


@pytest.mark.parametrize("status", [201, 205, 206, 210, 299, 304, 400, 401, 404, 410, 418, 500, 501])
async def test_a_status_that_is_not_200_is_no_stream_whatever_it_carries(status: int, clock) -> None:
    server = Server(["a"])
    server.instead = [lambda: answers(server, EVENTS, status)]
    with pytest.raises(ServerError) as caught:
        await read(server)
    assert caught.value.status == status and len(server.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_but_it_asks_again_after_those_that_pass(status: int, clock) -> None:
    server = Server(["a"], instead=[httpx2.Response(status)])
    assert await read(server) == "a"


async def test_204_is_the_end(clock) -> None:
    server = Server(["a", "b"], [Cut(FIRST)], instead=[None, httpx2.Response(204)])
    assert await read(server) == "a"
    assert len(server.requests) == 2


# --- coming back ------------------------------------------------------------------------------------------------------


async def test_it_comes_back_when_an_answer_ends_and_each_time_with_the_last_id(clock) -> None:
    server = Server(["a", "b", "c"], [Cut(FIRST), Cut(0), Cut(FIRST)])
    assert await read(server) == "abc"
    assert [line.rpartition(":")[2] for line in server.log[1:]] == ["1", "1", "2"]


async def test_an_id_counts_once_its_record_is_whole(clock) -> None:
    whole = Server(["a", "b"]).transcript()
    within = whole.index(f"id: {ID}:2\n".encode()) + len(f"id: {ID}:2\n")
    server = Server(["a", "b"], [Cut(within), Cut(0)])
    assert await read(server) == "ab"
    assert [line.rpartition(":")[2] for line in server.log[1:]] == ["1", "1"]


RETRY = {
    b"retry: 3000\n": 3.0,
    b"retry:03000\n": 3.0,
    b"retry: 3000\nretry: 1000x\nretry\nretry:\n": 3.0,
    b"retry: 1\n\nretry: 3000\n\n": 3.0,
}


@pytest.mark.parametrize("lines", RETRY)
async def test_it_waits_for_as_long_as_the_server_said_also_the_times_after(lines: bytes, clock) -> None:
    server = Server(["a", "b", "c"], [Cut(FIRST), Cut(FIRST)])
    told = server.events()
    told.stream.data = lines + told.stream.data
    server.instead = [told]
    assert await read(server) == "abc"
    waits = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    assert waits == [RETRY[lines]] * 2


async def test_a_time_beyond_its_patience_is_no_time_to_come_back(clock) -> None:
    server = Server(["a", "b"], [Cut(FIRST)])
    told = server.events()
    told.stream.data = b"retry: 99999999999999999999\n" + told.stream.data
    server.instead = [told]
    with pytest.raises(CutOff):
        await read(server)
    assert trio.current_time() == 0


# --- streams ----------------------------------------------------------------------------------------------------------


WRITTEN = {
    "CR LF": lambda stream: stream.replace(b"\n", b"\r\n"),
    "CR": lambda stream: stream.replace(b"\n", b"\r"),
    "a BOM": lambda stream: b"\xef\xbb\xbf" + stream,
    "no space": lambda stream: stream.replace(b"data: ", b"data:").replace(b"id: ", b"id:"),
    "comments": lambda stream: stream.replace(b"data: ", b": no\r:\ndata: "),
    "unknown fields": lambda stream: stream.replace(b"data: ", b"Data: no\nfoo\ndata : no\nbar: no\ndata: "),
    "blank lines": lambda stream: stream.replace(b"\n\n", b"\n\n\n\n: ping\n\n"),
    "ids with nulls": lambda stream: stream.replace(b"\n\n", b"\nid: x\0y\n\n"),
    "fields in another order": lambda stream: stream.replace(b"\n\n", b"\nevent: message\n\n"),
}


@pytest.mark.parametrize("cut", [None, FIRST])
@pytest.mark.parametrize("how", WRITTEN)
async def test_a_stream_written_in_other_ways(how: str, cut: int | None, clock) -> None:
    server = Server(["a", "b…"], [] if cut is None else [Cut(cut)])
    as_usual = server.events

    def events(after: int = 0) -> httpx2.Response:
        response = as_usual(after)
        response.stream.data = WRITTEN[how](response.stream.data)
        return response

    server.events = events
    assert await read(server) == "ab…"
