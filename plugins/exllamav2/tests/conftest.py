"""The plugin on the rig: exllamav2's real scheduler, without a GPU. Where it cannot be imported, one line says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plugins.exllama_common.tests.fixtures import missing, summary, table, tables

if TYPE_CHECKING:
    from tokenflow_exllamav2.stepper import Exl2Stepper

    from plugins.exllama_common.tests.table import Table

__all__ = ["table"]

MISSING = missing("torch", "exllamav2")
collect_ignore_glob = ["test_*.py"] if MISSING else []
pytest_terminal_summary = summary("plugins/exllamav2/tests", MISSING)


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

    from .rig.model import load_rig

    def new_stepper(*, paged: bool = True, **options: Any) -> Exl2Stepper:
        usual = {"slots": 4, "context_length": 2048, "cache_tokens": 4096}
        return Exl2Stepper(Exl2Config(model=str(directory), **(usual | options)), partial(load_rig, paged=paged))

    with tables(new_stepper) as make:
        yield make
