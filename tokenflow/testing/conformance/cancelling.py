"""Cancelled, a sequence sends nothing more, and `generate` returns when its slot is free: not earlier, nor late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from tokenflow.api import Delta, Engine, Event, Started
from tokenflow.testing.conformance.base import Kit, eventually, live, need
from tokenflow.testing.fakes import Company, Recorder, company, record

WINDOW = 8
"""What one that leaves has credit for: an engine that heeds it makes no more, however fast it is."""
TOKENS_PER_CHARACTER = 4
"""At most: a delta without text takes no credit."""


class Arrival(trio.abc.Instrument):
    """Notes how much had been sent when the cancel reached `generate`: at its task's first step after it."""

    def __init__(self, victim: Recorder) -> None:
        self.victim = victim
        self.events: int | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.events is None and self.victim.scope.cancel_called and task is self.victim.task:
            self.events = len(self.victim.events)


@contextmanager
def arrival(victim: Recorder) -> Iterator[Arrival]:
    instrument = Arrival(victim)
    trio.lowlevel.add_instrument(instrument)
    try:
        yield instrument
    finally:
        trio.lowlevel.remove_instrument(instrument)


class Cancelling(Kit):
    async def _check_gone(self, engine: Engine, victim: Recorder, events: int | None) -> None:
        """Just after `generate` returned: the next request can have the slot, and nothing follows."""
        assert victim.error is None
        assert victim.scope.cancelled_caught, "generate swallowed the cancel"
        assert len(victim.events) == events, "events were sent after the cancel had come"
        assert (await engine.stats()).slots_used < engine.info.slots
        assert (await record(engine, await self.request(engine))).finished is not None
        assert len(victim.events) == events, "events were sent after generate had returned"

    async def _fill_but_one(self, engine: Engine, group: Company) -> None:
        if engine.info.slots > 1:
            need(engine, "pause")
            await self.hold_slots(engine, group, engine.info.slots - 1)

    async def _one_waits(self, engine: Engine) -> bool:
        return (await engine.stats()).waiting == 1

    @live
    async def test_before_it_begins(self, engine: Engine) -> None:
        """Cancelled before the first checkpoint: nothing happens."""
        async with company(engine) as group:
            await self._fill_but_one(engine, group)
            victim = Recorder()
            victim.scope.cancel()
            group.start(await self.request(engine), victim)
            await victim.returned.wait()
            await self._check_gone(engine, victim, 0)

    @live
    async def test_while_it_waits(self, engine: Engine) -> None:
        """Cancelled while it waits for a slot: no event at all, and the queue moves on."""
        need(engine, "pause")
        async with company(engine) as group:
            held = await self.hold_slots(engine, group, engine.info.slots)
            victim = group.start(await self.request(engine))
            await eventually(lambda: self._one_waits(engine))
            heir = group.start(await self.request(engine))
            victim.scope.cancel()
            await victim.returned.wait()
            assert victim.events == []
            held[0].scope.cancel()
            await heir.returned.wait()
            assert heir.finished is not None

    @live
    async def test_in_prefill(self, engine: Engine) -> None:
        """Cancelled at its slot, before its prefill: it goes, and lets the next one in."""
        async with company(engine) as group:
            await self._fill_but_one(engine, group)

            def cancel(event: Event) -> None:
                if isinstance(event, Started):
                    victim.scope.cancel()

            victim = Recorder(on_event=cancel)
            with arrival(victim) as arrived:
                group.start(await self.long_request(engine), victim)
                await victim.returned.wait()
            await self._check_gone(engine, victim, arrived.events)

    @live
    async def test_in_decoding(self, engine: Engine) -> None:
        """Cancelled at its third delta: next to nothing is generated for nobody, and what is, is counted as dropped."""
        async with company(engine) as group:
            await self._fill_but_one(engine, group)
            generated = (await engine.stats()).generated_tokens

            had = 0

            def cancel(event: Event) -> None:
                nonlocal had
                if isinstance(event, Delta) and len(victim.deltas) == 3:
                    had = victim.tokens
                    victim.follow = False
                    victim.scope.cancel()

            victim = Recorder(window=WINDOW, on_event=cancel)
            with arrival(victim) as arrived:
                group.start(await self.request(engine, max_tokens=10 * self.length), victim)
                await victim.returned.wait()
            made = (await engine.stats()).generated_tokens - generated
            assert victim.send.dropped == made - victim.tokens
            at_once = max(delta.tokens for delta in victim.deltas)
            most = self.tokens_in_flight
            if "pause" in engine.info.capabilities:
                most = min(most, WINDOW * TOKENS_PER_CHARACTER)
            assert made - had <= most * at_once
            await self._check_gone(engine, victim, arrived.events)

    @live
    async def test_cancels_do_not_starve_others(self, engine: Engine) -> None:
        """While prefills are started and cancelled again and again, another sequence gets to its end."""
        if engine.info.slots < 2:
            pytest.skip("the engine has one slot")
        async with company(engine) as group:
            steady = group.start(await self.request(engine))
            long = await self.long_request(engine)
            while not steady.returned.is_set():
                victim = group.start(long)
                await victim.wait_started()
                victim.scope.cancel()
                await victim.returned.wait()
        assert steady.finished is not None
