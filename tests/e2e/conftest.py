"""A real server: the `tokenflow serve` command in a process of its own, on a real socket.

`serve(text)` writes a configuration, starts the command on a free port, and waits for the line that says it answers.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = """
[models.smollm2]
engine = "llamacpp"
"""


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[str]
    folder: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


Serve = Callable[..., AbstractContextManager[Server]]


@contextmanager
def serving(folder: Path, config: str, *arguments: str) -> Iterator[Server]:
    """The server that `config` (TOML) describes, on a free port, until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenflow.toml").write_text(config)
    command = [sys.executable, "-m", "tokenflow", "serve", "-c", "tokenflow.toml", "--port", "0", *arguments]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield Server(_url(process, folder), process, folder)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _url(process: subprocess.Popen[str], folder: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"https?://[\w.:\[\]]+:\d+", line):
            return found[0].rstrip("/")
    raise AssertionError(f"the server ended before it answered:\n{(folder / 'log').read_text()}")


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`with serve(config) as server:`"""

    def start(config: str, *arguments: str) -> AbstractContextManager[Server]:
        return serving(tmp_path, config, *arguments)

    return start


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with the real model, for tests that leave nothing behind in it."""
    config = MODEL + '[sinks.prometheus]\n[sinks.ledger]\npath = "ledger.jsonl"\n'
    with serving(tmp_path_factory.mktemp("real"), config) as server:
        yield server
