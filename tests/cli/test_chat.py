"""`tokenflow chat` against a server in this process, and once over a socket, from another one."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import httpx2
import pytest
import trio

from tests.cli.conftest import CONFIG
from tests.cutproxy import Cut, cutting
from tests.e2e.conftest import serving
from tokenflow.cli import chat
from tokenflow.cli.chat import converse, printable, say
from tokenflow.cli.talk import ChatError, Reply, Talk

try:
    import readline
except ImportError:
    readline = None

URL = "http://server:1"
HELLO = [{"role": "user", "content": "hello"}]


def chunk(text: str | None = None, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


END = chunk(finish_reason="stop") + b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
WHOLE = [chunk(""), b": ping\n\n", chunk("to")[:9], chunk("to")[9:] + chunk("ken"), END]


class Body(httpx2.AsyncByteStream):
    """A response's body; after its pieces it may wait for ever, as a slow model does."""

    def __init__(self, pieces: list[bytes], *, then: Callable[[], object] | None = None) -> None:
        self.pieces = pieces
        self.then = then
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        if self.then is not None:
            self.then()
            await trio.sleep_forever()

    async def aclose(self) -> None:
        self.closed = True


class Server:
    """Answers with what it is given, and keeps what it was asked."""

    def __init__(self, *answers: httpx2.Response) -> None:
        self.answers = list(answers)
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        return self.answers.pop(0)

    def talk(self, **changes: object) -> Talk:
        return Talk(**{"url": URL, "model": "m", "transport": httpx2.MockTransport(self)} | changes)

    def bodies(self) -> list[dict]:
        return [json.loads(request.content) for request in self.requests if request.content]


EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}


def answer(pieces: list[bytes] = WHOLE) -> httpx2.Response:
    return httpx2.Response(200, headers=EVENTS, stream=Body(pieces))


async def ask(talk: Talk) -> tuple[Reply, list[str]]:
    shown: list[str] = []
    return await talk.ask(HELLO, shown.append), shown


# --- one answer -----------------------------------------------------------------------------------------------------


async def test_an_answer_in_pieces() -> None:
    server = Server(answer())
    reply, shown = await ask(server.talk(options={"max_tokens": 5}))
    assert shown == ["to", "ken"]
    assert reply == Reply(text="token", finish_reason="stop", done=True)
    [request] = server.requests
    assert str(request.url) == f"{URL}/v1/chat/completions"
    assert "authorization" not in request.headers
    options = {"on_disconnect": "pause", "include_usage": True}
    assert server.bodies() == [
        {"model": "m", "messages": HELLO, "max_tokens": 5, "stream": True, "stream_options": options}
    ]


async def test_the_first_model_and_the_key() -> None:
    server = Server(httpx2.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]}), answer())
    await ask(server.talk(model=None, key="secret"))
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer secret"] * 2
    assert server.bodies()[0]["model"] == "first"


def models(own: object = None, **capabilities: object) -> httpx2.Response:
    offered = [{"id": id, "capabilities": can, "defaults": own} for id, can in capabilities.items()]
    return httpx2.Response(200, json={"data": offered})


USUAL = {
    "it can": (models(other=[], m=["temperature"]), {"temperature": 0.3}),
    "it has a default": (models(m=["temperature"], own={"temperature": 1}), {}),
    "it cannot": (models(other=["temperature"], m=["pause"]), {}),
    "it is not listed": (models(other=["temperature"]), {}),
    "another server": (httpx2.Response(200, json={"data": [{"id": "m"}]}), {}),
    "a hostile one": (models(m=7), {}),
    "no list": (httpx2.Response(404), {}),
    "something else": (httpx2.Response(200, text="<html>"), {}),
}


@pytest.mark.parametrize(("response", "sent"), USUAL.values(), ids=USUAL)
async def test_what_nobody_asked_for_is_sent_where_the_model_can_do_it(response: httpx2.Response, sent: dict) -> None:
    server = Server(response, answer())
    await ask(server.talk(usual={"temperature": 0.3}))
    assert [request.url.path for request in server.requests] == ["/v1/models", "/v1/chat/completions"]
    assert server.bodies()[0].get("temperature") == sent.get("temperature")


