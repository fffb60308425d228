"""`kill -9` of a real process in the middle of writing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

WRITER = """
import importlib.util, sys
import trio
from tokenflow_ledger.sink import LedgerConfig, open_ledger

spec = importlib.util.spec_from_file_location("made", sys.argv[1])
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)

async def main():
    async with open_ledger(LedgerConfig(path=sys.argv[2])) as sink:
        for n in range(10**9):
            await sink.record(made.make_ended(id=str(n)))
            await trio.sleep(0.0005)

trio.run(main)
"""


def wait_for_lines(path: Path, count: int, writer: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 30
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert writer.poll() is None, "the writer ended by itself"
        assert time.monotonic() < give_up, "the lines never came"
        time.sleep(0.005)


@pytest.mark.parametrize("lines", [50, 300])
def test_a_killed_process_leaves_whole_lines_without_a_gap(
    tmp_path: Path, ids: Callable[[Path], list[str]], lines: int
) -> None:
    """It never closes: what is in the file is there because it is written as it comes."""
    path = tmp_path / "ledger.jsonl"
    helper = Path(__file__).with_name("conftest.py")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(helper), str(path)]) as writer:
        try:
            wait_for_lines(path, lines, writer)
        finally:
            writer.kill()
    found = ids(path)
    assert len(found) >= lines
    assert found == [str(n) for n in range(len(found))]
