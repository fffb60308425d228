"""Usage records to write, and waiting for what a thread does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tokenflow.api import Ended
from tokenflow.core.lifecycle import Gaps


def make_ended(**changes: Any) -> Ended:
    values: dict[str, Any] = {
        "id": "s1",
        "at": 1_700_000_000.25,
        "model": "small",
        "engine": "synthetic",
        "key": "alice",
        "route": "/v1/chat/completions",
        "stream": True,
        "choices": 1,
        "prompt_tokens": 12,
        "cached_tokens": 4,
        "generated_tokens": 9,
        "delivered_tokens": 7,
        "after_leaving_tokens": 2,
        "queue_s": 0.125,
        "prefill_s": 0.25,
        "ttft_s": 0.375,
        "duration_s": 1.5,
        "release_s": 0.0101234567,
        "reason": "disconnected",
        "code": None,
        "by": "client",
        "phase": "decode",
        "gaps": Gaps(counts=(2, 0, 2), sum_s=0.5),
    }
    return Ended(**(values | changes))


@pytest.fixture
def ended() -> Callable[..., Ended]:
    return make_ended


@pytest.fixture
def ids() -> Callable[[Path], list[str]]:
    """The ids in a ledger; fails where a line is not whole."""
    return lambda path: [json.loads(line)["id"] for line in path.read_bytes().splitlines()]


async def wait_until(true: Callable[[], bool]) -> None:
    """Let other tasks and threads run until `true`; the bound is for a test that fails."""
    give_up = time.monotonic() + 20
    while not true():
        if time.monotonic() > give_up:
            raise TimeoutError("it never became true")
        await trio.lowlevel.checkpoint()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Any]:
    return wait_until
