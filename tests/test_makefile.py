"""What make would run, for what is given to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def lines(*arguments: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of the make around
    command = ["make", "--dry-run", *arguments]
    shown = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()


def test_serve_takes_arguments() -> None:
    assert lines("serve", "ARGS=--port 8018")[-1] == ".venv/bin/tokenflow serve -c conf/tokenflow.toml --port 8018"


@pytest.mark.parametrize("paths", ["tests/cli", "tests/cli/test_chat.py::test_no_url", "plugins/llamacpp tests/http"])
def test_paths_are_tested_alone(paths: str) -> None:
    runs = [line for line in lines("test", f"ARGS=-x {paths}") if "-m pytest" in line]
    assert runs == [f'.venv/bin/python -m pytest -m "not stress" -x {paths}']


@pytest.mark.parametrize("options", ["", "-x -k no_url"])
def test_other_arguments_hold_for_both_halves(options: str) -> None:
    runs = [line for line in lines("test", f"ARGS={options}") if "-m pytest" in line]
    assert len(runs) == 2 and all(line.endswith(options) for line in runs)
