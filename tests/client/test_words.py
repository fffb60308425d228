"""What the wire's words become: errors, waiting times, models, URLs. And the held record's bound."""

from __future__ import annotations

import socket
from datetime import UTC, datetime

import httpx2
import pytest

from tests.client.fake import Server
from tokenflow.client import BadAnswer, Client, ServerError, Unreachable
from tokenflow.client.errors import from_envelope, refusal
from tokenflow.client.records import HELD_CHARS, Records
from tokenflow.client.words import retry_after_s
from tokenflow.core.sse import Event

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("9" * 50, 999_999_999.0),
        ("Thu, 01 Jan 2026 00:00:07 GMT", 7.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 2026 00:00:07", None),
        ("soon", None),
        ("-1", None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, lambda: NOW) == seconds


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        (b'{"error":{"message":"No.","code":"x"}}', "No.", "x"),
        (b'{"error":{"message":"No.","code":7}}', "No.", "http_400"),
        (b'{"error":"nope"}', "nope", "http_400"),
        (b'{"error":{"x":1}}', "the server reports an error", "http_400"),
        (b"<html>", "the server answered 400; is it tokenflow?", "http_400"),
        (b"[]", "the server answered 400; is it tokenflow?", "http_400"),
    ],
)
def test_refusals(content: bytes, message: str, code: str) -> None:
    error = refusal(400, content)
    assert (error.message, error.code, error.status) == (message, code, 400)


def test_an_error_in_a_stream_without_a_code() -> None:
    assert from_envelope({"message": "No."}).code == "server_error"


async def test_models() -> None:
    listing = httpx2.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]})
    no = httpx2.Response(401, json={"error": {"message": "No key."}})
    server = Server([], instead=[listing, no, httpx2.Response(200, text="x"), httpx2.ReadTimeout("x")])
    async with server.client() as client:
        assert await client.models() == ["a", "b"]
        with pytest.raises(ServerError, match="No key"):
            await client.models()
        with pytest.raises(BadAnswer, match="lists no models"):
            await client.models()
        with pytest.raises(Unreachable, match="did not answer in time"):
            await client.models()


def connect_error(cause: BaseException) -> Exception:
    error = httpx2.ConnectError("outer")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (ConnectionRefusedError(111, "Error connecting to ('x', 1): Connection refused"), "Connection refused"),
        (OSError("all failed"), "outer"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ExceptionGroup("all", [ConnectionRefusedError(111, "x")]), "Connection refused"),
    ],
)
async def test_the_cause_in_the_systems_words(cause: BaseException, words: str) -> None:
    async with Server([], instead=[connect_error(cause)]).client() as client:
        with pytest.raises(Unreachable, match=f"^cannot reach http://server:1: {words}$"):
            await client.models()


@pytest.mark.parametrize("url", ["server", "ftp://server", "http://a:b"])
async def test_no_url(url: str) -> None:
    with pytest.raises(Unreachable, match="is no URL"):
        async with Client(url) as client, client.completions("hello"):
            pass


def test_a_record_without_end_is_bounded() -> None:
    records = Records()
    records.numbered = True
    with pytest.raises(BadAnswer, match="longer"):
        for _ in range(HELD_CHARS // 1_000_000 + 1):
            records.take(Event("x" * 1_000_000))
