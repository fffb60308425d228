"""The load client of `load.c`, built when it is first asked for, as a process that says its phases."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

SOURCE = Path(__file__).with_name("load.c")
BINARY = SOURCE.parent / "build" / "load"


def build() -> Path:
    """The binary, compiled again if its source is newer. Needs gcc."""
    if not BINARY.exists() or BINARY.stat().st_mtime < SOURCE.stat().st_mtime:
        BINARY.parent.mkdir(exist_ok=True)
        new = BINARY.with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", SOURCE, "-o", new, "-lm"], check=True)
        new.replace(BINARY)  # whole or not at all: others may be building it too
    return BINARY


class Load:
    """A running client."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output

    def phase(self, name: str) -> dict[str, Any]:
        """Wait until it begins; what the client says of it. In order: open, measuring, measured."""
        said: dict[str, Any] = json.loads(self._output.readline() or '{"phase": "the end"}')
        if said.pop("phase") != name:
            raise SystemExit(f"the load client ended before it was {name}")
        return said


@contextmanager
def load(port: int, path: str, body: dict[str, Any], *options: str, on_core: int | None = None) -> Iterator[Load]:
    """Streams against a server on loopback, held open until the block ends. Options as `load.c` has them."""
    command = [str(build()), str(port), path, json.dumps(body), *options]
    if on_core is not None:
        command = ["taskset", "-c", str(on_core), *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield Load(process.stdout)
            process.stdin.close()
            process.wait(10)
        finally:
            process.kill()
