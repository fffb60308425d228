"""One server for all cases, with models that differ in their slots; what else a case needs its prompt plans.

The cases' long silences are scaled down: a heartbeat every 0.2 s. Nothing is shared between tests but the process, and
each test leaves every slot free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Server, serving
from tests.e2e.wire import Journal

HEARTBEAT_S = 0.2
CONFIG = f"""
[server]
drain_s = 5

[limits]
max_waiting = 4

[stream]
heartbeat_s = {HEARTBEAT_S}

[models.wide]
engine = "synthetic"
directives = true
slots = 8
context_length = 4096

[models.one]
engine = "synthetic"
directives = true
slots = 1

[models.two]
engine = "synthetic"
directives = true
slots = 2

[sinks.ledger]
path = "ledger.jsonl"

[sinks.prometheus]
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("cases"), CONFIG) as server:
        yield server


@pytest.fixture
def port(server: Server) -> int:
    return server.port


@pytest.fixture
def journal(server: Server) -> Journal:
    return Journal(server.folder)


def ledger(server: Server, id: str = "") -> list[dict[str, Any]]:
    """The ledger's records: of one stream, or all."""
    lines = (server.folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be being written
    return [record for record in records if id in ("", record["id"])]
