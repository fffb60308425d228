"""HTTP/2 and TLS end to end, with other people's clients: httpx2 and curl."""

from __future__ import annotations

import json
import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import run
from typing import Any

import httpx2
import pytest
import trio
import trustme
from tokenflow_synthetic import generate

from tests.e2e.conftest import Serve, Server, serving
from tests.e2e.wire import ask, completion, connect, directive, metric, until_metric
from tokenflow.core.sse import Parser

CONFIG = """
[server]
max_body_bytes = 65536
body_timeout_s = 0.5
header_timeout_s = 0.5
[stream]
stall_s = 1
[models.m]
engine = "synthetic"
directives = true
[sinks.prometheus]
"""
pytestmark = pytest.mark.filterwarnings(  # httpx2 leaves generators of its own to the collector
    "ignore:Async generator:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
CURL = shutil.which("curl") or ""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def secure(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("secure")
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    tls = '[server]\ntls_certificate = "cert.pem"\ntls_key = "key.pem"\n'
    with serving(folder, CONFIG.replace("[server]\n", tls)) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("plain"), CONFIG) as server:
        yield server


@pytest.fixture
def client(secure: Server, authority: trustme.CA, request: pytest.FixtureRequest) -> Callable[[], Any]:
    """`client()`: an httpx2 client of the secure server, on the protocol asked for."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    http2 = request.param == "HTTP/2"
    return lambda: httpx2.AsyncClient(base_url=secure.url, verify=context, http1=not http2, http2=http2)


BOTH = pytest.mark.parametrize("client", ["HTTP/1.1", "HTTP/2"], indirect=True)


def text_of(body: str) -> str:
    events = [json.loads(event.data) for event in Parser().feed(body.encode()) if event.data != "[DONE]"]
    return "".join(event["choices"][0]["text"] for event in events)


@BOTH
async def test_a_stream_over_tls(client: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    async with client() as http:
        for _ in range(2):  # the second one on the same connection
            answer = await http.post("/v1/completions", json=completion("hello", max_tokens=20, stream=True))
            assert answer.http_version == request.node.callspec.params["client"]
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert text_of(answer.text) == generate("hello", 20)


@BOTH
async def test_errors_over_tls(client: Callable[[], Any]) -> None:
    async with client() as http:
        assert (await http.get("/nowhere")).status_code == 404
        assert (await http.post("/v1/completions", content=b"{")).json()["error"]["type"] == "invalid_request_error"
        too_big = await http.post("/v1/completions", content=b"x" * 65537)
        assert (too_big.status_code, set(too_big.json()["error"])) == (413, {"message", "type", "param", "code"})
        assert (await http.get("/health/ready")).json() == {"status": "ok"}


@BOTH
async def test_leaving_over_tls_frees_the_slot(client: Callable[[], Any]) -> None:
    body = completion(directive(tokens_per_s=20), max_tokens=4000, stream=True)
    async with client() as watcher:
        async with client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)
            assert await active(watcher) == 1
            await chunks.aclose()
        with trio.fail_after(2):
            while await active(watcher):
                await trio.sleep(0.005)


@pytest.mark.parametrize("client", ["HTTP/1.1"], indirect=True)  # on HTTP/2 httpx2 opens a window of 16 MiB at once
async def test_a_reader_that_takes_nothing_is_ended_after_stall_s(client: Callable[[], Any]) -> None:
    body = completion("hello", max_tokens=8000, stream=True)
    began = trio.current_time()
    async with client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.aiter_raw()
        await anext(chunks)
        with trio.fail_after(5):
            while await active(http):
                await trio.sleep(0.02)
        assert trio.current_time() - began > 0.5
        await chunks.aclose()


async def active(http: Any) -> float:
    page = (await http.get("/metrics")).text
    [line] = [line for line in page.splitlines() if line.startswith('tokenflow_active_streams{model="m"}')]
    return float(line.split()[1])


def curl(server: Server, *arguments: str) -> Any:
    """curl's body, and what `--write-out` says of it."""
    says = "\n%{http_code} %{http_version}"
    command = [CURL, "--silent", "--show-error", "--max-time", "20", "--write-out", says, *arguments]
    done = run(command, capture_output=True, text=True, timeout=30, check=False, cwd=server.folder)
    assert done.returncode == 0, done.stderr
    body, _, said = done.stdout.rpartition("\n")
    return body, said.split()


ASKED = ["--json", json.dumps(completion("hello", max_tokens=20, stream=True))]
WAYS = {
    "prior knowledge": ["--http2-prior-knowledge"],
    "upgrade": ["--http2"],
    "HTTP/1.1": ["--http1.1"],
}


@pytest.mark.skipif(not CURL, reason="NOT TESTED: there is no curl on this machine (apt-get install curl)")
@pytest.mark.parametrize("way", WAYS)
async def test_curl_without_tls(plain: Server, way: str) -> None:
    url = plain.url + "/v1/completions"
    body, (status, version) = await trio.to_thread.run_sync(curl, plain, *WAYS[way], *ASKED, url)
    assert status == "200"
    assert version == ("2" if way == "prior knowledge" else "1.1")  # a POST with a body is not upgraded
    assert text_of(body) == generate("hello", 20)
    body, (status, version) = await trio.to_thread.run_sync(curl, plain, *WAYS[way], plain.url + "/v1/models/m")
    assert (status, version, json.loads(body)["id"]) == ("200", "1.1" if way == "HTTP/1.1" else "2", "m")


@pytest.mark.skipif(not CURL, reason="NOT TESTED: there is no curl on this machine (apt-get install curl)")
@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_curl_with_tls(secure: Server, version: str) -> None:
    how = ["--cacert", "ca.pem", f"--http{version}"]
    body, said = await trio.to_thread.run_sync(curl, secure, *how, *ASKED, secure.url + "/v1/completions")
    assert (said, text_of(body)) == (["200", version], generate("hello", 20))


async def test_limits_are_on_the_page_of_metrics(plain: Server) -> None:
    port = plain.port
    before = {reason: await refusals(port, reason) for reason in ("headers", "header_timeout", "body", "body_timeout")}
    assert (await ask(port, "GET", "/", headers={"X": "y" * 20_000})).status == 431
    assert (await ask(port, "POST", "/v1/completions", b"x" * 65537)).status == 413
    async with connect(port) as slow_head, connect(port) as slow_body:
        await slow_head.stream.send_all(b"GET / HTTP/1.1\r\n")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        await slow_body.stream.send_all(head)
        assert await metric(port, "tokenflow_open_connections") >= 3
        assert (await slow_head.closed()).startswith(b"HTTP/1.1 408 ")
        assert (await slow_body.closed()).startswith(b"HTTP/1.1 408 ")
    for reason, count in before.items():
        assert await refusals(port, reason) == count + 1, reason
    await until_metric(port, 1, "tokenflow_open_connections")  # the one that asks


async def refusals(port: int, reason: str) -> float:
    return await metric(port, "tokenflow_refusals_total", reason=reason)


def test_a_certificate_that_is_none_is_one_line(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    tls = '[server]\ntls_certificate = "cert.pem"\ntls_key = "cert.pem"\n'
    with pytest.raises(AssertionError, match=r"no certificate in .*cert"), serve(CONFIG.replace("[server]\n", tls)):
        pass
    assert "Traceback" not in (tmp_path / "log").read_text()
