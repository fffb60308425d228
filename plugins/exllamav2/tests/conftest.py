"""The plugin on the rig: exllamav2's real scheduler, without a GPU. Where it cannot be imported, one line says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from plugins.exllama_common.tests.table import Table

MISSING = [name for name in ("torch", "exllamav2") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(f"SKIPPED plugins/exllamav2/tests: {', '.join(MISSING)} not installed", yellow=True)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory."""
    from .rig.model import write_directory

    return write_directory(tmp_path_factory.mktemp("exl2") / "hash-model")


@pytest.fixture
def make_table(directory: Path) -> Iterator[Callable[..., Table]]:
    """`make_table(slots=2)`: a table with a model of these options; `paged` is the rig's own."""
    from tokenflow_exllamav2 import Exl2Config
    from tokenflow_exllamav2.stepper import Exl2Stepper

    from plugins.exllama_common.tests.table import Table

    from .rig.model import load_rig

    tables = []

    def make(*, paged: bool = True, **options: Any) -> Table:
        usual = {"slots": 4, "context_length": 2048, "cache_tokens": 4096}
        stepper = Exl2Stepper(Exl2Config(model=str(directory), **(usual | options)), partial(load_rig, paged=paged))
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
