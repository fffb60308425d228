"""Sinks are told everything and can harm nothing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tokenflow.api import Admitted, LifecycleEvent, SinkPlugin
from tokenflow.service import feeds as module
from tokenflow.service.feeds import Feeds
from tokenflow.service.nested import alongside


def event(id: str) -> Admitted:
    return Admitted(id=id, at=0.0, model="m", engine="e", key="-", route="/", stream=True, choices=1)


class Sink:
    def __init__(self, *, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self.seen: list[str] = []
        self._delay_s, self._error = delay_s, error

    async def record(self, event: LifecycleEvent) -> None:
        await trio.sleep(self._delay_s)
        if self._error:
            raise self._error
        self.seen.append(event.id)


def feeds(**sinks: Sink) -> Feeds:
    def plugin(sink: Sink) -> SinkPlugin[Any]:
        @asynccontextmanager
        async def open_sink(config: None) -> AsyncIterator[Sink]:
            yield sink

        return SinkPlugin(name="s", config=type(None), open=open_sink)

    return Feeds({name: (plugin(sink), None) for name, sink in sinks.items()})


async def test_each_sink_gets_everything_in_order_and_what_is_left_is_written_at_the_end(
    autojump_clock: MockClock,
) -> None:
    quick, slow = Sink(), Sink(delay_s=0.1)
    fed = feeds(quick=quick, slow=slow)
    async with alongside(fed.run):
        for i in range(20):
            fed.emit(event(str(i)))
        await trio.testing.wait_all_tasks_blocked()
        assert quick.seen == [str(i) for i in range(20)]
        assert len(slow.seen) < 20
    assert slow.seen == quick.seen


async def test_a_sink_that_hangs_drops_past_the_bound_and_delays_the_end_no_longer_than_the_bound(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "BACKLOG", 8)
    good, stuck = Sink(), Sink(delay_s=10**6)
    fed = feeds(good=good, stuck=stuck)
    async with alongside(fed.run):
        for i in range(20):
            fed.emit(event(str(i)))
            await trio.testing.wait_all_tasks_blocked()
        assert len(good.seen) == 20
        assert fed.dropped == 20 - 8 - 1
    assert trio.current_time() <= 2 * module.CLOSE_S
    assert "too slow" in caplog.text


async def test_a_sink_that_raises_is_logged_once_and_fed_on(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Sink(), Sink(error=OSError("disk on fire"))
    fed = feeds(bad=bad, good=good)
    with caplog.at_level(logging.ERROR):
        async with alongside(fed.run):
            for i in range(5):
                fed.emit(event(str(i)))
    assert len(good.seen) == 5
    assert caplog.text.count("sink bad failed") == 1


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError


async def test_each_kind_of_failure_is_logged_once_whatever_it_says_and_only_so_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Faulty(Sink):
        async def record(self, event: LifecycleEvent) -> None:
            self.seen.append(event.id)
            match event.model:
                case "a":
                    raise KeyError(event.id)
                case "b":
                    raise KeyError(event.id)
                case "c":
                    raise Unprintable
            raise type(event.id, (Exception,), {})  # without end

    bad = Faulty()
    fed = feeds(bad=bad)
    with caplog.at_level(logging.ERROR):
        async with alongside(fed.run):
            for i in range(30):
                for model in "abc":
                    fed.emit(replace(event(str(i)), model=model))
        assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError, KeyError, Unprintable]
        caplog.clear()
        async with alongside((fed := feeds(bad=bad)).run):
            for i in range(100):
                fed.emit(replace(event(f"Error{i}"), model="d"))
    assert len(bad.seen) == 190
    assert len(caplog.records) == module.KINDS
