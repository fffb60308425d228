"""The host of an engine: the first opening must succeed, later failures are got over, in mock time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tokenflow.api import EngineInfo, EnginePlugin, EngineStats
from tokenflow.cli.logs import OneLine
from tokenflow.engines.host import PAUSES_S, STEADY_S, EngineHost
from tokenflow.errors import EngineClosed, EngineError, EngineLost, StartupError


class Engine:
    """An engine that does nothing."""

    info = EngineInfo(model="nothing", context_length=8, slots=1)
    step_age_s = 0.0

    async def generate(self, request: Any, send: Any) -> None: ...

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return []

    async def detokenize(self, tokens: list[int]) -> str:
        return ""

    async def stats(self) -> EngineStats:
        return EngineStats(step_age_s=self.step_age_s)


class Openings:
    """Opens engines, or fails, as planned: a script of None and errors; the last repeats. They end with `ends`."""

    def __init__(self, *script: Exception | None, ends: tuple[Exception, ...] = ()) -> None:
        self.script = list(script)
        self.ends = ends or (RuntimeError("the card fell off the bus"),)
        self.at: list[float] = []
        self.broken = trio.Event()
        self.closed = 0

    @asynccontextmanager
    async def open(self, config: None) -> AsyncIterator[Engine]:
        self.at.append(trio.current_time())
        error = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if error is not None:
            raise error
        self.broken = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                for error in self.ends:
                    nursery.start_soon(self._run, error)
                yield Engine()
                nursery.cancel_scope.cancel()
        finally:
            self.closed += 1

    async def _run(self, error: Exception) -> None:
        await self.broken.wait()
        raise error

    @property
    def host(self) -> EngineHost:
        return EngineHost("m", EnginePlugin(name="scripted", config=type(None), open=self.open), None)


async def test_a_first_opening_that_fails_is_one_line_for_people(nursery: trio.Nursery) -> None:
    host = Openings(StartupError("there is no such file")).host
    with pytest.raises(StartupError, match="model 'm': there is no such file"):
        await host.run()
    host = Openings(ZeroDivisionError("division by zero")).host
    with pytest.raises(StartupError, match="model 'm': its engine does not open: ZeroDivisionError"):
        await host.run()
    with pytest.raises(EngineClosed):
        _ = host.engine


async def test_an_engine_that_ends_is_opened_anew_after_growing_pauses(autojump_clock: MockClock) -> None:
    plan = Openings(None, OSError("busy"), OSError("busy"), None)
    host = plan.host
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        assert await host.ready()
        plan.broken.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not await host.ready()
        assert await host.stats() == EngineStats()
        with pytest.raises(EngineClosed) as caught:
            _ = host.engine
        assert caught.value.retry_after_s
        await trio.sleep(60)
        assert await host.ready()
        assert plan.at == [0.0, PAUSES_S[0], PAUSES_S[0] + PAUSES_S[1], sum(PAUSES_S[:3])]
        assert plan.closed == 1
        nursery.cancel_scope.cancel()
    assert plan.closed == 2


async def test_pauses_grow_where_it_opens_and_breaks_and_not_where_it_was_open_for_long(
    autojump_clock: MockClock,
) -> None:
    plan = Openings(None)
    async with trio.open_nursery() as nursery:
        await nursery.start(plan.host.run)
        for pause in (*PAUSES_S, PAUSES_S[-1]):
            assert plan.at[-1] == trio.current_time()
            plan.broken.set()
            await trio.sleep(pause)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(STEADY_S)
        plan.broken.set()
        await trio.sleep(PAUSES_S[0])
        await trio.testing.wait_all_tasks_blocked()
        assert plan.at[-1] == trio.current_time()
        assert len(plan.at) == len(PAUSES_S) + 3
        nursery.cancel_scope.cancel()


async def test_how_it_ended_is_logged_and_where_unless_it_says_so_itself(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Openings(None, EngineError("The card is gone."), None)
    async with trio.open_nursery() as nursery:
        await nursery.start(plan.host.run)
        plan.broken.set()
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    first, second = [OneLine(traces=False).format(record) for record in caplog.records if record.levelname == "ERROR"]
    assert "model m: its engine ended (RuntimeError: the card fell off the bus at " in first and __file__ in first
    assert second.endswith("model m: its engine ended: The card is gone.")


async def test_what_this_process_cannot_open_again_is_not_tried_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Openings(None, OSError("busy"), EngineLost("The card fell off the bus."))
    host = plan.host
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        plan.broken.set()
        with trio.fail_after(PAUSES_S[0] + PAUSES_S[1] + 0.1):
            await host.lost.wait()
        await trio.sleep(600)
        assert len(plan.at) == 3
        assert not await host.ready()
        nursery.cancel_scope.cancel()
    assert caplog.messages[-1] == "model m: its engine is lost to this process: The card fell off the bus."


async def test_one_that_says_so_while_it_is_open_is_not_given_out_any_more(autojump_clock: MockClock) -> None:
    """Whatever else fails at that moment."""
    plan = Openings(None, ends=(OSError("gone"), EngineLost("The card fell off the bus."), EngineError("Failed.")))
    host = plan.host
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        await trio.testing.wait_all_tasks_blocked()
        plan.broken.set()
        await trio.testing.wait_all_tasks_blocked()
        assert host.lost.is_set()
        assert not await host.ready()
        with pytest.raises(EngineClosed):
            _ = host.engine
        nursery.cancel_scope.cancel()


async def test_giving_an_engine_up_opens_another(autojump_clock: MockClock) -> None:
    plan = Openings(None)
    host = plan.host
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        first = host.engine
        host.fail(first, "it does not let go")
        with pytest.raises(EngineClosed):
            _ = host.engine
        await trio.sleep(1)
        second = host.engine
        assert second is not first
        host.fail(first, "it does not let go, says another of its sequences")
        await trio.sleep(10)
        assert host.engine is second
        assert (host.openings, plan.closed) == (2, 1)
        nursery.cancel_scope.cancel()


async def test_a_step_that_takes_too_long_is_not_ready(autojump_clock: MockClock) -> None:
    host = Openings(None).host
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        host.engine.step_age_s = 31.0  # type: ignore[attr-defined]  # the Engine above
        assert not await host.ready()
        nursery.cancel_scope.cancel()


async def test_what_is_no_engine_is_refused() -> None:
    @asynccontextmanager
    async def open_nothing(config: None) -> AsyncIterator[Any]:
        yield object()

    host = EngineHost("m", EnginePlugin(name="nothing", config=type(None), open=open_nothing), None)
    with pytest.raises(StartupError, match="is no Engine"):
        await host.run()
