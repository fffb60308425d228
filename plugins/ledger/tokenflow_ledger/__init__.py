"""The ledger: one line of JSON for each finished stream, appended to a file.

[sinks.ledger]
path = "ledger.jsonl"
"""

from __future__ import annotations

from typing import Any

from tokenflow.api import SinkPlugin, hookimpl
from tokenflow_ledger.sink import LedgerConfig, missing, open_ledger


@hookimpl
def register_sinks() -> list[SinkPlugin[Any]]:
    return [SinkPlugin(name="ledger", config=LedgerConfig, open=open_ledger, missing=missing)]
