"""Credit in mock time: what is allowed is generated, and never one record more."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.service.conftest import STEP_S, Rig, open_rig
from tokenflow.core.states import Phase
from tokenflow.core.types import Attendance, Delta, GenerationRequest, TextPrompt
from tokenflow.service.reader import StreamReader
from tokenflow.service.records import Ended
from tokenflow.service.stream import Stream


class Takes:
    """Reads and acknowledges all it may."""

    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader
        self.deltas: list[Delta] = []
        self.end: Any = None

    async def run(self) -> None:
        while records := await self.reader.read():
            for record in records:
                if isinstance(record.event, Delta):
                    self.deltas.append(record.event)
                else:
                    self.end = record.event
            self.reader.ack(records[-1].n)
        self.reader.close()


async def start(nursery: trio.Nursery, r: Rig, credit: int, **wishes: Any) -> tuple[Stream, Takes]:
    stream, reader = await r.open(**{"max_tokens": 5000} | wishes)
    reader.allow(credit)
    takes = Takes(reader)
    nursery.start_soon(takes.run)
    return stream, takes


def made(r: Rig, stream: Stream) -> int:
    return r.engine.stepper.made.get(stream.identity.id, 0)


async def test_a_thousand_for_a_thousand(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    async with open_rig(tokens_per_s=10_000, context_length=8192) as r:
        stream, takes = await start(nursery, r, 1)
        total = 1
        for more in (1, 63, 64, 65, 300, 506):
            await trio.sleep(20)
            assert made(r, stream) == len(takes.deltas) == total
            takes.reader.allow(more)
            total += more
        await trio.sleep(300)  # far beyond idle_timeout_s: the silence is the reader's doing
        assert made(r, stream) == len(takes.deltas) == total == 1000
        stream.cancel("client")
        await r.settle()
        assert r.sink.ended(stream.identity.id).generated_tokens == 1000
        assert isinstance(takes.end, Ended) and takes.end.reasons == ("cancelled",)


async def test_nothing_before_the_first_credit_however_long_it_takes(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_rig(timeouts={"prefill_timeout_s": 20.0}) as r:
        stream, takes = await start(nursery, r, 0, max_tokens=3)
        await trio.sleep(100)
        assert made(r, stream) == 0 and takes.end is None
        takes.reader.allow(3)
        await r.settle()
        assert len(takes.deltas) == 3
        assert takes.end.reasons == ("length",), "the end is free"


@pytest.mark.parametrize("n", [2, 3])
async def test_choices_share_it_and_what_one_does_not_need_the_others_get(
    autojump_clock: MockClock, nursery: trio.Nursery, n: int
) -> None:
    async with open_rig(slots=4) as r:
        stream, takes = await start(nursery, r, 1, n=n, max_tokens=10)
        for total in range(1, 10 * n):
            await trio.sleep(1)
            assert made(r, stream) == len(takes.deltas) == total
            takes.reader.allow(1)
        await r.settle()
        assert len(takes.deltas) == 10 * n and takes.end.reasons == ("length",) * n


UNEQUAL = (TextPrompt(text='{"synthetic": {"stop_at": 3, "tokens_per_s": 5}}'), TextPrompt(text="a long one"))
"""Two choices, of which one ends early."""


async def ask_unequal(r: Rig) -> tuple[Stream, StreamReader]:
    request = GenerationRequest(model="", prompts=UNEQUAL, stream=True, max_tokens=100)
    return await r.service.open(request, key="-", route="/test")


async def test_what_a_choice_that_ended_did_not_use_the_others_get_at_once(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_rig(slots=2) as r:
        stream, reader = await ask_unequal(r)
        reader.allow(10)
        takes = Takes(reader)
        nursery.start_soon(takes.run)
        await trio.sleep(10)
        assert made(r, stream) - 1 == len(takes.deltas) == 10, "one token was the end"
        stream.cancel("client")


async def test_where_only_those_are_left_that_wait_for_the_reader_silence_is_its_doing(
    autojump_clock: MockClock,
) -> None:
    async with open_rig(slots=2, stream={"window": 8}, timeouts={"idle_timeout_s": 2.0}) as r:
        stream, reader = await ask_unequal(r)
        await trio.sleep(60)
        assert stream.phase is Phase.DECODE and stream.idle_since is not None, "others may have its slots"
        stream.cancel("client")
        reader.close()


async def test_what_can_be_joined_by_nothing_more_is_handed_on_at_once(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_rig(tokens_per_s=100) as r:
        stream, takes = await start(nursery, r, 1, coalesce_ms=1000)
        for total in range(1, 10):
            await trio.sleep(0.1)
            assert len(takes.deltas) == total
            takes.reader.allow(1)
        stream.cancel("client")


async def test_coalesced_deltas_count_as_the_records_that_they_become(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_rig(tokens_per_s=100) as r:
        stream, takes = await start(nursery, r, 20, coalesce_ms=100)
        await trio.sleep(100)
        assert len(takes.deltas) == 20
        assert sum(delta.tokens for delta in takes.deltas) == made(r, stream) > 40
        stream.cancel("client")


async def test_credit_begins_with_what_was_given_so_far(autojump_clock: MockClock) -> None:
    async with open_rig(stream={"window": 8}) as r:
        stream, reader = await r.open(max_tokens=100)
        await trio.sleep(1)
        records = await reader.read()
        assert len(records) == made(r, stream) == 8
        reader.allow(2)  # these eight may be on their way already
        reader.ack(8)
        await trio.sleep(1)
        assert len(await reader.read()) == 2 and made(r, stream) == 10
        reader.close()


async def test_late_credit_holds_back_what_was_generated_before_it(autojump_clock: MockClock) -> None:
    async with open_rig(stream={"window": 8}) as r:
        stream, reader = await r.open(max_tokens=100)
        await trio.sleep(1)
        reader.allow(3)
        assert len(await reader.read()) == 3
        reader.ack(3)
        with trio.move_on_after(1):
            await reader.read()
            pytest.fail("it was given more than it allowed")
        assert made(r, stream) == 8
        stream.cancel("client")
        await trio.sleep(STEP_S)
        rest = await reader.read()
        assert len(rest) == 6 and isinstance(rest[-1].event, Ended), "after a cancel what is left is free"
        reader.close()


async def test_whoever_does_not_count_sets_the_engine_free_but_not_the_other_reader(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_rig(context_length=8192) as r:
        stream, counting = await start(nursery, r, 5)
        free = Takes(stream.attach())
        nursery.start_soon(free.run)
        await trio.sleep(1)
        assert len(counting.deltas) == 5 and len(free.deltas) > 50
        free.reader.close()
        await trio.sleep(1)
        reached = made(r, stream)
        await trio.sleep(1)
        assert made(r, stream) == reached, "alone again, it binds the engine"
        counting.reader.allow(reached - 5 + 10)
        await trio.sleep(1)
        assert made(r, stream) == len(counting.deltas) == reached + 10
        counting.reader.close()


async def test_coming_back_with_credit_binds_at_once(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        stream, reader = await r.open(max_tokens=100, attendance=Attendance(on_disconnect="pause"))
        reader.allow(4)
        await trio.sleep(1)
        reader.ack((await reader.read())[-1].n)
        reader.close()
        await trio.sleep(1)
        assert made(r, stream) == 4
        reader = stream.attach(4, credit=2)
        await trio.sleep(1)
        assert [record.n for record in await reader.read()] == [5, 6] and made(r, stream) == 6
        stream.cancel("client")
        reader.close()


async def test_of_two_who_count_the_one_that_allows_most_binds_until_it_leaves(autojump_clock: MockClock) -> None:
    async with open_rig(slots=2) as r:
        stream, much = await r.open(max_tokens=100, n=2)
        much.allow(3)
        little = stream.attach(0, credit=1)
        await trio.sleep(1)
        assert made(r, stream) == 3
        much.allow(20)
        much.close()
        await trio.sleep(1)
        assert made(r, stream) == 3
        little.allow(3)
        await trio.sleep(1)
        assert made(r, stream) == 4
        little.close()
