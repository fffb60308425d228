"""Lifetimes inside lifetimes: what a body needs outlives the body, also when everything is cancelled at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio


class Startable(Protocol):
    """Something for `nursery.start`."""

    async def __call__(self, *, task_status: trio.TaskStatus[None]) -> None: ...


@asynccontextmanager
async def alongside(*runs: Startable) -> AsyncIterator[None]:
    """Start every `run`, then the body; end them only when the body has ended.

    A cancellation from outside reaches the body first: once started, the runs are shielded from it. While they start
    they are not, so that a long start can be called off. A run that fails cancels the body.
    """
    scopes = [trio.CancelScope() for _ in runs]

    async def keep(run: Startable, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await run(task_status=task_status)

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as opening:
            for run, scope in zip(runs, scopes, strict=True):
                opening.start_soon(nursery.start, keep, run, scope)
        try:
            for scope in scopes:
                scope.shield = True
            yield
        finally:
            for scope in scopes:
                scope.cancel()
