"""The servers that are measured, each as a process of its own on one core: tokenflow as it is sold, and its peers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
PEERS = ("fastapi", "sse_starlette", "uvicorn", "granian", "quart_trio")
WITH_WEBSOCKET = ("fastapi", "uvicorn", "granian", "quart_trio")
START_S, END_S = 30.0, 5.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

CONFIG = """
[server]
name = "tf"
drain_s = 0.0
max_connections = 100000

[limits]
max_waiting = 100000

[timeouts]
queue_timeout_s = 600.0

[models.words]
engine = "synthetic"
slots = {slots}
context_length = 1000000000
text = " harbor"
{pace}

[sinks.prometheus]
[sinks.ledger]
path = "ledger.jsonl"
"""


class Memory(NamedTuple):
    """KiB, of the whole server."""

    pss: int
    rss: int


class Server:
    """A running server: every process of it counts."""

    def __init__(self, pid: int, port: int) -> None:
        self._pid = pid
        self.port = port

    @property
    def cpu_s(self) -> float:
        """User and system time so far."""
        return sum(_cpu_ticks(pid) for pid in _tree(self._pid)) / CLOCK_TICKS

    @property
    def memory(self) -> Memory:
        rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in _tree(self._pid)]
        return Memory(*(sum(_kib(text, field) for text in rollups) for field in ("Pss", "Rss")))


def _tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    children = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [pid, *(below for several in children for child in several for below in _tree(int(child)))]


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime; the first field here is the third of proc(5)


def _kib(rollup: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1])


@contextmanager
def running(name: str, tokens_per_s: float, streams: int, *, core: int) -> Iterator[Server]:
    """Run a contestant on `core` until the block ends.

    Args:
        name: "tokenflow", or one of PEERS.
        tokens_per_s: of each stream; 0: none at all; infinity: as fast as it can.
        streams: how many will be open at once.
        core: where it runs.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        command = ["taskset", "-c", str(core), *_command(name, port, tokens_per_s, streams, Path(folder))]
        with errors.open("w") as log:
            env = os.environ if name == "tokenflow" else os.environ | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            _wait_for(port, process, errors)
            yield Server(process.pid, port)
        finally:
            _end(process)


def _command(name: str, port: int, tokens_per_s: float, streams: int, folder: Path) -> list[str]:
    if name != "tokenflow":
        return [str(PEERS_PYTHON), "-m", "bench.peers", name, str(port), str(tokens_per_s)]
    config = folder / "tokenflow.toml"
    config.write_text(_config(tokens_per_s, streams))
    serve = [sys.executable, "-m", "tokenflow", "serve", "-c", str(config)]
    return [*serve, "--port", str(port), "--log-level", "error"]


def _config(tokens_per_s: float, streams: int) -> str:
    """Where no tokens come, one stream holds the only slot in an endless prefill, and the others wait for it."""
    if not tokens_per_s:
        return CONFIG.format(slots=1, pace="prefill_ms = 1e9")
    return CONFIG.format(slots=streams, pace="" if tokens_per_s == float("inf") else f"tokens_per_s = {tokens_per_s}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes], errors: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit(f"{process.args!r} did not answer:\n{errors.read_text()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end; some need more than that."""
    every = _tree(process.pid)
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        for pid in every:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