@pytest.mark.parametrize(
    ("response", "sent"),
    [
        (models(m=[]), 1024),
        (models(m=[], own={"max_tokens": 99}), None),
        (httpx2.Response(404), 1024),
    ],
)
async def test_an_answer_is_as_long_as_the_models_default(response: httpx2.Response, sent: int | None) -> None:
    server = Server(response, answer())
    await ask(server.talk(usual={"max_tokens": 1024}))
    assert server.bodies()[0].get("max_tokens") == sent


async def test_what_was_asked_for_is_sent() -> None:
    server = Server(models(m=[]), answer())
    await ask(server.talk(model=None, options={"temperature": 0.5}))
    assert server.bodies()[0]["temperature"] == 0.5


ERROR = {"error": {"message": "No such model.", "code": "model_not_found"}}
REFUSALS = {
    "envelope": (httpx2.Response(404, json=ERROR), "No such model. (model_not_found)"),
    "no code": (httpx2.Response(400, json={"error": {"message": "No."}}), "No."),
    "no message": (httpx2.Response(400, json={"error": {"x": 1}}), "the server reports an error"),
    "text": (httpx2.Response(400, json={"error": "nope"}), "nope"),
    "no envelope": (httpx2.Response(502, text="<html>"), "the server answered 502; is it tokenflow?"),
    "no object": (httpx2.Response(502, text="[]"), "the server answered 502; is it tokenflow?"),
    "in the stream": (
        answer([chunk("to"), f"data: {json.dumps(ERROR)}\n\n".encode()]),
        "No such model. (model_not_found)",
    ),
    "cut": (answer([chunk("to")]), "the answer was cut off: the connection was closed before the end"),
    "nonsense": (answer([b"data: nonsense\n\n"]), "this is no JSON: 'nonsense'"),
    "no stream": (
        httpx2.Response(200, text="hi"),
        f"{URL}/v1/chat/completions answered with no event stream; is it tokenflow?",
    ),
}


@pytest.mark.parametrize(("response", "message"), REFUSALS.values(), ids=REFUSALS)
async def test_what_the_server_says_is_shown(response: httpx2.Response, message: str) -> None:
    with pytest.raises(ChatError) as caught:
        await ask(Server(response).talk())
    assert caught.value.message == message


MODELS = {
    "refused": (httpx2.Response(403, json={"error": {"message": "Not you."}}), "Not you."),
    "none": (httpx2.Response(200, json={"data": []}), "the server lists no models"),
    "no JSON": (httpx2.Response(200, text="x"), "http://server:1 lists no models as OpenAI's dialect does"),
}


@pytest.mark.parametrize(("response", "message"), MODELS.values(), ids=MODELS)
async def test_no_first_model(response: httpx2.Response, message: str) -> None:
    with pytest.raises(ChatError) as caught:
        await ask(Server(response).talk(model=None))
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("model", [None, "m"])
@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "the server wants an API key; pass --key, or set TOKENFLOW_KEY"),
        ("k", "Wrong; look at --key and TOKENFLOW_KEY"),
    ],
)
async def test_keys(key: str | None, message: str, model: str | None) -> None:
    server = Server(*[httpx2.Response(401, json={"error": {"message": "Wrong.", "code": "x"}}) for _ in range(2)])
    with pytest.raises(ChatError) as caught:
        await ask(server.talk(key=key, model=model, usual={"temperature": 0.3}))
    assert caught.value.message == message


