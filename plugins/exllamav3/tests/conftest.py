"""The plugin on the rig: exllamav3's real scheduler, without a GPU. Where it cannot be imported, one line says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from plugins.exllama_common.tests.table import Table

MISSING = [name for name in ("torch", "exllamav3", "triton") if find_spec(name) is None]

if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    from .rig import extension

    extension.install()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(f"SKIPPED plugins/exllamav3/tests: {', '.join(MISSING)} not installed", yellow=True)


@pytest.fixture
def make_table() -> Iterator[Callable[..., Table]]:
    """`make_table(slots=2, ngram_match=2)`: a table with a model of these options."""
    from tokenflow_exllamav3 import Exl3Config
    from tokenflow_exllamav3.stepper import Exl3Stepper

    from plugins.exllama_common.tests.table import Table

    from .rig.model import hash_load

    tables = []

    def make(**options: Any) -> Table:
        usual = {"slots": 4, "context_length": 2048, "cache_tokens": 4096, "chunk_size": 512}
        stepper = Exl3Stepper(Exl3Config(model="rig", **(usual | options)), hash_load)
        stepper.open()
        tables.append(Table(stepper))
        return tables[-1]

    yield make
    for table in tables:
        table.leave()
        table.stepper.close()


@pytest.fixture
def table(make_table: Callable[..., Table]) -> Table:
    return make_table()


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """`share(200)`: how many of 200 trials to run, at least 2."""
    part: float = request.config.getoption("--stress-share", default=1.0)
    return lambda trials: max(2, round(trials * part))
