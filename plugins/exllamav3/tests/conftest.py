"""The plugin on the rig: exllamav3's real scheduler, without a GPU. Where it cannot be imported, one line says so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from .rig import extension

MISSING = [name for name in ("torch", "exllamav3", "triton") if find_spec(name) is None]

if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    extension.install()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(f"SKIPPED plugins/exllamav3/tests: {', '.join(MISSING)} not installed", yellow=True)
