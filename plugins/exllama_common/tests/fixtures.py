"""What the `conftest.py` of both plugins takes from here. Each gives its tests `make_table`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from plugins.exllama_common.tests.table import Table


def missing(*libraries: str) -> list[str]:
    """Which of them cannot be imported here."""
    return [name for name in libraries if find_spec(name) is None]


def summary(folder: str, absent: list[str]) -> Callable[[pytest.TerminalReporter], None]:
    """`pytest_terminal_summary`: one line that says why a folder's tests were skipped, if they were."""

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        if absent:
            terminalreporter.write_line(f"SKIPPED {folder}: {', '.join(absent)} not installed", yellow=True)

    return pytest_terminal_summary


@contextmanager
def tables(new_stepper: Callable[..., Any]) -> Iterator[Callable[..., Table]]:
    """A maker of tables, each with a model of the options it is given; at the end all of them are cleared."""
    made = []

    def make(**options: Any) -> Table:
        stepper = new_stepper(**options)
        stepper.open()
        made.append(Table(stepper))
        return made[-1]

    yield make
    for table in made:
        table.leave()
        table.stepper.close()


@pytest.fixture
def table(make_table: Callable[..., Table]) -> Table:
    return make_table()
