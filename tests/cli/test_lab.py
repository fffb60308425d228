"""`tokenflow lab` against the server that it is meant for, and against those that it is not."""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import trio
from tokenflow_synthetic import generate

from tests.e2e.conftest import serving
from tokenflow.cli import figures, lab
from tokenflow.cli.figures import ASKED, TOKENS, Found, Timed, expected_text, percentile
from tokenflow.cli.measure import LabError, Measuring

CONFIG = Path(__file__).parents[2] / "conf" / "lab.toml"
URL = "http://server:1"


def test_the_exercise(run, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "lab-out"
    with serving(tmp_path / "server", CONFIG.read_text()) as server:
        result = run("lab", "--url", server.url + "/", "--out", str(out))
        assert result.exit_code == 0, result.output
        log = server.log
    files = {path.name: path.read_text() for path in out.iterdir()}
    assert files["gen1.txt"] == files["gen2.txt"] == generate("The duck swims", TOKENS)
    ttft = re.fullmatch(r"ttft_ms=(\d+)\n", files["ttft.txt"])
    itl = re.fullmatch(r"count=(\d+) p50_ms=([\d.]+) p99_ms=([\d.]+)\n", files["itl.txt"])
    cancel = re.fullmatch(r"requested=100 generated=(\d+)\n", files["cancel.txt"])
    report = re.fullmatch(
        r"ttft_ms=(\d+)\nitl_p50_ms=([\d.]+)\ntokens=(\d+)\nthroughput_tps=([\d.]+)\n", files["report.txt"]
    )
    assert ttft and itl and cancel and report
    assert 100 <= int(ttft[1]) < 3000  # the prefill alone takes 100
    assert int(itl[1]) == TOKENS - 1 and 0 < float(itl[2]) <= float(itl[3])
    assert 5 <= int(cancel[1]) <= 7  # ours; the exercise allows 30
    assert (report[1], report[2], int(report[3])) == (ttft[1], itl[2], TOKENS)
    assert 0 < float(report[4]) < 60
    assert "499 client left" in log.splitlines()[-1]
    assert "requested=100" in result.stdout and not result.stderr


def test_the_configuration_is_the_one_that_the_default_url_means() -> None:
    config = CONFIG.read_text()
    assert "port = 8170" in config and "debug = true" in config
    [url] = [option for option in lab.lab_command.params if option.name == "url"]
    assert url.default == "http://127.0.0.1:8170"


def test_nobody_there_is_one_line(run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    result = run("lab", "--url", f"http://127.0.0.1:{port}", "--out", str(tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"tokenflow: cannot reach http://127.0.0.1:{port}: Connection refused; "
        "start it with `tokenflow serve -c conf/lab.toml`, or pass --url\n"
    )
    assert not (tmp_path / "out").exists()


# --- bounds ---------------------------------------------------------------------------------------------------------

GOOD = Found(
    prompt="p",
    texts=("a b", "a b"),
    expected="a b",
    timed=Timed(text="a b", arrivals_s=tuple(0.1 + 0.02 * i for i in range(20)), total_s=0.5),
    generated=5,
)
BROKEN = {
    "texts differ": (replace(GOOD, texts=("a b", "a c")), "two different texts"),
    "unexpected": (replace(GOOD, expected="x"), "not what the synthetic engine's generate"),
    "streamed text": (replace(GOOD, timed=replace(GOOD.timed, text="a")), "not the one that comes whole"),
    "slow": (
        replace(GOOD, timed=replace(GOOD.timed, arrivals_s=tuple(3 + i for i in range(20)))),
        "3000 ms to the first token",
    ),
    "few": (replace(GOOD, timed=replace(GOOD.timed, arrivals_s=(0.1, 0.2))), "only 1 gaps"),
    "much": (replace(GOOD, generated=31), "31 tokens made for a reader that left after 5; at most 30"),
    "little": (replace(GOOD, generated=4), "4 tokens made"),
}


def test_within_bounds() -> None:
    assert GOOD.problems() == []
    assert replace(GOOD, expected=None, generated=30).problems() == []
    assert GOOD.files()["itl.txt"] == "count=19 p50_ms=20.00 p99_ms=20.00\n"
    assert GOOD.files()["report.txt"] == "ttft_ms=100\nitl_p50_ms=20.00\ntokens=20\nthroughput_tps=40.00\n"


@pytest.mark.parametrize(("found", "words"), BROKEN.values(), ids=BROKEN)
def test_out_of_bounds(found: Found, words: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Measuring, *_: object) -> Found:
        return found

    monkeypatch.setattr(Measuring, "run", nothing)
    monkeypatch.setattr(Measuring, "check", nothing)
    result = run("lab", "--out", str(tmp_path))
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("tokenflow: out of bounds: ") and words in line
    assert (tmp_path / "report.txt").exists()


def test_percentiles_are_values_that_were_measured() -> None:
    assert [percentile(range(1, 101), p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert (percentile([7.0], 99), percentile([], 50)) == (7.0, 0.0)


def test_without_the_plugin_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(figures.importlib, "import_module", missing)
    assert expected_text("p", 3) is None


# --- other servers --------------------------------------------------------------------------------------------------

EVENTS = {"Content-Type": "text/event-stream", "X-Request-Id": "tf-1"}
WORDS = "".join(f'data: {{"token":" {i}"}}\n\n' for i in range(TOKENS))


class Lab:
    """Answers as the lab's server does, except where a test says otherwise."""

    def __init__(self, **instead: Callable[[], httpx2.Response] | httpx2.Response) -> None:
        self.instead = instead
        self.counts = [3, 5, 6, 6]

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        name = request.url.path.rsplit("/", 1)[1]
        if request.url.params.get("on_disconnect") == "cancel":
            name = "cancelled"
        if (answer := self.instead.get(name)) is not None:
            return answer() if callable(answer) else answer
        if name == "generated":
            last = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
            return httpx2.Response(200, json={"last": last, "total": 9, "last_stream": "tf-1"})
        if name == "generate":
            return httpx2.Response(200, json={"text": "".join(f" {i}" for i in range(TOKENS)), "usage": {}})
        return httpx2.Response(200, headers=EVENTS, stream=Piece(WORDS + "data: [DONE]\n\n"))

    def measuring(self) -> Measuring:
        return Measuring(url=URL, key="k", prompt="p", transport=httpx2.MockTransport(self))


class Piece(httpx2.AsyncByteStream):
    def __init__(self, text: str) -> None:
        self.text = text

    async def __aiter__(self):
        await trio.lowlevel.checkpoint()
        yield self.text.encode()

    async def aclose(self) -> None: ...


def events(text: str) -> httpx2.Response:
    return httpx2.Response(200, headers=EVENTS, stream=Piece(text))


async def test_it_waits_until_the_count_stands_still(autojump_clock) -> None:
    steps: list[int] = []
    found = await Lab().measuring().run(steps.append)
    assert found.generated == 6
    assert sum(steps) == figures.TOKENS_IN_ALL
    assert (found.texts[0], found.timed.text) == (found.texts[1], found.texts[0])


def count(**fields: object) -> httpx2.Response:
    return httpx2.Response(200, json={"last": 5, "total": 5, "last_stream": "tf-1"} | fields)


ERROR = {"error": {"message": "Busy.", "type": "x", "param": None, "code": "queue_full"}}
OTHERS = {
    "no debug": (dict(generated=httpx2.Response(404)), r"does not count its tokens \(debug = true\); start it with"),
    "no tokenflow": (dict(generated=httpx2.Response(200, text="<html>")), "answered something else; is it tokenflow"),
    "another count": (dict(generated=httpx2.Response(200, json={})), "answered something else; is it tokenflow"),
    "no route": (dict(generate=httpx2.Response(404)), r"the server says: the server answered 404.*\(http_404\)"),
    "refused": (dict(stream=httpx2.Response(503, json=ERROR)), r"the server says: Busy. \(queue_full\)"),
    "failed": (dict(stream=lambda: events(f"event: error\ndata: {json.dumps(ERROR)}\n\n")), "the server says: Busy."),
    "no token": (dict(stream=lambda: events("data: x\n\n")), "this is no token: 'x'"),
    "nothing": (dict(stream=lambda: events("data: [DONE]\n\n")), "brought no token"),
    "cut": (dict(stream=lambda: events(WORDS)), "the stream was cut off"),
    "not alone": (dict(generated=lambda: count(last_stream="tf-2")), "somebody else uses this server"),
}


@pytest.mark.parametrize(("instead", "words"), OTHERS.values(), ids=OTHERS)
async def test_other_servers(instead: dict[str, httpx2.Response], words: str, autojump_clock) -> None:
    measuring = Lab(**instead).measuring()
    with pytest.raises(LabError, match=words):
        await measuring.check()
        await measuring.run(lambda steps: None)


@pytest.mark.parametrize(("key", "words"), [(None, "wants an API key; pass --key"), ("k", "^Wrong; look at --key and")])
async def test_a_server_with_keys(key: str | None, words: str) -> None:
    refusal = httpx2.Response(401, json={"error": {"message": "Wrong."}})
    measuring = Measuring(url=URL, key=key, prompt="p", transport=httpx2.MockTransport(lambda _: refusal))
    with pytest.raises(LabError, match=words):
        await measuring.check()


async def test_a_server_that_never_stops(autojump_clock) -> None:
    made = iter(range(ASKED * 100))
    with pytest.raises(LabError, match="the server still generates"):
        await Lab(generated=lambda: count(last=next(made))).measuring().run(lambda steps: None)


async def test_a_connection_that_breaks() -> None:
    def broken() -> httpx2.Response:
        raise httpx2.ReadError("reset")

    with pytest.raises(LabError, match="the connection to http://server:1 broke: reset"):
        await Lab(generate=broken).measuring().run(lambda steps: None)


@pytest.mark.parametrize("cause", [ssl.SSLError(1, "no"), socket.gaierror(8, "no")], ids=["no TLS", "no name"])
async def test_what_starting_a_server_does_not_mend(cause: OSError) -> None:
    def fail() -> httpx2.Response:
        raise httpx2.ConnectError("outer") from cause

    with pytest.raises(LabError) as caught:
        await Lab(generated=fail).measuring().check()
    assert "start it" not in caught.value.message


def test_certificates_that_cannot_be_read(run, tmp_path: Path) -> None:
    result = run("lab", "--url", "https://server", env={"SSL_CERT_FILE": str(tmp_path / "none.pem")})
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "none.pem cannot be used: No such file or directory" in result.stderr
