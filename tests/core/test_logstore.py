"""All logs together: the total holds, in the stated order of giving way, and what may not go stays."""

from __future__ import annotations

import pytest

from tokenflow.core import logstore
from tokenflow.core.logstore import STREAM_BYTES, LogStore
from tokenflow.core.replay import RECORD_BYTES, Bounds, ReplayLog
from tokenflow.errors import ResumeWindowLost

EACH = RECORD_BYTES + 50


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(records: int) -> tuple[LogStore, Clock]:
    """A store that has room for so many records of `EACH` bytes."""
    clock = Clock()
    return LogStore(Bounds(10_000, 10**9), records * EACH, clock), clock


def fill(log: ReplayLog[str], count: int, *, read: bool = True) -> None:
    reader = log.attach(lambda _: None, after=log.head)
    for _ in range(count):
        n = log.append("x", size=50)
        if read:
            reader.ack(n)
    if read:
        reader.detach()


def new(logs: LogStore) -> ReplayLog[str]:
    return logs.new(lambda record: None, keep=True)


def held(*logs: ReplayLog[str]) -> list[int]:
    return [log.statistics().held for log in logs]


def test_a_stream_counts_beside_a_log_that_is_kept_until_it_is_forgotten() -> None:
    logs, _ = store(100)
    log = new(logs)
    assert logs.bytes == STREAM_BYTES
    logs.ended(log, 100.0)
    assert logs.bytes == STREAM_BYTES
    for _ in range(2):
        logs.forget(log)
        assert logs.bytes == 0
    logs.forget(logs.new(lambda record: None, keep=False))
    assert logs.bytes == 0


def test_an_ended_stream_is_told_when_it_has_to_go() -> None:
    logs, _ = store(100)
    evicted: list[int] = []
    for i in range(5):
        logs.ended(new(logs), 100.0, lambda i=i: evicted.append(i))
    assert logs.bytes == STREAM_BYTES * (5 - len(evicted)) < logs.total_bytes
    assert evicted == list(range(5 - logs.bytes // STREAM_BYTES))


@pytest.fixture
def logs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams cost nothing beside their logs."""
    monkeypatch.setattr(logstore, "STREAM_BYTES", 0)


def test_the_expired_go_first_then_the_ended_that_were_read_longest_ago_then_the_oldest_of_the_live(
    logs_alone: None,
) -> None:
    logs, clock = store(50)
    expired, read_again, unread, live = new(logs), new(logs), new(logs), new(logs)
    for log in (read_again, unread, expired):
        fill(log, 10)
        logs.ended(log, until=5.0 if log is expired else 100.0)
    fill(live, 10)
    clock.now = 10.0
    logs.being_read(read_again)
    assert held(expired, read_again, unread, live) == [10, 10, 10, 10]
    fill(live, 11)
    assert held(expired, read_again, unread, live) == [0, 10, 10, 21]
    fill(live, 10)
    assert held(expired, read_again, unread, live) == [0, 10, 0, 31]
    fill(live, 10)
    assert held(expired, read_again, unread, live) == [0, 0, 0, 41]
    fill(live, 100)
    assert 40 <= held(live)[0] < 50
    assert logs.bytes == held(live)[0] * EACH < logs.total_bytes
    assert logs.evicted_records == 30 + 141 - held(live)[0]
    with pytest.raises(ResumeWindowLost):
        unread.attach(lambda _: None)


def test_when_nothing_may_go_there_is_no_room() -> None:
    logs, _ = store(50)
    log = new(logs)
    fill(log, 60, read=False)
    assert held(log) == [60] and not logs.has_room
    logs.forget(log)
    logs.forget(log)
    assert logs.bytes == 0 and logs.has_room


def test_the_largest_live_log_gives_way_first(logs_alone: None) -> None:
    logs, _ = store(50)
    small, large = new(logs), new(logs)
    fill(small, 10)
    fill(large, 39)
    fill(small, 5)
    assert held(small) == [15]
    assert held(large)[0] < 39