FAULTS = {
    "connect": (httpx2.ConnectError("all failed"), "cannot reach http://server:1: all failed; start it with"),
    "timeout": (httpx2.ReadTimeout("x"), "http://server:1 did not answer in time; see its log"),
    "broken": (httpx2.RemoteProtocolError("peer left"), "the connection to http://server:1 broke: peer left;"),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
async def test_faults_of_the_network(fault: Exception, message: str) -> None:
    def fail(request: httpx2.Request) -> httpx2.Response:
        raise fault

    with pytest.raises(ChatError) as caught:
        await ask(Talk(url=URL, transport=httpx2.MockTransport(fail)))
    assert caught.value.message.startswith(message)


async def test_no_url() -> None:
    with pytest.raises(ChatError, match=r"'server' is no URL .*; write one like http://127.0.0.1:8000"):
        await ask(Talk(url="server", model="m"))


UNSENDABLE = {
    **{
        name: ({"key": key}, HELLO, "the API key is empty or has a character that no key has")
        for name, key in {"key": "ké", "key of two lines": "a\nb", "key and a blank": "a ", "no key": ""}.items()
    },
    "model": ({"model": "\udcff"}, HELLO, "the model's id is not UTF-8"),
    "message": ({}, [{"role": "user", "content": "\udcff"}, *HELLO], "the user's message is not UTF-8"),
    "number": ({"options": {"temperature": float("nan")}}, HELLO, "temperature is nan"),
}


@pytest.mark.parametrize(("changes", "messages", "message"), UNSENDABLE.values(), ids=UNSENDABLE)
async def test_what_no_request_can_carry(changes: dict, messages: list, message: str) -> None:
    server = Server()
    with pytest.raises(ChatError) as caught:
        await server.talk(**changes).ask(messages, print)
    assert caught.value.message.startswith(message) and not server.requests


async def test_ctrl_c_closes_the_response() -> None:
    body = Body([chunk("to")], then=lambda: signal.raise_signal(signal.SIGINT))
    reply, shown = await ask(Server(httpx2.Response(200, headers=EVENTS, stream=body)).talk())
    assert shown == ["to"]
    assert (reply.text, reply.interrupted, reply.done) == ("to", True, False)
    assert body.closed


async def test_who_is_met_before_anything_is_asked() -> None:
    offered = models(first=[], second=[])
    assert (await Server(offered).talk(model=None).meet()).model == "first"
    assert (await Server(offered).talk(model="second").meet()).model == "second"
    assert (await Server(httpx2.Response(404)).talk().meet()).model == "m"  # another server may list none


MANY = httpx2.Response(200, json={"data": [{"id": f"m{number}"} for number in range(30)]})
STRANGERS = {
    "another model": (models(first=[], second=[]), {}, 'no model "m" is served there; there is first, second'),
    "none of many": (MANY, {}, 'no model "m" is served there; there is m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, …'),
    "no model": (httpx2.Response(200, json={"data": []}), {"model": None}, "the server lists no models"),
    "no key": (httpx2.Response(401), {}, "the server wants an API key; pass --key, or set TOKENFLOW_KEY"),
    "a broken key": (models(m=[]), {"key": "ké"}, "the API key is empty or has a character that no key has"),
}


@pytest.mark.parametrize(("response", "changes", "message"), STRANGERS.values(), ids=STRANGERS)
async def test_who_cannot_be_talked_with(response: httpx2.Response, changes: dict, message: str) -> None:
    with pytest.raises(ChatError) as caught:
        await Server(response).talk(**changes).meet()
    assert caught.value.message.startswith(message)


# --- in the terminal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\nb\tc d", "zwölf 十二 🦆", "e\u0301"])
def test_text_is_shown_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_the_terminal_cannot_be_driven() -> None:
    assert printable("a\x1b]0;title\x07b\r\x9b2Jc\x7f") == "a]0;titleb2Jc"


def test_reasoning_is_shown_and_no_part_of_what_is_piped_on(capsys: pytest.CaptureFixture[str]) -> None:
    def thought(text: str) -> bytes:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'reasoning_content': text}}]})}\n\n".encode()

    reply = say(Server(answer([thought("Let me"), thought(" see."), *WHOLE])).talk(), HELLO)
    shown = capsys.readouterr()
    assert (reply.text, shown.out) == ("token", "token\n")
    assert click.unstyle(shown.err) == "Let me see.\n\n"


def test_a_line_end_follows_what_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say(Server(answer()).talk(), HELLO)
    assert capsys.readouterr().out == "token\n"
    with pytest.raises(ChatError):
        say(Server(answer([chunk("to")])).talk(), HELLO)
    assert capsys.readouterr().out == "to\n"
    with pytest.raises(ChatError):
        say(Server(httpx2.Response(500)).talk(), HELLO)
    assert capsys.readouterr().out == ""


