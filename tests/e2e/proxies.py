"""The configurations of `conf/proxies/`, run for real in front of two replicas, with ports of the test's own.

What a test changes in them is a line that must be there: an example that moves on takes its tests with it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Server, serving

EXAMPLES = Path(__file__).parents[2] / "conf" / "proxies"
FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "caddy": "Caddyfile", "envoy": "envoy.yaml"}
KINDS = list(FILES)
ENVOY = Path(__file__).parents[2] / ".envoy"
PATHS = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{ENVOY}/envoy/_bin"
WAYS = {"envoy": "make .envoy/.installed", "promtool": "apt-get install prometheus"}
TEMPORARY = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]

REPLICA = """
[server]
name = "{name}"
debug = true
drain_s = 0.5

[stream]
heartbeat_s = 0.2

[models.m]
engine = "synthetic"
directives = true
slots = 8
tokens_per_s = 50

[sinks.prometheus]
"""

Changes = dict[str, str]


def binary(name: str) -> str:
    """Where the program is; without it the test is skipped, and says so."""
    found = shutil.which(name) or shutil.which(name, path=PATHS)
    if not found:
        pytest.skip(f"NOT TESTED: there is no {name} on this machine ({WAYS.get(name, f'apt-get install {name}')})")
    return found


@dataclass(frozen=True)
class Replicas:
    """Two servers, `a` and `b`."""

    a: Server
    b: Server

    def __getitem__(self, name: str) -> Server:
        return {"a": self.a, "b": self.b}[name]

    @property
    def ports(self) -> tuple[int, int]:
        return self.a.port, self.b.port


@contextmanager
def replicas(folder: Path, config: str = REPLICA) -> Iterator[Replicas]:
    with ExitStack() as stack:
        a, b = (stack.enter_context(serving(folder / name, config.replace("{name}", name))) for name in "ab")
        yield Replicas(a, b)


@contextmanager
def fronted(kind: str, folder: Path, ports: tuple[int, int], changes: Changes | None = None) -> Iterator[int]:
    """The example's proxy in front of whatever listens on `ports`; its port."""
    program = binary(kind)
    folder.mkdir(parents=True)
    port = free_port()
    text = _changed((EXAMPLES / FILES[kind]).read_text(), changes or {})
    here = {"8001": str(ports[0]), "8002": str(ports[1]), "8080": str(port)}
    text = re.sub(r"\b(8001|8002|8080)\b", lambda found: here[found[0]], text)
    (folder / FILES[kind]).write_text(_at_home(kind, text, folder))
    with running(_command(kind, program, folder), folder, port):
        yield port


@contextmanager
def running(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """A program that listens on `port`, with `folder` for its log and whatever it keeps, until the block ends."""
    with (folder / "log").open("w") as log:
        home = {**os.environ, "HOME": str(folder)}
        process = subprocess.Popen(command, cwd=folder, env=home, stdout=log, stderr=log)
    try:
        _answers(process, port, folder)
        yield
    finally:
        process.terminate()
        process.wait(10)


def _changed(text: str, changes: Changes) -> str:
    for line, other in changes.items():
        assert text.count(line) == 1, f"the example no longer has {line!r} once"
        text = text.replace(line, other)
    return text


def _at_home(kind: str, text: str, folder: Path) -> str:
    """nginx's own files in `folder`; Caddy without the port on which all of them would be administered."""
    if kind == "nginx":
        paths = "".join(f"    {name}_temp_path {folder}/{name};\n" for name in TEMPORARY)
        return text.replace("http {\n", f"http {{\n    access_log {folder}/access;\n{paths}", 1)
    return text.replace("\n{\n", "\n{\n\tadmin off\n", 1) if kind == "caddy" else text


def _command(kind: str, program: str, folder: Path) -> list[str]:
    own = f"daemon off; master_process off; pid {folder}/pid; error_log stderr warn;"
    arguments = {
        "nginx": ["-p", str(folder), "-g", own, "-c"],
        "haproxy": ["-db", "-f"],
        "caddy": ["run", "--config"],
        "envoy": ["--disable-hot-restart", "--concurrency", "1", "-l", "warn", "-c"],
    }
    return [program, *arguments[kind], str(folder / FILES[kind])]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    """Wait until it listens: none of them says when."""
    end = time.monotonic() + 10
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
    raise AssertionError(f"it does not answer:\n{(folder / 'log').read_text()}")
