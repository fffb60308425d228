"""The replay log against a naive model that keeps everything, and the cases where readers act inside a wake."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenflow.core.replay import RECORD_BYTES, Bounds, Cursor, Record, ReplayLog
from tokenflow.core.types import Delta, TokenLogprob
from tokenflow.errors import ResumeWindowLost


def said(records: list[Record[str]]) -> list[tuple[int, str, int]]:
    return [(record.n, record.event, record.source) for record in records]


class ReplayMachine(RuleBasedStateMachine):
    """The model: all records ever, each reader's n, what was accepted, and how far everybody has been."""

    def __init__(self) -> None:
        super().__init__()
        self.credited: list[Record[str]] = []
        self.log: ReplayLog[str] = ReplayLog(self.credited.append)
        self.all: list[tuple[int, str, int]] = []
        self.sealed = False
        self.readers: list[tuple[Cursor[str], list[int]]] = []  # with the heads it was woken at
        self.places: list[int] = []
        self.accepted = 0
        self.trimmed = 0

    def moved(self) -> None:
        if self.places:
            self.accepted = max(self.accepted, *self.places)
            self.trimmed = max(self.trimmed, min(self.places))

    @precondition(lambda self: not self.sealed)
    @rule(source=st.integers(0, 2), last=st.booleans())
    def append(self, source: int, last: bool) -> None:
        event = f"event {len(self.all) + 1}"
        for _, woken in self.readers:
            woken.clear()
        if last:
            n, source = self.log.seal(event), -1
        else:
            n = self.log.append(event, source)
        self.sealed = last
        self.all.append((n, event, source))
        assert all(woken == [n] for _, woken in self.readers)

    @precondition(lambda self: self.sealed)
    @rule()
    def nothing_follows_the_seal(self) -> None:
        with pytest.raises(RuntimeError, match="sealed"):
            self.log.append("too late")
        with pytest.raises(RuntimeError, match="sealed"):
            self.log.seal("too late")

    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        after = data.draw(st.integers(self.trimmed, len(self.all)))
        woken: list[int] = []
        self.readers.append((self.log.attach(lambda _: woken.append(self.log.head), after), woken))
        self.places.append(after)
        self.moved()

    @rule(beyond=st.integers(1, 3))
    def attach_out_of_range(self, beyond: int) -> None:
        with pytest.raises(ValueError, match="lies ahead"):
            self.log.attach(lambda _: None, len(self.all) + beyond)
        if self.trimmed - beyond >= 0:
            with pytest.raises(ResumeWindowLost) as caught:
                self.log.attach(lambda _: None, self.trimmed - beyond)
            assert caught.value.details["oldest"] == self.trimmed + 1
            assert caught.value.details["last"] == len(self.all)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        n = data.draw(st.integers(self.places[index], len(self.all)))
        self.readers[index][0].ack(n)
        self.places[index] = n
        self.moved()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def ack_out_of_range(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        for n in (self.places[index] - 1, len(self.all) + 1):
            with pytest.raises(ValueError, match=f"ack of {n}"):
                self.readers[index][0].ack(n)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        cursor, _ = self.readers.pop(index)
        del self.places[index]
        cursor.detach()
        self.moved()
        cursor.detach()  # repeatable

    @invariant()
    def numbers_have_no_gap(self) -> None:
        assert self.log.head == len(self.all)
        assert [n for n, _, _ in self.all] == list(range(1, len(self.all) + 1))
        assert self.log.sealed is self.sealed

    @invariant()
    def every_reader_sees_exactly_what_it_lacks(self) -> None:
        for (cursor, _), place in zip(self.readers, self.places, strict=True):
            assert cursor.n == place
            assert said(cursor.peek()) == self.all[place:]
            assert cursor.at_end is (self.sealed and place == len(self.all))

    @invariant()
    def credit_comes_once_a_record_in_order_and_at_the_fastest_pace(self) -> None:
        assert said(self.credited) == self.all[: self.accepted]
        assert self.log.accepted == self.accepted

    @invariant()
    def what_every_attached_reader_has_is_dropped_and_nothing_else(self) -> None:
        assert self.log.statistics().held == len(self.all) - self.trimmed
        assert self.log.statistics().readers == len(self.readers)
        assert self.log.bytes == RECORD_BYTES * (len(self.all) - self.trimmed)


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(max_examples=100, stateful_step_count=30)


def test_without_a_reader_nothing_is_accepted() -> None:
    credited: list[Record[str]] = []
    log: ReplayLog[str] = ReplayLog(credited.append)
    for event in "abc":
        log.append(event, source=0)
    cursor = log.attach(lambda _: None)
    cursor.detach()
    assert credited == []
    assert said(log.attach(lambda _: None).peek()) == [(1, "a", 0), (2, "b", 0), (3, "c", 0)]


def test_a_reader_that_attaches_ahead_paces_at_once() -> None:
    """Otherwise it would wait for an engine that waits for credit, which only its own next ack could give."""
    credited: list[Record[str]] = []
    log: ReplayLog[str] = ReplayLog(credited.append)
    slow = log.attach(lambda _: None)
    for event in "abc":
        log.append(event, source=0)
    log.attach(lambda _: None, after=3)
    assert [record.event for record in credited] == ["a", "b", "c"]
    assert len(slow.peek()) == 3


def test_a_reader_that_takes_the_seal_inline_is_at_its_end() -> None:
    ends: list[bool] = []
    log: ReplayLog[str] = ReplayLog(lambda record: None)

    def take(_: Record[str]) -> None:
        cursor.ack(log.head)
        ends.append(cursor.at_end)

    cursor = log.attach(take)
    log.append("a")
    log.seal("end")
    assert ends == [False, True]


def test_a_reader_that_leaves_inside_its_wake_takes_nobodys_turn() -> None:
    log: ReplayLog[str] = ReplayLog(lambda record: None)
    woken: list[str] = []
    first = log.attach(lambda _: first.detach())
    log.attach(lambda _: woken.append("second"))
    log.append("a")
    assert woken == ["second"]


def test_credit_given_inline_may_append_at_once() -> None:
    """An engine without a loop of its own may go on inside the credit that an ack gives."""
    order: list[int] = []
    log: ReplayLog[str] = ReplayLog(lambda record: more(record))

    def more(record: Record[str]) -> None:
        order.append(record.n)
        if record.n < 5:
            log.append("next", 0)

    cursor = log.attach(lambda _: cursor.ack(log.head))
    log.append("first", 0)
    assert order == [1, 2, 3, 4, 5]
    assert cursor.peek() == []


def test_a_reader_that_has_left_reads_on_only_while_its_records_are_there() -> None:
    log: ReplayLog[str] = ReplayLog(lambda record: None)
    left, other = log.attach(lambda _: None), log.attach(lambda _: None)
    left.detach()
    log.append("a")
    assert [record.event for record in left.peek()] == ["a"]
    other.ack(1)
    with pytest.raises(ResumeWindowLost):
        left.peek()


# --- kept logs --------------------------------------------------------------------------------------------------------


def kept(bounds: Bounds | None = None, **more: Any) -> ReplayLog[str]:
    return ReplayLog(lambda record: None, keep=True, bounds=bounds, **more)


def test_a_kept_log_holds_what_everybody_has() -> None:
    log = kept()
    reader = log.attach(lambda _: None)
    for event in "abc":
        log.append(event)
    reader.ack(3)
    reader.detach()
    assert [record.event for record in log.attach(lambda _: None).peek()] == ["a", "b", "c"]
    assert [record.event for record in log.attach(lambda _: None, after=2).peek()] == ["c"]


@pytest.mark.parametrize("bounds", [Bounds(records=80), Bounds(bytes=80 * (RECORD_BYTES + 10))])
def test_a_kept_log_keeps_its_bound_and_tells_who_falls_out(bounds: Bounds) -> None:
    changes: list[int] = []
    log = kept(bounds, on_grow=changes.append)
    fast, slow = log.attach(lambda _: None), log.attach(lambda _: None)
    for i in range(1000):
        fast.ack(log.append(str(i), size=10))
        held = log.statistics()
        assert held.held <= 80 and held.bytes == held.held * (RECORD_BYTES + 10) == sum(changes)
    assert log.oldest > 900, "it holds nearly as much as it may"
    with pytest.raises(ResumeWindowLost) as caught:
        slow.peek()
    assert caught.value.details == {"oldest": log.oldest, "last": 1000, "state": "live"}
    assert fast.peek() == []
    log.clear()
    assert log.bytes == sum(changes) == 0


def test_what_the_fastest_reader_lacks_is_never_dropped() -> None:
    log = kept(Bounds(records=8))
    reader = log.attach(lambda _: None)
    for i in range(100):
        log.append(str(i))
    assert [record.event for record in reader.peek()] == [str(i) for i in range(100)]


def test_running_on_accepts_while_nobody_reads_and_waits_for_who_comes_back() -> None:
    credited: list[int] = []
    log: ReplayLog[str] = ReplayLog(lambda record: credited.append(record.n), keep=True)
    log.run_on = True
    for i in range(10):
        log.append(str(i))
    assert credited == list(range(1, 11))
    reader = log.attach(lambda _: None, after=4)
    assert log.behind
    log.append("more")
    assert len(credited) == 10, "somebody reads now, and has not come that far"
    reader.ack(10)
    assert not log.behind
    reader.ack(11)
    assert credited[-1] == 11


KINDS = {
    "words": lambda i: Delta(f" {i:05}"),
    "emoji": lambda i: Delta(f"🦆{i}"),
    "long": lambda i: Delta(f"{i} " * 300),
    "log-probabilities": lambda i: Delta(f" {i:05}", 1, (_logprob(i, 0),)),
    "alternatives": lambda i: Delta(f" {i:05}", 1, (_logprob(i, 20),)),
}


def _logprob(i: int, top: int) -> TokenLogprob:
    return TokenLogprob(f" {i:05}", -i / 7, b" %05d" % i, tuple(_logprob(i + j, 0) for j in range(top)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_accounted_is_what_python_holds(kind):
    count = 2000
    log = ReplayLog(lambda record: None, keep=True, bounds=Bounds(10**6, 10**9))
    gc.collect()
    tracemalloc.start()
    for i in range(count):
        delta = KINDS[kind](1000 + i)
        log.append(delta, 0, size=delta.memory_bytes)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= log.bytes <= 1.25 * held, (held / count, log.bytes / count)  # compiled, less is held
