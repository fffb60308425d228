"""The client, a proxy that cuts, and the real server: nothing is lost, repeated, or made for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tokenflow_synthetic import generate

from tests.cutproxy import Cut, cutting
from tests.e2e.conftest import Server, serving
from tests.e2e.wire import Journal
from tokenflow.client import Client, CutOff, ServerError

WORDS = """
[models.words]
engine = "synthetic"
tokens_per_s = 200.0
directives = true
"""
PROMPT, TOKENS = "The duck swims", 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("words"), WORDS) as running:
        yield running


PLANS = {
    "within the head": [Cut(20), Cut(100, "rst")],
    "before the first token": [Cut(480), Cut(480, "rst")],
    "again and again": [Cut(at, how) for at in range(600, 1200, 60) for how in ("fin", "rst")],
    "the server's side alone": [Cut(900, "half")],
    "nothing comes and nothing is closed": [Cut(1000, "die"), Cut(1100, "keep")],
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
async def test_exactly_once(server: Server, plan: list[Cut]) -> None:
    async with cutting(server.port, plan) as proxy, Client(f"http://127.0.0.1:{proxy.port}", silence_s=0.5) as client:
        async with client.completions(PROMPT, max_tokens=TOKENS) as stream:
            ns = [delta.n async for delta in stream]
        assert stream.received == {0: generate(PROMPT, TOKENS)}
        assert ns == list(range(1, TOKENS + 1))
        assert stream.finish_reason == "length" and stream.usage is not None
        assert stream.usage["completion_tokens"] == TOKENS
    assert len(proxy.log) == len(plan) + 1
    ended = await Journal(server.folder).ended(stream.id)
    assert (ended["how"], ended["generated"]) == ("length", str(TOKENS))


async def test_leaving_early_ends_it_at_once(server: Server) -> None:
    async with Client(server.url) as client, client.completions(PROMPT, max_tokens=5000) as stream:
        for _ in range(3):
            await anext(stream)
    ended = await Journal(server.folder).ended(stream.id)  # well before a grace of 15 s
    assert int(ended["generated"]) < 100


async def test_going_on_from_another_client(server: Server) -> None:
    async with Client(server.url) as client, client.completions(PROMPT, max_tokens=TOKENS) as stream:
        first = [(await anext(stream)).text for _ in range(10)]
        stream.cancel_on_leave = False
    async with Client(server.url) as client, client.attach(stream.id, after=10) as again:
        assert "".join(first) + await again.text() == generate(PROMPT, TOKENS)


async def test_a_failure_is_the_servers_own_words(server: Server) -> None:
    async with Client(server.url) as client:
        async with client.completions('{"synthetic": {"raise_at": 4}}', max_tokens=9) as stream:
            with pytest.raises(ServerError) as caught:
                await stream.text()
        assert (caught.value.code, stream.n >= 4) == ("engine_error", True)
        with pytest.raises(ServerError) as caught:
            async with client.completions(PROMPT, max_tokens="many"):
                pass
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")


async def test_a_server_that_does_not_come_back(tmp_path: Path) -> None:
    with serving(tmp_path, WORDS) as mortal:
        async with (
            Client(mortal.url, patience_s=0.5) as client,
            client.completions(PROMPT, max_tokens=5000) as stream,
        ):
            first = await anext(stream)
            mortal.process.kill()
            with trio.fail_after(10), pytest.raises(CutOff) as caught:
                await stream.text()
    assert caught.value.received[0].startswith(first.text)
    assert generate(PROMPT, 5000).startswith(caught.value.received[0])
