"""Loops in mock time: a step of the task driver costs `STEP_S`; with the thread driver the clock is pinned."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio

from tokenflow.api import SequenceRequest, StepLoop, Stepper, serving

STEP_S = 0.1


async def pace(loop: StepLoop) -> None:
    await trio.sleep(STEP_S)


@pytest.fixture(params=["task", "thread"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Open = Callable[..., AbstractAsyncContextManager[StepLoop]]


@pytest.fixture
def open_loop(driver: str, pin: Callable[[bool], None]) -> Open:
    """`open_loop(stepper)` with each driver in turn."""

    @asynccontextmanager
    async def open_it(stepper: Stepper, **options: Any) -> AsyncIterator[StepLoop]:
        loop = StepLoop(stepper, **options)
        if driver == "thread":
            loop.on_busy = pin
        async with serving(loop, pace=pace if driver == "task" else None):
            yield loop

    return open_it


def ask(prompt: int = 1, max_tokens: int = 5, **fields: Any) -> SequenceRequest:
    """A request with a prompt of so many tokens."""
    return SequenceRequest(prompt=(1,) * prompt, max_tokens=max_tokens, **fields)


@pytest.fixture(name="ask")
def ask_fixture() -> Callable[..., SequenceRequest]:
    return ask
