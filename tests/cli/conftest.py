"""The command line run in this process, and a plugin file to run it with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tokenflow.cli import main

PLUGIN = '''
from contextlib import asynccontextmanager
from dataclasses import dataclass
from tokenflow.api import EngineInfo, EnginePlugin, StartupError, engine_from_generator, hookimpl

@dataclass(frozen=True, slots=True, kw_only=True)
class EchoConfig:
    """Says it again."""
    times: int = 1
    """How often."""
    api_key: str | None = None
    """Secret."""

@asynccontextmanager
async def open_echo(config):
    if config.times == 99:
        raise StartupError("99 times is too often; take fewer")
    async def echo(prompt, request):
        for token in ("to", "ken"):
            yield token
    yield engine_from_generator(echo, info=EngineInfo(model="echo", context_length=4096, slots=2))

@hookimpl
def register_engines():
    return [EnginePlugin(name="echo", config=EchoConfig, open=open_echo)]
'''

CONFIG = '[plugins]\nfiles = ["echo_plugin.py"]\n[models.m]\nengine = "echo"\n'

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a command makes of the process's log is its own: other tests count what a log line is kept for."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def run() -> Run:
    """Runs `tokenflow` with arguments."""

    def run_it(*arguments: str, **options: object) -> Result:
        return CliRunner().invoke(main, list(arguments), **options)

    return run_it


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `tokenflow.toml` and the plugin that it names."""
    for name in ("TOKENFLOW_CONFIG", "TOKENFLOW_URL", "TOKENFLOW_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echo_plugin.py").write_text(PLUGIN)
    (tmp_path / "tokenflow.toml").write_text(CONFIG)
    return tmp_path