def cut(**usage: int) -> httpx2.Response:
    counts = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode() if usage else b""
    return answer([chunk("to"), chunk(finish_reason="length"), counts + b"data: [DONE]\n\n"])


def test_an_answer_that_its_length_cut_says_so_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    say(Server(cut()).talk(), HELLO)
    shown = capsys.readouterr()
    assert shown.out == "to\n"
    assert shown.err == "(cut short: --max-tokens, the server or the context allows no more)\n"
    say(Server(answer()).talk(), HELLO)
    assert capsys.readouterr().err == ""


WHY_CUT = {
    "an option": ({"max_tokens": 5}, {}, {"completion_tokens": 5}, "--max-tokens is 5"),
    "no option": ({}, {}, {"completion_tokens": 7}, "the server or the context allows no more"),
    "the context": (
        {"max_tokens": 6},
        {"context_length": 9},
        {"prompt_tokens": 3, "completion_tokens": 6},
        "the model's context of 9 tokens is full",
    ),
    "the model's default": (
        {},
        {"defaults": {"max_tokens": 7}},
        {"completion_tokens": 7},
        "the server's default for this model is 7 tokens; --max-tokens asks for more",
    ),
    "the server": (
        {"max_tokens": 50},
        {"context_length": 99},
        {"prompt_tokens": 3, "completion_tokens": 20},
        "the server allows no more than 20 tokens",
    ),
    "the server, or a context that is not told": (
        {"max_tokens": 50},
        {},
        {"completion_tokens": 20},
        "the server or the context allows no more",
    ),
}


@pytest.mark.parametrize(("options", "listed", "usage", "why"), WHY_CUT.values(), ids=WHY_CUT)
async def test_what_cut_an_answer(options: dict, listed: dict, usage: dict, why: str) -> None:
    server = Server(httpx2.Response(200, json={"data": [{"id": "m"} | listed]}), cut(**usage))
    reply, _ = await ask(server.talk(options=options, usual={"temperature": 0.3}))
    assert reply.why_cut.startswith(why)


def typing(*lines: str | BaseException) -> Callable[[str], str]:
    """What a person types, then Ctrl-D."""
    remaining = [*lines, EOFError()]

    def ask_for(prompt: str) -> str:
        line = remaining.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    return ask_for


def test_a_conversation_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(answer(), answer([chunk("yes"), END]))
    converse(server.talk(), [{"role": "system", "content": "Be brief."}], typing("hello", "  ", "really?"))
    assert server.bodies()[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "token"},
        {"role": "user", "content": "really?"},
    ]
    assert capsys.readouterr().out == "token\nyes\n\n"


def test_ctrl_c_ends_the_answer_and_not_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    body = Body([chunk("to")], then=lambda: signal.raise_signal(signal.SIGINT))
    server = Server(httpx2.Response(200, headers=EVENTS, stream=body), answer())
    converse(server.talk(), [], typing("hello", KeyboardInterrupt(), "again"))
    assert [message["content"] for message in server.bodies()[1]["messages"]] == ["hello", "to", "again"]
    assert capsys.readouterr().out == "to\n\n(Ctrl-D leaves)\ntoken\n\n"


def test_a_failed_turn_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(httpx2.Response(500, json=ERROR), answer([END]), answer())
    converse(server.talk(), [], typing("one", "two", "three"))
    assert [body["messages"] for body in server.bodies()] == [
        [{"role": "user", "content": text}] for text in ("one", "two", "three")
    ]
    assert capsys.readouterr().err == "tokenflow: No such model. (model_not_found)\n"


SYSTEM = {"role": "system", "content": "Be brief."}


def test_a_new_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(answer(), answer())
    converse(server.talk(), [SYSTEM], typing("hello", " /new ", "again"))
    assert server.bodies()[1]["messages"] == [SYSTEM, {"role": "user", "content": "again"}]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("token\ntoken\n\n", "(a new conversation)\n")


