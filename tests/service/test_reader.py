"""A reader that is written to by whoever has the record: nothing twice, nothing lost, whatever the writer does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
import trio.testing

from tokenflow.core.replay import Record, ReplayLog
from tokenflow.core.types import Delta, Usage
from tokenflow.service.reader import StreamReader
from tokenflow.service.records import Ended, StreamEvent


class Calm:
    """A stream that is well and hears nothing."""

    well = True

    def allowed(self) -> None: ...
    def moved(self) -> None: ...
    def left(self, reader: StreamReader) -> None: ...


class Tap:
    """Takes records at once, as far as a script says: "take", "hold", "busy" or "break"."""

    def __init__(self, script: list[str]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.holds: list[int] = []

    def write(self, records: list[Record[StreamEvent]]) -> bool | None:
        numbers = [record.n for record in records]
        match self.script.pop() if self.script else "take":
            case "break":
                raise ValueError("no frame for this")
            case "busy":
                return None
            case "hold":
                self.holds = numbers
                return False
            case _:
                self.taken += numbers
                return True

    async def flush(self) -> None:
        assert self.holds
        await trio.lowlevel.checkpoint()
        self.taken += self.holds
        self.holds = []


def start() -> tuple[ReplayLog[StreamEvent], StreamReader, list[int]]:
    accepted: list[int] = []
    log: ReplayLog[StreamEvent] = ReplayLog(lambda record: accepted.append(record.n))
    return log, StreamReader(Calm(), log, 0, None), accepted


async def drain(reader: StreamReader, tap: Tap) -> None:
    """As a connection does it: what `read` returns is written too, in order."""
    while records := await reader.read(tap):
        for record in records:
            tap.taken.append(record.n)
            reader.ack(record.n)


async def test_a_caught_up_reader_is_written_to_in_the_task_that_has_the_record(nursery: trio.Nursery) -> None:
    log, reader, accepted = start()
    tap = Tap([])
    nursery.start_soon(drain, reader, tap)
    await trio.testing.wait_all_tasks_blocked()
    for n in range(1, 4):
        log.append(Delta("x"), 0)
        assert tap.taken == accepted == list(range(1, n + 1)), "at once: no other task has run"
    log.append(Delta("x"), 0, hold=True)
    assert tap.taken == [1, 2, 3], "another is to follow"
    log.wake()
    assert tap.taken == [1, 2, 3, 4]
    log.seal(Ended(("stop",), Usage()))
    assert tap.taken == [1, 2, 3, 4], "the end is the reader's own affair"


@pytest.mark.parametrize("seed", range(30))
async def test_every_record_is_taken_once_and_in_order(seed: int, nursery: trio.Nursery) -> None:
    rng = random.Random(seed)
    log, reader, accepted = start()
    tap = Tap([rng.choice(["take", "take", "hold", "busy"]) for _ in range(40)])
    done = trio.Event()

    async def read_and_beat() -> None:
        """A heartbeat that comes at any moment cuts the wait, also where a part of a record is held."""
        while not reader.at_end:
            with trio.CancelScope() as scope:
                beats.append(scope)
                await drain(reader, tap)
        done.set()

    beats: list[trio.CancelScope] = []
    nursery.start_soon(read_and_beat)
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            await trio.lowlevel.checkpoint()
        log.append(Delta("x"), 0, hold=rng.random() < 0.3)
        assert accepted == list(range(1, len(accepted) + 1))
        if beats and rng.random() < 0.3:
            beats[-1].cancel()
    log.seal(Ended(("stop",), Usage()))
    await done.wait()
    assert tap.taken == accepted == list(range(1, 62))


async def test_a_writer_that_breaks_breaks_its_reader_alone(nursery: trio.Nursery) -> None:
    log, reader, accepted = start()
    _, other, _ = start()
    failed: list[Any] = []

    async def read() -> None:
        try:
            await drain(reader, Tap(["break"]))
        except ValueError as exc:
            failed.append(str(exc))

    nursery.start_soon(read)
    await trio.testing.wait_all_tasks_blocked()
    log.append(Delta("x"), 0)
    await trio.testing.wait_all_tasks_blocked()
    assert failed == ["no frame for this"]
    assert accepted == [] and not other.at_end


async def test_nothing_is_written_beyond_the_credit(nursery: trio.Nursery) -> None:
    log, reader, _ = start()
    reader.allow(1)
    tap = Tap([])
    nursery.start_soon(drain, reader, tap)
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(3):
        log.append(Delta("x"), 0)
    await trio.testing.wait_all_tasks_blocked()
    assert tap.taken == [1]
    reader.allow(1)
    await trio.testing.wait_all_tasks_blocked()
    assert tap.taken == [1, 2]
