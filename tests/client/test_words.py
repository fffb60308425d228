"""What the wire's words become: errors, waiting times, models, URLs. And the held record's bound."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import httpx2
import pytest
import trio
import trustme

from tests.client.fake import Server
from tokenflow.client import BadAnswer, Client, ServerError, Unreachable
from tokenflow.client.errors import from_envelope, refusal
from tokenflow.client.records import HELD_CHARS, Records
from tokenflow.client.words import proxy_for, retry_after_s
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


async def test_models_as_the_server_describes_them() -> None:
    described = {"id": "a", "capabilities": ["seed"]}
    async with Server([], instead=[httpx2.Response(200, json={"data": [described]})]).client() as client:
        assert await client.listing() == [described]


@pytest.mark.parametrize("data", [["a"], [{"name": "a"}], [["id"]], None, 7])
async def test_no_list_of_models(data: object) -> None:
    async with Server([], instead=[httpx2.Response(200, json={"data": data})]).client() as client:
        with pytest.raises(BadAnswer, match="lists no models"):
            await client.listing()


def connect_error(cause: BaseException) -> Exception:
    error = httpx2.ConnectError("outer")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (ConnectionRefusedError(111, "Error connecting to ('x', 1): Connection refused"), "Connection refused"),
        (OSError("all failed"), "outer"),
        (ExceptionGroup("all", [ConnectionRefusedError(111, "x")]), "Connection refused"),
    ],
)
async def test_the_cause_in_the_systems_words(cause: BaseException, words: str) -> None:
    async with Server([], instead=[connect_error(cause)]).client() as client:
        with pytest.raises(Unreachable, match=f"^cannot reach http://server:1: {words}$"):
            await client.models()


@pytest.mark.parametrize(
    "cause",
    [socket.gaierror(-2, "no such name"), socket.gaierror(8, "no such name"), socket.herror(1, "no such name")],
    ids=["gaierror", "gaierror as macOS numbers it", "herror"],
)
async def test_a_name_that_nobody_knows(cause: OSError) -> None:
    async with Server([], instead=[connect_error(cause)]).client() as client:
        with pytest.raises(Unreachable, match=r"^cannot find the host of http://server:1: no such name; look at"):
            await client.models()


async def test_a_connection_that_breaks_was_one() -> None:
    async with Server([], instead=[httpx2.RemoteProtocolError("peer left.")]).client() as client:
        with pytest.raises(Unreachable) as caught:
            await client.models()
    assert caught.value.message == (
        "the connection to http://server:1 broke: peer left; if it serves TLS, write https://"
    )


# --- TLS ------------------------------------------------------------------------------------------------------------

LISTING = b'{"data": [{"id": "m"}]}'


async def answer(stream: trio.SSLStream) -> None:
    with suppress(trio.BrokenResourceError):
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(LISTING), LISTING))
        await stream.aclose()


@asynccontextmanager
async def over_tls(certificate: trustme.LeafCert) -> AsyncIterator[int]:
    """The port of a server with that certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    serve = partial(trio.serve_ssl_over_tcp, answer, 0, context, host="127.0.0.1", https_compatible=True)
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(serve)
        yield listener.transport_listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def refused(url: str) -> str:
    async with Client(url) as client:
        with pytest.raises(Unreachable) as caught:
            await client.models()
        with pytest.raises(Unreachable, match=re.escape(caught.value.message)):
            async with client.completions("hello"):
                pass
    return caught.value.message.replace(url, "URL")


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """One that is trusted once `SSL_CERT_FILE` is set, to `ca.pem`; which it is not."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return authority


async def test_a_certificate_that_is_not_trusted(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over_tls(authority.issue_cert("127.0.0.1")) as port:
        assert re.fullmatch(
            "the certificate of URL is not trusted: .*issuer.*; if you do trust it, set SSL_CERT_FILE=its.pem",
            await refused(f"https://127.0.0.1:{port}"),
        )
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        async with Client(f"https://127.0.0.1:{port}") as client:
            assert await client.models() == ["m"]


OF_NO_USE = {
    "another name": ({}, "localhost", "is for another name: .*; use a URL with a name that it has"),
    "over": ({"not_after": NOW}, "127.0.0.1", "is not trusted: certificate has expired; renew it, or set the clock"),
}


@pytest.mark.parametrize(("dates", "name", "words"), OF_NO_USE.values(), ids=OF_NO_USE)
async def test_a_certificate_of_no_use(
    dates: dict, name: str, words: str, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with over_tls(authority.issue_cert(name, **dates)) as port:
        assert re.fullmatch(f"the certificate of URL {words}", await refused(f"https://127.0.0.1:{port}"))


async def test_no_tls_where_it_is_looked_for() -> None:
    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.aclose()

    async def talk_http(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    for handler, why in ((hang_up, "unexpected eof while reading"), (talk_http, "wrong version number")):
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, handler, 0, host="127.0.0.1"))
            message = await refused(f"https://127.0.0.1:{listener.socket.getsockname()[1]}")
            nursery.cancel_scope.cancel()
        assert message == f"no TLS connection to URL: {why}; if it serves none, write http://"


async def test_tls_where_none_is_looked_for(authority: trustme.CA) -> None:
    async with over_tls(authority.issue_cert("127.0.0.1")) as port, Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(Unreachable, match=r"broke: .*; if it serves TLS, write https://$"):
            await client.models()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [("SSL_CERT_FILE", None, "No such file or directory"), ("SSL_CERT_FILE", "x", "it holds no certificate")],
)
def test_certificates_that_cannot_be_read(
    name: str, content: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trusted.pem"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(name, str(path))
    with pytest.raises(Unreachable) as caught:
        Client("https://server")
    assert caught.value.message == f"{name}={path} cannot be used: {why}; name a PEM file, or unset it"


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a proxy should be, and nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", url.replace("//", "//user:secret@"))
    return url


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9"])
async def test_this_machine_is_asked_without_a_proxy(host: str, proxy: str) -> None:
    async with trio.open_nursery() as nursery:
        address = "127.0.0.1" if host == "localhost" else host
        listeners = await nursery.start(partial(trio.serve_tcp, answering, 0, host=address))
        async with Client(f"http://{host}:{listeners[0].socket.getsockname()[1]}") as client:
            assert await client.models() == ["m"]
        nursery.cancel_scope.cancel()


async def answering(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    await stream.send_all(b'HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n{"data": [{"id": "m"}]}')


@pytest.mark.parametrize("ask", [Client.models, lambda client: client.completions("hello").__aenter__()])
async def test_a_proxy_that_cannot_be_reached_is_named(ask: Callable[[Client], Awaitable], proxy: str) -> None:
    async with Client("http://models.example.org") as client:
        with pytest.raises(Unreachable) as caught:
            await ask(client)
    assert caught.value.message == (
        f"no way to http://models.example.org through the proxy {proxy} (http_proxy): Connection refused; "
        "if it can be reached without, name its host in no_proxy"
    )


async def test_a_proxy_that_is_passed_by_is_not_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "example.org")
    assert proxy_for("http://example.org") == proxy_for("https://models.org") == proxy_for("http://a:b") == ""
    monkeypatch.setenv("all_proxy", "user:secret@proxy:3128")
    assert proxy_for("https://models.org") == "proxy:3128 (all_proxy)"


def test_a_proxy_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "gopher://proxy")
    with pytest.raises(Unreachable, match=r"^a proxy of the environment cannot be used: .*gopher.*; mend http_proxy"):
        Client("http://models.example.org")
    Client("http://localhost")


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
