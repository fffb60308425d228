"""A real browser. Its bare `EventSource`, cut three times, shows the whole text once, and stops by itself; and pages of
another origin read what the configuration lets them, and nothing else.

The page and the stream have one origin: a small server in the test gives the page, and hands the connections that ask
for `/stream` on, through a proxy that cuts, to tokenflow or to a proxy before it. Nothing in the page helps the
browser; only the time until it tries again is shortened, from the three seconds of its own.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from hashlib import sha256
from os import killpg
from pathlib import Path
from typing import Any

import pytest
import trio
from tokenflow_synthetic import generate

from tests.cutproxy import Cut, cutting
from tests.e2e.chromium import ALONE, PATIENCE_S
from tests.e2e.conftest import serving
from tests.e2e.proxies import KINDS, REPLICA, Replicas, binary, fronted, replicas
from tests.e2e.wire import ask

TOKENS = 60
PAGE = """<!doctype html>
<meta charset="utf-8">
<link rel="icon" href="data:,">
<p id="text"></p>
<script>
const text = document.getElementById("text"), seen = [];
const source = new EventSource("/stream?prompt=hello&max_tokens=60");
source.onmessage = (event) => {
  seen.push([event.lastEventId, event.data]);
  if (event.data !== "[DONE]") text.textContent += JSON.parse(event.data).token;
};
source.onerror = () => {
  if (source.readyState === EventSource.CLOSED)
    fetch("/report", {method: "POST", body: JSON.stringify({text: text.textContent, seen: seen})});
};
</script>
"""
ELSEWHERE = """<!doctype html>
<meta charset="utf-8">
<link rel="icon" href="data:,">
<script>
const asked = {"model": "m", "stream": true, "max_tokens": 60, "prompt": "hello"};
const ask = async (target, key, body) => {
  const headers = {Authorization: `Bearer ${key}`, "Content-Type": "application/json", "Idempotency-Key": "a"};
  try {
    const asking = body ? {method: "POST", headers, body: JSON.stringify(body)} : {headers};
    const answer = await fetch(SERVER + target, asking);
    return {status: answer.status, id: answer.headers.get("X-Request-Id"), text: await answer.text()};
  } catch (error) {
    return {failed: error.name};
  }
};
const socket = () => new Promise((resolve) => {
  const opened = new WebSocket(SERVER.replace("http", "ws") + "/v1/ws");
  opened.onmessage = (event) => resolve({frame: event.data});
  opened.onclose = (event) => resolve({code: event.code});
  opened.onopen = () => opened.send('{"type":"ping"}');
});
(async () => {
  const seen = [await ask("/v1/completions", "right", asked), await ask("/v1/models", "wrong"), await socket()];
  fetch("/report", {method: "POST", body: JSON.stringify(seen)});
})();
</script>
"""
"""Asks a server that is not its own, at `SERVER`."""
RETRY = b"c\r\nretry: 50\n\n\r\n"
"""A chunk of its own."""


class Site:
    """The page's server: one request a connection."""

    def __init__(self, stream_port: int, page: str) -> None:
        self._stream_port = stream_port
        self.page = page
        self.statuses: list[int] = []
        """Of each answer to `/stream`, as the browser saw it."""
        self._report, self._reports = trio.open_memory_channel[Any](1)

    async def report(self) -> Any:
        """What the page had seen when its source closed for good."""
        with trio.fail_after(PATIENCE_S):
            return await self._reports.receive()

    async def serve(self, browser: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with browser:
                head, rest = await _head(browser)
                if re.match(rb"\w+ /(stream\?|v1/)", head):
                    await self._hand_on(head, await _body(browser, head, rest), browser)
                elif head.startswith(b"POST /report "):
                    self._report.send_nowait(json.loads(await _body(browser, head, rest)))
                    await browser.send_all(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
                elif head:
                    fields = f"Content-Type: text/html\r\nContent-Length: {len(self.page)}\r\nConnection: close"
                    await browser.send_all(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n{self.page}".encode())

    async def _hand_on(self, head: bytes, body: bytes, browser: trio.SocketStream) -> None:
        once = re.sub(rb"(?i)\r\nConnection: keep-alive", b"\r\nConnection: close", head)
        async with await trio.open_tcp_stream("127.0.0.1", self._stream_port) as server:
            await server.send_all(once + body)
            answer, rest = await _head(server)
            self.statuses.append(int(answer.split(b" ", 2)[1]))
            chunked = b"transfer-encoding: chunked" in answer.lower()
            await browser.send_all(answer + (RETRY if chunked else b"") + rest)
            async for data in server:
                await browser.send_all(data)


async def _head(stream: trio.SocketStream) -> tuple[bytes, bytes]:
    """Up to the blank line, and what came after it; nothing if there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some()
        if not more:
            return b"", b""
        data += more
    end = data.index(b"\r\n\r\n") + 4
    return data[:end], data[end:]


async def _body(stream: trio.SocketStream, head: bytes, rest: bytes) -> bytes:
    found = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    while len(rest) < (int(found[1]) if found else 0):
        rest += await stream.receive_some()
    return rest


@asynccontextmanager
async def site(stream_port: int = 0, page: str = PAGE) -> AsyncIterator[tuple[Site, int]]:
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        pages = Site(stream_port, page)
        nursery.start_soon(trio.serve_listeners, pages.serve, [listener])
        yield pages, listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def browsing(url: str, folder: Path) -> AsyncIterator[None]:
    """Chromium at `url`, until the block ends."""
    command = [binary("chromium"), *ALONE, f"--user-data-dir={folder}/profile", url]
    with (folder / "chromium.log").open("w") as log:
        browser = partial(trio.run_process, command, stdout=log, stderr=log, start_new_session=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(browser, deliver_cancel=_end, check=False))
            yield
            nursery.cancel_scope.cancel()


async def _end(process: subprocess.Popen[bytes] | trio.Process) -> None:
    """All of its processes: it has many."""
    with suppress(ProcessLookupError):
        killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    binary("chromium")
    with replicas(tmp_path_factory.mktemp("replicas"), REPLICA.replace("= 50", "= 200")) as servers:
        yield servers


@contextmanager
def way(through: str, servers: Replicas, folder: Path) -> Iterator[int]:
    """The port of what the browser's streams go to."""
    with ExitStack() as stack:
        direct = through == "nothing"
        yield servers.a.port if direct else stack.enter_context(fronted(through, folder / through, servers.ports))


@pytest.mark.parametrize("through", ["nothing", *KINDS])
async def test_a_browser_that_is_cut_three_times(through: str, servers: Replicas, tmp_path: Path) -> None:
    cuts = [Cut(700), Cut(1200, "rst"), Cut(900)]
    before = await generated(servers)
    with way(through, servers, tmp_path) as port:
        async with cutting(port, cuts) as between, site(between.port) as (page, page_port):
            async with browsing(f"http://127.0.0.1:{page_port}/", tmp_path):
                report = await page.report()
            ended = [connection.ended for connection in between.log]
    assert report["text"] == generate("hello", TOKENS)
    assert report["seen"][-1][1] == "[DONE]"
    assert [n for _, n in map(number, report["seen"])] == list(range(1, TOKENS + 2)), "each once, in order"
    assert len({id for id, _ in map(number, report["seen"])}) == 1
    assert page.statuses == [200, 200, 200, 200, 204], "the last of which stopped it"
    assert ended[:3] == ["fin", "rst", "fin"] and len(ended) == 5
    assert await generated(servers) - before == TOKENS, "nothing was generated twice"


WITH_KEY = f'''
[[auth.keys]]
name = "page"
sha256 = "{sha256(b"right").hexdigest()}"
'''
SERVER_OF_OTHERS = """
[http]
cors_origins = ["{origin}"]

[models.m]
engine = "synthetic"
"""


async def as_seen_from_elsewhere(folder: Path, config: str, *, allowed: bool) -> Any:
    """What a page of another origin, which the server lets read or not, gets for its requests."""
    binary("chromium")
    async with site() as (page, page_port):
        origin = f"http://127.0.0.1:{page_port if allowed else 1}"
        with serving(folder / "server", SERVER_OF_OTHERS.format(origin=origin) + config) as server:
            page.page = ELSEWHERE.replace("SERVER", json.dumps(server.url))
            async with browsing(f"http://127.0.0.1:{page_port}/", folder):
                return await page.report()


async def test_a_page_of_another_origin_reads_what_it_is_allowed_to(tmp_path: Path) -> None:
    stream, refused, _ = await as_seen_from_elsewhere(tmp_path, WITH_KEY, allowed=True)
    assert stream["status"] == 200 and stream["text"].endswith("data: [DONE]\n\n")
    assert stream["id"].startswith("tf-"), "the header can be read"
    assert refused["status"] == 401 and json.loads(refused["text"])["error"]["code"] == "invalid_api_key"


async def test_a_page_that_is_not_allowed_reads_nothing(tmp_path: Path) -> None:
    stream, refused, _ = await as_seen_from_elsewhere(tmp_path, WITH_KEY, allowed=False)
    assert stream == refused == {"failed": "TypeError"}


async def test_without_keys_a_name_that_was_made_to_point_here_opens_nothing(tmp_path: Path) -> None:
    """DNS rebinding: to the browser the server is the page's own, so nothing but the server stands between them."""
    binary("chromium")
    with serving(tmp_path / "server", REPLICA.replace("{name}", "a")) as server:
        async with (
            site(server.port, ELSEWHERE.replace("SERVER", "location.origin")) as (page, page_port),
            browsing(f"http://rebound.test:{page_port}/", tmp_path),
        ):
            *answers, socket = await page.report()
        assert (await ask(server.port, "GET", "/_debug/generated")).json["total"] == 0
    assert [answer["status"] for answer in answers] == [421, 421]
    assert socket.get("code") == 1008 or "host_not_allowed" in socket["frame"]


def number(event: tuple[str, str]) -> tuple[str, int]:
    id, _, n = event[0].rpartition(":")
    return id, int(n)


async def generated(servers: Replicas) -> int:
    return sum([(await ask(port, "GET", "/_debug/generated")).json["total"] for port in servers.ports])
