"""The plugin on the rig: exllamav3's real scheduler, without a GPU. Where it cannot be imported, one line says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from plugins.exllama_common.tests.fixtures import missing, summary, table, tables

if TYPE_CHECKING:
    from tokenflow_exllamav3.stepper import Exl3Stepper

    from plugins.exllama_common.tests.table import Table

__all__ = ["table"]

MISSING = missing("torch", "exllamav3", "triton")
collect_ignore_glob = ["test_*.py"] if MISSING else []
pytest_terminal_summary = summary("plugins/exllamav3/tests", MISSING)

if not MISSING:
    from .rig import extension

    extension.install()


@pytest.fixture
def make_table() -> Iterator[Callable[..., Table]]:
    """`make_table(slots=2, ngram_match=2)`: a table with a model of these options."""
    from tokenflow_exllamav3 import Exl3Config
    from tokenflow_exllamav3.stepper import Exl3Stepper

    from .rig.model import hash_load

    def new_stepper(**options: Any) -> Exl3Stepper:
        usual = {"slots": 4, "context_length": 2048, "cache_tokens": 4096, "chunk_size": 512}
        return Exl3Stepper(Exl3Config(model="rig", **(usual | options)), hash_load)

    with tables(new_stepper) as make:
        yield make
