"""The page at `/` in a real Chromium: what somebody who sits before it sees, and what it costs the engine."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cutproxy import Cut, cutting
from tests.e2e.chromium import Tab, chromium, open_tab
from tests.e2e.conftest import Server, serving
from tests.e2e.wire import CHAT, Journal, ask, directive, metric, post, until_metric
from tokenflow.http.routes.page import FILE

CONFIG = """
[server]
debug = true

[http]
hosts = ["chat.test"]

[plugins]
files = ["parrot.py"]

[models.words]
engine = "synthetic"
directives = true
slots = 1
chat = {reasoning = "think"}
defaults = {max_tokens = 60}

[models.parrot]
engine = "parrot"
defaults = {max_tokens = 12}

[sinks.prometheus]
"""
PARROT = """
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle

from tokenflow.api import EngineInfo, EnginePlugin, engine_from_generator, hookimpl

@dataclass(frozen=True, kw_only=True)
class ParrotConfig:
    pass

@asynccontextmanager
async def open_parrot(config):
    async def repeat(prompt, request):
        for letter in cycle(prompt):
            yield letter
    yield engine_from_generator(repeat, info=EngineInfo(model="parrot", context_length=4096, slots=1))

@hookimpl
def register_engines():
    return [EnginePlugin(name="parrot", config=ParrotConfig, open=open_parrot)]
"""
"""It has no chat template."""
KEYS = f"""
[[auth.keys]]
name = "reader"
sha256 = "{sha256(b"right").hexdigest()}"

