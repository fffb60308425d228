"""`tokenflow serve`: what reaches the server, what it says when it is ready, and how it fails."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Set
from pathlib import Path

import pytest

from tests.cli.conftest import CONFIG
from tests.e2e.conftest import serving
from tokenflow.cli.serve import announce, curl_line
from tokenflow.config import Config, KeyConfig, ModelConfig
from tokenflow.config.model import AuthConfig, ServerConfig

ROOT = Path(__file__).parents[2]
MODELS = {"m": ModelConfig(engine="x", options=None)}
KEYS = AuthConfig(keys=(KeyConfig(name="a", sha256="a" * 64),))
CURL = shutil.which("curl") or ""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.cli.serve.start_logging", lambda level: None)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.cli.serve._is_terminal", lambda: True)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that a server was asked to serve; it is ready at once and ends."""
    configs: list[Config] = []

    async def run(config: Config, registry: object, *, on_ready: Callable[[str, Set[str]], None]) -> None:
        configs.append(config)
        on_ready("http://127.0.0.1:9", {"chat", "temperature"})

    monkeypatch.setattr("tokenflow.http.serve.run", run)
    return configs


def test_a_journal_gets_one_line(run, folder: Path, served: list[Config]) -> None:
    assert run("serve").stdout == "Serving m on http://127.0.0.1:9\n"


def test_says_where_it_is_and_how_to_try_it(run, folder: Path, served: list[Config], terminal: None) -> None:
    result = run("serve")
    assert result.exit_code == 0
    assert result.stdout.startswith("Serving m on http://127.0.0.1:9\nTry it:\n  curl -N http://127.0.0.1:9/v1/chat/")
    assert result.stdout.endswith("\nor: tokenflow chat --url http://127.0.0.1:9\n")


def test_flags_outrank_all(run, folder: Path, served: list[Config]) -> None:
    (folder / "tokenflow.toml").write_text(CONFIG + "[server]\nport = 1\nhost = 'localhost'\n")
    env = {"TOKENFLOW_SERVER__PORT": "2", "TOKENFLOW_SERVER__DRAIN_S": "2"}
    run("serve", "--port", "3", "--host", "127.0.0.2", "--set", "stream.window=4", "--set", "server.port=5", env=env)
    [config] = served
    assert (config.server.port, config.server.host, config.server.drain_s) == (3, "127.0.0.2", 2.0)
    assert config.stream.window == 4


def test_a_wrong_flag_is_named(run, folder: Path, served: list[Config]) -> None:
    result = run("serve", "--port", "70000")
    assert result.exit_code == 1
    assert result.stderr == (
        "tokenflow: --port: server.port: expected at most 65535, got 70000; write a number from 0 to 65535, like 8000\n"
    )
    assert served == []


def test_a_busy_port(run, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"tokenflow: 127.0.0.1:{port} is in use")
    assert result.stderr.count("\n") == 1
    assert "--port" in result.stderr


def test_an_engine_that_does_not_open(run, folder: Path) -> None:
    result = run("serve", "--port", "0", "--set", "models.m.times=99")
    assert result.exit_code == 1
    assert "99 times is too often; take fewer" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_curl_line_survives_a_shell() -> None:
    config = Config(auth=KEYS, models={"it's $HOME": ModelConfig(engine="x", options=None)})
    words = shlex.split(curl_line(config, "http://h:1", {"chat"}))
    assert words[:3] == ["curl", "-N", "http://h:1/v1/chat/completions"]
    assert "Authorization: Bearer $TOKENFLOW_KEY" in words
    assert words[-1].startswith('{"model": "it\\u0027s $HOME", "stream": true')


def test_a_model_without_a_chat_template_is_asked_to_complete() -> None:
    words = shlex.split(curl_line(Config(models=MODELS), "http://h:1", set()))
    assert words[2] == "http://h:1/v1/completions"
    assert '"prompt"' in words[-1] and "messages" not in words[-1]


@pytest.mark.parametrize("capabilities", [set(), {"temperature"}])
def test_only_what_the_model_can_do_is_asked_of_it(capabilities: set[str]) -> None:
    body = json.loads(shlex.split(curl_line(Config(models=MODELS), "http://h:1", capabilities))[-1])
    assert body["max_tokens"] == 64
    assert ("temperature" in body) == ("temperature" in capabilities)


@pytest.mark.skipif(not CURL, reason="there is no curl")
def test_the_curl_line_works_as_it_is_printed(folder: Path) -> None:
    """The engine of `conftest` has neither a temperature nor a chat template, as a first one of one's own has not."""
    with serving(folder, CONFIG) as server:
        line = curl_line(Config(models=MODELS), server.url, set())
        answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=30)
    assert '"text":"ken"' in answer.stdout and answer.stdout.endswith("data: [DONE]\n\n")


OTHERS = ", and on all other IPv{} addresses of this machine"
LISTENING = {
    "an address": ("127.0.0.2", "http://127.0.0.2:9", "http://127.0.0.2:9"),
    "a name": ("localhost", "http://127.0.0.1:9", "http://127.0.0.1:9"),
    "a certificate's name": ("models.example.org", "https://192.0.2.1:9", "https://models.example.org:9"),
    "an address with TLS": ("127.0.0.1", "https://127.0.0.1:9", "https://127.0.0.1:9"),
    "all": ("0.0.0.0", "http://0.0.0.0:9", "http://127.0.0.1:9" + OTHERS.format(4)),
    "all of IPv6": ("::", "http://[::]:9", "http://[::1]:9" + OTHERS.format(6)),
    "all with TLS": (
        "0.0.0.0",
        "https://0.0.0.0:9",
        "https://localhost:9, and on all other IPv4 addresses of this machine",
    ),
}


@pytest.mark.parametrize(("host", "url", "told"), LISTENING.values(), ids=LISTENING)
def test_the_url_is_one_to_connect_to(
    host: str, url: str, told: str, terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(Config(server=ServerConfig(host=host), models=MODELS), url, {"chat"})
    first, _, curl, chat = capsys.readouterr().out.splitlines()
    connect_to = told.partition(",")[0]
    assert first == f"Serving m on {told}"
    assert curl.startswith(f"  curl -N {connect_to}/v1/")
    assert chat == f"or: tokenflow chat --url {connect_to}"


def test_where_keys_are_wanted_the_chat_has_one(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    announce(Config(auth=KEYS, models=MODELS), "http://127.0.0.1:1", {"chat"})
    assert capsys.readouterr().out.endswith('\nor: tokenflow chat --url http://127.0.0.1:1 --key "$TOKENFLOW_KEY"\n')


def test_the_readme_shows_what_is_printed(run, served: list[Config], terminal: None) -> None:
    result = run("serve", "-c", str(ROOT / "conf" / "tokenflow.toml"))
    [config] = served
    printed = result.stdout.replace("http://127.0.0.1:9", f"http://{config.server.host}:{config.server.port}")
    assert printed.startswith("Serving smollm2 on http://127.0.0.1:8000\n")
    assert f"```\n{printed}```\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_the_readme_asks_of_the_small_model_is_short_and_sensible() -> None:
    start = (ROOT / "README.md").read_text(encoding="utf-8").split("## Start", 1)[1].split("\n## ", 1)[0]
    examples = [block for block in start.split("```")[1::2] if "Say hello." in block]
    assert len(examples) == 3
    for example in examples:
        assert re.search(r'temperature"?[=:] ?0\b', example) and re.search(r'max_tokens"?[=:] ?64\b', example)
