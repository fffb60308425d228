"""Case 19 once more, and last by its file's name: what the server has counted in all the other cases adds up."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.cases.conftest import ledger
from tests.e2e.conftest import Server
from tests.e2e.wire import BODIES, CHAT, COMPLETIONS, directive, metric, post

SUMS = {
    "tokenflow_prompt_tokens_total": "prompt_tokens",
    "tokenflow_generated_tokens_total": "generated_tokens",
    "tokenflow_delivered_tokens_total": "delivered_tokens",
    "tokenflow_tokens_after_leaving_total": "after_leaving_tokens",
}


@pytest.mark.parametrize("model", ["one", "two", "wide"])
async def test_case_19_the_ledger_the_metrics_and_the_engine_agree(server: Server, model: str) -> None:
    """About everything that the server has done so far, the other tests' faults and leavings included."""
    await post(server.port, COMPLETIONS, {"prompt": "at least this", "model": model, "max_tokens": 3})
    await post(server.port, CHAT, BODIES[CHAT](directive(raise_at=2), model=model))
    with trio.fail_after(5):
        while differences := await disagreements(server, model):
            await trio.sleep(0.05)
    assert not differences


async def disagreements(server: Server, model: str) -> dict[str, Any]:
    records = [record for record in ledger(server) if record["model"] == model]
    pairs = {
        name: (await metric(server.port, name, model=model), sum(record[key] for record in records))
        for name, key in SUMS.items()
    }
    count = (await metric(server.port, "tokenflow_streams_ended_total", model=model), len(records))
    admitted = (await metric(server.port, "tokenflow_streams_admitted_total", model=model), len(records))
    engine = (
        await metric(server.port, "tokenflow_engine_generated_tokens_total", model=model),
        sum(record["generated_tokens"] for record in records),
    )
    pairs |= {"ended": count, "admitted": admitted, "engine": engine}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
