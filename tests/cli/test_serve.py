"""`tokenflow serve`: what reaches the server, what it says when it is ready, and how it fails."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import CONFIG
from tokenflow.cli.serve import curl_line
from tokenflow.config import Config, KeyConfig, ModelConfig
from tokenflow.config.model import AuthConfig


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.cli.serve.start_logging", lambda level: None)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that a server was asked to serve; it is ready at once and ends."""
    configs: list[Config] = []

    async def run(config: Config, registry: object, *, on_ready: Callable[[str, bool], None]) -> None:
        configs.append(config)
        on_ready("http://127.0.0.1:9", True)

    monkeypatch.setattr("tokenflow.http.serve.run", run)
    return configs


def test_says_where_it_is_and_how_to_try_it(run, folder: Path, served: list[Config]) -> None:
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
        "tokenflow: --port: server.port: expected at most 65535, got 70000; write a number like 8000\n"
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
    key = KeyConfig(name="a", sha256="a" * 64)
    config = Config(auth=AuthConfig(keys=(key,)), models={"it's $HOME": ModelConfig(engine="x", options=None)})
    words = shlex.split(curl_line(config, "http://h:1", True))
    assert words[:3] == ["curl", "-N", "http://h:1/v1/chat/completions"]
    assert "Authorization: Bearer $TOKENFLOW_KEY" in words
    assert words[-1].startswith('{"model": "it\\u0027s $HOME", "stream": true')


def test_a_model_without_a_chat_template_is_asked_to_complete() -> None:
    config = Config(models={"m": ModelConfig(engine="x", options=None)})
    words = shlex.split(curl_line(config, "http://h:1", False))
    assert words[2] == "http://h:1/v1/completions"
    assert '"prompt"' in words[-1] and "messages" not in words[-1]