@pytest.mark.parametrize("line", ["/bye", "/exit", "/quit "])
def test_leaving(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    converse(server.talk(), [], typing(line, "never read"))
    assert (server.requests, capsys.readouterr()) == ([], ("", ""))


NOT_SENT = {
    "/news": "/news is none of /help's",
    "/set temperature 1": "/set is none of /help's",
    "/?": "/? is none of /help's",
    "/new and now?": "/new stands alone on its line",
}


@pytest.mark.parametrize(("line", "why"), NOT_SENT.items(), ids=NOT_SENT)
def test_a_command_that_is_none_is_named_and_not_sent(line: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    converse(server.talk(), [], typing(line))
    assert server.requests == []
    assert capsys.readouterr().err == f"(not sent: {why}; with a blank before it the line is sent)\n"


@pytest.mark.parametrize("line", ["/etc/hosts is what?", " /news", "/ is a root", "a /b"])
def test_other_slashes_are_sent(line: str) -> None:
    server = Server(answer())
    converse(server.talk(), [], typing(line))
    assert server.bodies()[0]["messages"] == [{"role": "user", "content": line}]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    converse(Server().talk(), [], typing("/help"))
    said = capsys.readouterr().err
    assert all(word in said for word in ("/new ", "/bye ", "/exit", "/quit", "/help ", "Ctrl-C", "Ctrl-D"))


def too_long(status: int, **error: str) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"message": "No."} | error})


TOO_LONG = {
    "the context": (too_long(400, code="context_length_exceeded"), True),
    "a limit": (too_long(400, param="messages", code="invalid_value"), True),
    "the body": (too_long(413, code="body_too_large"), True),
    "something else": (too_long(400, param="model", code="invalid_value"), False),
    "a failure": (too_long(500), False),
}


@pytest.mark.parametrize(("response", "outgrown"), TOO_LONG.values(), ids=TOO_LONG)
def test_a_conversation_that_outgrew_its_context(
    response: httpx2.Response, outgrown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(Server(answer(), response).talk(), [SYSTEM], typing("hello", "again"))
    assert ("; /new begins a new conversation\n" in capsys.readouterr().err) == outgrown


def test_one_message_too_long_is_not_mended_by_a_new_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    converse(Server(too_long(400, code="context_length_exceeded")).talk(), [SYSTEM], typing("hello"))
    assert capsys.readouterr().err == "tokenflow: No. (context_length_exceeded)\n"


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def talks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Talk, list]]:
    """The talks that the command began, each answered at once."""
    begun: list[tuple[Talk, list]] = []

    def say_nothing(talk: Talk, messages: list) -> Reply:
        begun.append((talk, messages))
        return Reply(interrupted=messages[-1]["content"] == "interrupt me")

    monkeypatch.setattr(chat, "say", say_nothing)
    return begun


def test_options(run, talks) -> None:
    flags = ("--url", "http://h:1/", "--key", "k", "--model", "m", "--max-tokens", "5", "--temperature", "0.5")
    assert run("chat", "hello", *flags, "--system", "Be brief.").exit_code == 0
    [(talk, messages)] = talks
    assert talk == Talk(url="http://h:1", key="k", model="m", options={"max_tokens": 5, "temperature": 0.5})
    assert messages == [{"role": "system", "content": "Be brief."}, *HELLO]


def test_environment(run, talks) -> None:
    run("chat", "hello", env={"TOKENFLOW_URL": "http://h:2", "TOKENFLOW_KEY": "k"})
    usual = {"max_tokens": 1024, "temperature": 0.3}
    assert talks == [(Talk(url="http://h:2", key="k", usual=usual), HELLO)]


@pytest.mark.parametrize("value", ["-0.1", "2.1", "hot"])
def test_a_temperature_that_no_server_takes(value: str, run, talks) -> None:
    result = run("chat", "hello", "--temperature", value)
    assert (result.exit_code, talks) == (2, []) and value in result.stderr


def test_a_pipe_is_the_message(run, talks) -> None:
    run("chat", input="hello")
    assert talks[0][1] == HELLO


@pytest.mark.parametrize("piped", ["some text\n", "some text"])
def test_a_pipe_comes_before_the_message(piped: str, run, talks) -> None:
    run("chat", "hello", input=piped)
    run("chat", "", input=piped)
    assert [messages[0]["content"] for _, messages in talks] == ["some text\n\nhello", "some text"]