[models.m]
engine = "synthetic"
stop_at = 3
"""
FACTS = "document.querySelector('article:last-child .facts').textContent"
ENDED = "!document.querySelector('#send').hidden"
ANSWER = "document.querySelector('article:last-child .answer').textContent"
SLOW = directive(tokens_per_s=20)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with chromium(tmp_path_factory.mktemp("chromium")) as profile:
        yield profile


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "parrot.py").write_text(PARROT)
    with serving(folder, CONFIG) as server:
        yield server


@asynccontextmanager
async def visiting(browser: Path, port: int, host: str = "127.0.0.1") -> AsyncIterator[Tab]:
    """A tab with the page, which has found its models."""
    async with open_tab(browser) as tab:
        await tab.visit(f"http://{host}:{port}/")
        await tab.until("document.querySelector('#model').value")
        yield tab


async def answered(tab: Tab, question: str, *, first: str = "") -> str:
    """Ask, and wait for the end; the answer. `first` is typed already."""
    await tab.type(question + "\n")
    await tab.until(f"{_asked(first + question)} && {ENDED}")
    return str(await tab.run(ANSWER))


async def begun(tab: Tab, question: str) -> None:
    """Ask, and wait for some words of an answer."""
    await tab.type(question + "\n")
    await tab.until(f"{_asked(question)} && {ANSWER}.length > 20")


async def ended(tab: Tab) -> str:
    """Wait for the end; what is told of it."""
    await tab.until(ENDED)
    return str(await tab.run(FACTS))


def _asked(question: str) -> str:
    return f"document.querySelector('article:last-child .question')?.textContent === {json.dumps(question)}"


async def said(server: Server, *questions_and_answers: str) -> str:
    """What the model says to a conversation, as an ordinary client hears it."""
    roles = ["user", "assistant"] * len(questions_and_answers)
    messages = [{"role": role, "content": text} for role, text in zip(roles, questions_and_answers, strict=False)]
    answer = await post(server.port, CHAT, {"model": "words", "messages": messages})
    assert answer.status == 200
    return answer.text


async def generated(server: Server) -> int:
    return int((await ask(server.port, "GET", "/_debug/generated")).json["total"])


async def newest(server: Server) -> dict[str, Any]:
    """The state of the stream that was made last."""
    state: dict[str, Any] = (await ask(server.port, "GET", "/v1/streams")).json["data"][-1]
    return state


async def test_head_has_no_body(server: Server) -> None:
    got, head = await ask(server.port, "GET", "/"), await ask(server.port, "HEAD", "/")
    assert (head.status, head.body, head.head["content-length"]) == (200, b"", str(len(got.body)))


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "chat.test"])
async def test_an_answer_is_shown_whole(browser: Path, server: Server, host: str) -> None:
    async with visiting(browser, server.port, host) as tab:
        assert await answered(tab, "hello") == await said(server, "hello")
        facts = await tab.run(FACTS)
        assert "first token after" in facts and "60 tokens" in facts and "tokens/s" in facts and "length" in facts
        assert await tab.run("[Object.keys(localStorage), Object.keys(sessionStorage)]") == [[], []]
        assert await tab.run("document.activeElement.id") == "prompt"
    assert tab.complaints == []
    assert {url.split("/", 3)[2] for url in tab.asked if not url.startswith("data:")} == {f"{host}:{server.port}"}


async def test_a_conversation_goes_on_until_another_begins(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        first = await answered(tab, "hello")
        assert await answered(tab, "and then?") == await said(server, "hello", first, "and then?")
        await tab.run("document.querySelector('#new').click()")
        assert await answered(tab, "and then?") == await said(server, "and then?")
        assert await tab.run("document.querySelectorAll('article').length") == 1


async def test_settings_hold_and_are_remembered(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        await tab.run("document.querySelector('footer details').open = true")
        for setting, value in [("max_tokens", "3"), ("temperature", "0.5"), ("system", "Be brief.")]:
            await tab.run(f"document.querySelector('#{setting}').focus()")
            await tab.type(value)
        await tab.visit(f"{server.url}/?again")
        await tab.until("document.querySelector('#model').value")
        await answered(tab, "hello")
        assert "3 tokens" in await tab.run(FACTS)
        stored = {"max_tokens": "3", "temperature": "0.5", "system": "Be brief."}
        assert await tab.run("({...localStorage})") == stored


async def test_what_a_model_writes_is_text(browser: Path, server: Server) -> None:
    markup = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    async with visiting(browser, server.port) as tab:
        assert await answered(tab, directive(text=markup)) == markup
        assert await tab.run("document.querySelectorAll('article :is(script, img)').length") == 0
    assert tab.complaints == []


async def test_reasoning_is_apart_and_folded(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        assert await answered(tab, directive(text="<think>Hm, well.</think>Yes.")) == "Yes."
        shown = "(({hidden, open, lastElementChild}) => [hidden, open, lastElementChild.textContent])"
        assert await tab.run(f"{shown}(document.querySelector('.reasoning'))") == [False, False, "Hm, well."]


async def test_a_model_without_a_chat_template_continues_the_text(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        await tab.run("document.querySelector('#model').value = 'parrot'")
        assert await answered(tab, "Polly") == "PollyPollyPo"


async def test_an_error_is_told_in_the_servers_words(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        question = directive(raise_at=0)
        await answered(tab, question)
        assert await tab.run("document.querySelector('article .error').innerText") == "A planned fault: raise_at 0."
        assert await tab.run("document.querySelector('#prompt').value") == question, "to be asked again"


async def test_the_keyboard_is_enough(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        await tab.type("one")
        await tab.press("Enter", shift=True)
        assert await answered(tab, "two", first="one\n") == await said(server, "one\ntwo")
        await begun(tab, SLOW)
        await tab.press("Tab")
        await tab.press("Enter")
        await tab.until("document.activeElement.textContent === 'Resume'")
        await tab.press("Tab")
        await tab.press("Enter")
        assert "cancelled" in await ended(tab)
        assert await tab.run("document.activeElement.id") == "prompt", "and not lost with the button"


# --- who holds it, and who leaves -------------------------------------------------------------------------------------


async def test_pause_and_resume(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        await begun(tab, directive(tokens_per_s=50))
        await tab.run("document.querySelector('#pause').click()")
        await tab.until("document.querySelector('#pause').textContent === 'Resume'")
        state = await newest(server)
        assert (state["state"], state["paused"], state["readers"]) == ("decode", True, 1)
        await tab.run("document.querySelector('#pause').click()")
        assert "60 tokens" in await ended(tab)
        assert len((await tab.run(ANSWER)).split()) == 60


async def test_stop_frees_the_slot(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        await begun(tab, SLOW)
        await tab.run("document.querySelector('#stop').click()")
        assert "cancelled" in await ended(tab)
        assert await metric(server.port, "tokenflow_slots_used", model="words") == 0
        await nothing_more_is_made(server)


async def test_a_closed_tab_ends_its_answer(browser: Path, server: Server) -> None:
    async with visiting(browser, server.port) as tab:
        await begun(tab, SLOW)
        stream = await newest(server)
        await tab.close()
        assert (await Journal(server.folder).ended(stream["id"]))["how"] == "cancelled", "long before the grace is over"
    await nothing_more_is_made(server)


async def test_a_tab_that_dies_makes_the_engine_wait(browser: Path, server: Server) -> None:
    """It can say nothing, so the server does not know that it will not come back: that is what the grace is for."""
    async with visiting(browser, server.port) as tab:
        await begun(tab, SLOW)
        await tab.crash()
        await until_metric(server.port, 1, "tokenflow_paused_sequences", model="words")
        stream = await newest(server)
        assert (stream["paused"], stream["readers"]) == (True, 0)
        await nothing_more_is_made(server)  # and the only slot is had by who wants it
        await ask(server.port, "DELETE", f"/v1/streams/{stream['id']}")


async def nothing_more_is_made(server: Server) -> None:
    """The engine makes what somebody asks for now, and beside it nothing."""
    before = await generated(server)
    await said(server, "hello")
    assert await generated(server) == before + 60


async def test_a_broken_connection_goes_on_where_it_was(browser: Path, server: Server) -> None:
    """Every connection is cut when it has carried so much: the page and its models, and some of the answer."""
    question, tokens = directive(tokens_per_s=500), 400
    body = {"model": "words", "messages": [{"role": "user", "content": question}], "max_tokens": tokens}
    whole = (await post(server.port, CHAT, body)).text
    before = await generated(server)
    size = len((await ask(server.port, "GET", "/")).body)
    async with cutting(server.port, [Cut(size + 6000, how) for how in ("fin", "rst", "fin", "rst")]) as between:
        async with visiting(browser, between.port) as tab:
            await tab.run(f"document.querySelector('#max_tokens').value = {tokens}")
            assert await answered(tab, question) == whole
            assert f"{tokens} tokens" in await tab.run(FACTS)
            assert await tab.run("document.querySelector('article .error').hidden")
        assert [connection.ended for connection in between.log][:2] == ["fin", "rst"]
    assert await generated(server) == before + tokens, "nothing was generated twice"


async def test_a_server_that_stays_away_is_not_waited_for_forever(browser: Path, server: Server) -> None:
    size = len((await ask(server.port, "GET", "/")).body)
    async with cutting(server.port, [Cut(size + 6000)] * 2) as between, visiting(browser, between.port) as tab:
        await tab.run("performance.now = ((now) => () => 100 * now())(performance.now.bind(performance))")
        await begun(tab, SLOW)
        between.refuse = True
        await ended(tab)
        assert await tab.run("document.querySelector('article .error').innerText") == "The server cannot be reached."
    await ask(server.port, "DELETE", f"/v1/streams/{(await newest(server))['id']}")


class Script:
    """A server that says what is written, one line of it a request; `asked` is what it was asked for."""

    def __init__(self, *answers: str) -> None:
        self.asked: list[str] = []
        self._answers = iter(answers)

    async def serve(self, browser: trio.SocketStream) -> None:
        async with browser:
            asked = (await browser.receive_some()).decode()
            if asked.startswith("GET / "):
                answer = _http("text/html", FILE.read_text(encoding="utf-8"))
            elif asked.startswith("GET /v1/models "):
                answer = _http("application/json", '{"data": [{"id": "m"}]}')
            else:
                self.asked.append(asked)
                answer = next(self._answers)
            await browser.send_all(answer.encode())


def _http(kind: str, body: str, status: str = "200 OK") -> str:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nX-Request-Id: tf-1\r\nConnection: close\r\n\r\n{body}"


def _events(*events: tuple[int | None, str]) -> str:
    lines = [("" if n is None else f"id: tf-1:{n}\n") + f"data: {data}\n\n" for n, data in events]
    return _http("text/event-stream", "".join(lines))


async def test_half_a_record_is_none_and_a_request_without_an_answer_is_made_again(browser: Path) -> None:
    role, one, two, three = (json.dumps({"choices": [{"delta": {"content": text}}]}) for text in ("", "1", "2", "3"))
    script = Script(
        "",
        _events((None, role), (1, one), (None, two)),
        _http("text/plain", "upstream is gone", "502 Bad Gateway"),
        _events((None, two), (2, three)),
        _events((3, "[DONE]")),
    )
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, script.serve, [listener])
        async with visiting(browser, listener.socket.getsockname()[1]) as tab:
            assert await answered(tab, "hello") == "123"
        nursery.cancel_scope.cancel()
    first, again, *on = script.asked
    assert first == again and "Idempotency-Key: " in first
    assert [re.findall("^GET (.*) HTTP|^Last-Event-ID: (.*)\r", asked, re.MULTILINE) for asked in on] == [
        [("/v1/streams/tf-1", ""), ("", f"tf-1:{n}")] for n in (1, 1, 2)
    ]


# --- keys -------------------------------------------------------------------------------------------------------------


async def test_a_wrong_key_is_asked_for_again(browser: Path, tmp_path: Path) -> None:
    def asks(why: str) -> str:
        return f"document.querySelector('#login').open && document.querySelector('#why').textContent === '{why}'"

    with serving(tmp_path, KEYS) as server:
        async with open_tab(browser) as tab:
            await tab.visit(server.url + "/")
            await tab.until(asks("This server wants an API key."))
            await tab.press("Escape")
            await tab.until("document.querySelector('#notice').textContent === 'This server wants an API key.'")
            await tab.type("hello\n")
            await tab.until(asks("This server wants an API key."))
            await tab.type("wrong\n")
            await tab.until(asks("Incorrect API key provided."))
            await tab.type("right\n")
            assert "stop" in await ended(tab)
            assert await tab.run("[{...sessionStorage}, {...localStorage}]") == [{"api_key": "right"}, {}]
