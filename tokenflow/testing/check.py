"""`tokenflow engine check NAME`: the conformance kit against a configured model, one line a promise."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from tokenflow.api import EnginePlugin
from tokenflow.config.model import Config

if TYPE_CHECKING:  # pytest must import the kit itself, or it cannot explain its assertions
    from tokenflow.testing.conformance import OpenEngine

SUITE = Path(__file__).with_name("suite.py")


class Engines(Protocol):
    """The part of `tokenflow.engines.registry.Registry` that is needed here."""

    def engine(self, name: str, /) -> EnginePlugin[object]: ...


def run(config: Config, registry: Engines, name: str, *, echo: Callable[[str], None] = print) -> int:
    """Check the model `name`; every promise is a line, every broken one is explained. 0 if all are kept."""
    model = config.models[name]
    plugin = registry.engine(model.engine)
    report = _Report(echo)
    options = ["-c", os.devnull, "--rootdir", str(SUITE.parent), "--import-mode=importlib"]
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:logging"]
    code = pytest.main([*options, *quiet, str(SUITE)], plugins=[report, _Given(lambda: plugin.open(model.options))])
    report.end(name, model.engine)
    return int(code)


class _Given:
    def __init__(self, open_engine: OpenEngine) -> None:
        self._open_engine = open_engine

    @pytest.fixture
    def configured_engine(self) -> OpenEngine:
        return self._open_engine


class _Report:
    """A reporter for people who know their engine and not pytest: promises, not test names."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._counts = {"kept": 0, "broken": 0, "not tried": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = "kept" if report.passed else "not tried" if report.skipped else "broken"
        self._counts[outcome] += 1
        self._echo(f"{outcome:10} {_promise(report.nodeid)}{_reason(report) if report.skipped else ''}")
        if report.failed:
            self._echo("".join(f"             {line}\n" for line in _explain(report).splitlines()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._echo(str(report.longrepr))

    def end(self, name: str, engine: str) -> None:
        counts = ", ".join(f"{n} {outcome}" for outcome, n in self._counts.items() if n)
        self._echo(f"\n{name} (engine {engine}): {counts}")


def _promise(nodeid: str) -> str:
    """The first line of the test's docstring."""
    from tokenflow.testing.conformance import EngineConformance

    test = getattr(EngineConformance, nodeid.rsplit("::", 1)[-1])
    return str(test.__doc__).strip().splitlines()[0]


def _reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return f" ({str(reason).removeprefix('Skipped: ')})"


def _explain(report: pytest.TestReport) -> str:
    """Where it broke, and how: the last frames say it."""
    return "\n".join(report.longreprtext.splitlines()[-12:])