def test_an_empty_pipe_leaves_the_message_as_it_is(run, talks) -> None:
    run("chat", " hello\n", input="\n")
    assert talks[0][1] == [{"role": "user", "content": " hello\n"}]


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Gives the command another standard input, by its number."""
    with ExitStack() as stack:
        monkeypatch.setattr(chat, "SOON_S", 0.0)
        yield lambda number: monkeypatch.setattr("sys.stdin", stack.enter_context(open(number, encoding="utf-8")))


def test_what_cron_and_ci_leave_there_is_no_wait(inherited, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("some text")
    closed, ours = os.pipe()
    os.close(ours)
    numbers = [closed, os.open(os.devnull, os.O_RDONLY), os.open(tmp_path / "notes", os.O_RDONLY)]
    read = []
    for number in numbers:
        inherited(number)
        assert chat._to_come()
        read.append(chat._piped())
    assert read == ["", "", "some text"]
    assert capsys.readouterr().err == ""


def test_a_pipe_that_says_nothing_is_waited_for_and_that_is_said(inherited, capsys: pytest.CaptureFixture[str]) -> None:
    silent, ours = os.pipe()
    inherited(silent)
    assert chat._to_come()
    os.close(ours)
    assert "give `< /dev/null` where nothing is to come" in capsys.readouterr().err


def test_a_socket_that_says_nothing_is_not_waited_for(inherited, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        inherited(theirs.detach())
        assert not chat._to_come()
        assert capsys.readouterr().err == "(nothing comes through standard input: asked without it)\n"
        ours.sendall(b"some text")
        assert chat._to_come()


def test_a_pipe_of_any_bytes_is_a_message(run, talks) -> None:
    run("chat", input=b"\xff\r\n")
    assert talks[0][1] == [{"role": "user", "content": "\udcff\n"}]


@pytest.mark.parametrize(
    ("arguments", "piped"), [([""], ""), ([" \n"], ""), ([], ""), ([], "\n")], ids=["none", "blank", "no pipe", "empty"]
)
def test_an_empty_message(arguments: list[str], piped: str, run, talks) -> None:
    result = run("chat", *arguments, input=piped)
    assert (result.exit_code, talks) == (1, [])
    assert result.stderr == "tokenflow: the message is empty; write one as an argument, or send one through a pipe\n"


def test_the_help_says_how_to_begin_anew(run) -> None:
    assert "/new begins a new conversation" in " ".join(run("chat", "--help").stdout.split())


def test_no_standard_input_is_an_empty_message(run, talks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert not chat._is_terminal() and not chat._to_come() and chat._piped() == ""


def test_interrupted(run, talks) -> None:
    assert run("chat", "interrupt me").exit_code == 130


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, list]]:
    """The model and the opening of each conversation, in a terminal."""
    begun: list[tuple[str | None, list]] = []
    monkeypatch.setattr(chat, "converse", lambda talk, opening: begun.append((talk.model, opening)))
    monkeypatch.setattr(chat, "_is_terminal", lambda: True)
    return begun


def test_a_terminal_is_a_conversation(run, conversations, folder: Path) -> None:
    with serving(folder, CONFIG) as server:
        result = run("chat", "--system", "Be brief.", "--url", server.url)
        assert result.stderr == f"Talking to m on {server.url}; /help says more, /bye or Ctrl-D leaves.\n"
        assert conversations == [("m", [SYSTEM])]
        result = run("chat", "--model", "n", "--url", server.url)
    assert (result.exit_code, result.stderr) == (1, 'tokenflow: no model "n" is served there; there is m\n')
    result = run("chat", "--url", server.url)
    assert result.exit_code == 1 and result.stderr.startswith(f"tokenflow: cannot reach {server.url}")
    assert len(conversations) == 1


@pytest.mark.skipif("GNU readline" not in (getattr(readline, "__doc__", None) or ""), reason="there is no GNU readline")
def test_a_pasted_text_of_several_lines_is_one_message() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Whole) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever).start()
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "tokenflow", "chat", "--url", f"http://127.0.0.1:{server.server_port}"]
        env = {**os.environ, "TERM": "xterm"}
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
        try:
            os.close(theirs)
            for awaited, typed in ((b"\x1b[?2004h> ", b"\x1b[200~a\rb\x1b[201~\r"), (b"token\r\n", b"/bye\r")):
                shown = b""
                while awaited not in shown:
                    shown += os.read(ours, 4096)
                os.write(ours, typed)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
            server.shutdown()
    assert [message["content"] for body in server.asked for message in body["messages"]] == ["a\nb"]


def test_nobody_listens(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    result = run("chat", "hello", "--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == 1
    assert result.stderr == (
        f"tokenflow: cannot reach http://127.0.0.1:{port}: Connection refused; "
        "start it with `tokenflow serve`, or pass --url\n"
    )


def test_a_model_without_a_chat_template(run, folder: Path) -> None:
    """And without a temperature, which is not what is wrong."""
    with serving(folder, CONFIG) as server:
        for options in ((), ("--model", "m"), ("--temperature", "1.5")):
            result = run("chat", "hello", "--url", server.url, *options)
            assert result.exit_code == 1
            assert result.stderr.startswith("tokenflow: This model has no chat template; use /v1/completions.")


def test_a_model_without_a_temperature(run, folder: Path) -> None:
    with serving(folder, CONFIG + '[models.m.chat]\ntemplate = "{{ messages[0].content }}"\n') as server:
        result = run("chat", "hello", "--url", server.url)
        assert (result.exit_code, result.stdout) == (0, "token\n")
        result = run("chat", "hello", "--url", server.url, "--temperature", "0.3")
        assert result.stderr.startswith("tokenflow: This model's engine cannot do temperature.")


# --- over connections that break ------------------------------------------------------------------------------------

SLOW = """
[models.words]
engine = "synthetic"
tokens_per_s = 100.0
"""


async def test_cut_and_cut_again_the_answer_is_whole(tmp_path: Path) -> None:
    with serving(tmp_path, SLOW) as server:
        whole, _ = await ask(Talk(url=server.url, options={"max_tokens": 40}))
        plan = [Cut(1500, "rst"), Cut(1200), Cut(60), Cut(900, "rst"), Cut(0)]
        async with cutting(server.port, plan) as proxy:
            url = f"http://127.0.0.1:{proxy.port}"
            reply, shown = await ask(Talk(url=url, model="words", options={"max_tokens": 40}))
        assert reply == whole and reply.done and reply.finish_reason == "length"
        assert "".join(shown) == whole.text and len(whole.text.split()) > 20
    assert [connection.ended for connection in proxy.log] == ["rst", "fin", "fin", "rst", "fin", "client"]
    asked = [bytes(connection.up).split(b" ")[0] for connection in proxy.log]
    assert asked == [b"POST", b"GET", b"GET", b"GET", b"", b"GET"]  # one was cut before it could ask


async def test_the_command_over_a_connection_that_is_cut(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenflow", "chat", "hello", "--max-tokens", "30", "--url"]
    with serving(tmp_path, SLOW) as server:
        async with cutting(server.port, [Cut(2500)]) as proxy:
            through = await trio.run_process([*command, f"http://127.0.0.1:{proxy.port}"], capture_stdout=True)
            direct = await trio.run_process([*command, server.url], capture_stdout=True)
    assert through.stdout == direct.stdout
    assert "fin" in [connection.ended for connection in proxy.log]


class Whole(BaseHTTPRequestHandler):
    """Lists a model, and answers."""

    def do_GET(self) -> None:
        self.answer("application/json", b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer("text/event-stream", b"".join(WHOLE))

    def answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class Handler(BaseHTTPRequestHandler):
    """Sends one piece and then none; notices when the client leaves."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(chunk("to"))
        self.wfile.flush()
        self.connection.settimeout(10)
        if self.connection.recv(1) == b"":
            self.server.left.set()

    def log_message(self, *_: object) -> None: ...


def test_ctrl_c_in_a_process_of_its_own() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.left = threading.Event()
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-m", "tokenflow", "chat", "hello", "--model", "m", "--url", url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.read(2) == b"to"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=10)
            assert (process.returncode, out, err) == (130, b"\n", b"")
            assert server.left.wait(10)
        finally:
            process.kill()
            process.wait()
            server.shutdown()
