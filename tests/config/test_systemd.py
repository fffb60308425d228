"""The unit for systemd: is it one, and does it leave the server the time and the files that its defaults ask for?"""

from __future__ import annotations

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from tokenflow.config.model import ServerConfig

UNIT = Path(__file__).parents[2] / "conf/systemd/tokenflow.service"


def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED: the unit for systemd, for there is no systemd-analyze here")
    text = UNIT.read_text()
    there = text.replace("/opt/tokenflow/.venv/bin/tokenflow", "/bin/true")  # it asks whether there is such a program
    assert there != text
    (tmp_path / UNIT.name).write_text(there)
    found = subprocess.run(["systemd-analyze", "verify", tmp_path / UNIT.name], capture_output=True, text=True)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_its_steps_make_what_it_starts_with() -> None:
    text = UNIT.read_text()
    steps = [line.removeprefix("#     ") for line in text.splitlines() if line.startswith("#     ")]
    unit = ConfigParser(strict=False, interpolation=None)
    unit.read_string(text)
    program, _, _, configuration = unit["Service"]["ExecStart"].split()
    assert any(step.endswith(f"cp conf/minimal.toml {configuration}") for step in steps)
    assert any(step.startswith("git clone … /opt/tokenflow ") for step in steps) and program.startswith(
        "/opt/tokenflow/"
    )
    assert any(unit["Service"]["Environment"] in step for step in steps)


def test_it_leaves_the_server_what_it_needs() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.read_string(UNIT.read_text())
    service, defaults = unit["Service"], ServerConfig()
    assert service.getint("TimeoutStopSec") > defaults.drain_s + 2
    assert service.getint("LimitNOFILE") > 2 * defaults.max_connections
    assert service["KillMode"] == "mixed"
