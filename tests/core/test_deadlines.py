"""The moving deadline, to the tick, and that it never moves past total."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.core.deadlines import Deadline
from tokenflow.core.states import Phase
from tokenflow.core.types import Timeouts

TIMEOUTS = Timeouts(queue_s=10, prefill_s=20, idle_s=5, total_s=100)
START = 1000.0
Move = Callable[[Deadline, float], object]


def slot(deadline: Deadline, now: float) -> None:
    deadline.slot_taken(now)


def token(deadline: Deadline, now: float) -> None:
    deadline.token(now, stalled=False)


def last_token(deadline: Deadline, now: float) -> None:
    deadline.token(now, stalled=True)


def stall(deadline: Deadline, now: float) -> None:
    deadline.hold(now, stalled=True, paused=False)


def unstall(deadline: Deadline, now: float) -> None:
    deadline.hold(now, stalled=False, paused=False)


def pause(deadline: Deadline, now: float) -> None:
    deadline.hold(now, stalled=False, paused=True)


def leave(deadline: Deadline, now: float) -> None:
    deadline.left(now, 15)


def come_back(deadline: Deadline, now: float) -> None:
    deadline.returned()


# What happens (after how many seconds), then when the deadline passes, and under which name.
SCENARIOS: list[tuple[list[tuple[float, Move]], float, str]] = [
    ([], 10, "queue_timeout"),
    ([(9, slot)], 29, "prefill_timeout"),
    ([(9, slot), (12, token)], 17, "idle_timeout"),
    ([(9, slot), (12, token), (16, token)], 21, "idle_timeout"),
    ([(9, slot), (12, last_token)], 100, "total_timeout"),
    ([(9, slot), (12, last_token), (50, unstall)], 55, "idle_timeout"),
    ([(9, slot), (12, last_token), (50, token)], 55, "idle_timeout"),
    ([(9, slot), (12, token), (13, stall)], 100, "total_timeout"),
    ([(9, slot), (12, token), (13, stall), (14, stall), (15, unstall)], 20, "idle_timeout"),
    ([(9, slot), (12, token), (14, unstall)], 17, "idle_timeout"),  # there was no stall to end
    ([(9, stall)], 10, "queue_timeout"),  # only decode can stall
    ([(9, slot), (10, stall)], 29, "prefill_timeout"),
    ([(9, slot), (10, pause)], 100, "total_timeout"),  # a paused prefill is nobody's silence
    ([(9, slot), (10, pause), (50, unstall)], 70, "prefill_timeout"),
    ([(9, slot), (12, token), (13, pause), (60, unstall)], 65, "idle_timeout"),
    ([(5, pause)], 10, "queue_timeout"),  # who waits holds nothing that a pause could hold
    ([(9, slot), (12, token), (13, pause), (13, leave)], 28, "grace"),
    ([(9, slot), (12, token), (13, leave)], 17, "idle_timeout"),  # one that goes on can still go silent
    ([(9, slot), (12, token), (13, pause), (13, leave), (20, come_back)], 100, "total_timeout"),
    ([(9, slot), (12, token), (92, pause), (92, leave)], 100, "total_timeout"),
    ([(9, slot), (12, token), (97, token)], 100, "total_timeout"),
    ([(9, slot), (12, token), (95, token)], 100, "total_timeout"),  # both at once: total has the last word
]


@pytest.mark.parametrize(("events", "at", "code"), SCENARIOS)
def test_a_scenario_passes_to_the_tick_and_under_its_name(
    events: list[tuple[float, Move]], at: float, code: str
) -> None:
    deadline = Deadline(TIMEOUTS, START)
    for when, event in events:
        event(deadline, START + when)
    assert (deadline.at, deadline.code) == (START + at, code)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_done_waits_for_nothing_and_tells_the_phase_it_was_in(steps: int) -> None:
    deadline = Deadline(TIMEOUTS, START)
    for step in (slot, token)[:steps]:
        step(deadline, START)
    assert deadline.done() is list(Phase)[steps]
    assert deadline.at == inf
    assert deadline.done() is Phase.DONE


@pytest.mark.parametrize("event", [token, last_token])
def test_a_token_without_a_slot_or_after_the_end_is_a_fault(event: Move) -> None:
    deadline = Deadline(TIMEOUTS, START)
    with pytest.raises(RuntimeError, match="no move from QUEUE to DECODE"):
        event(deadline, START)
    deadline.done()
    with pytest.raises(RuntimeError, match="no move from DONE to DECODE"):
        event(deadline, START)


def test_a_slot_is_taken_once() -> None:
    deadline = Deadline(TIMEOUTS, START)
    deadline.slot_taken(START)
    with pytest.raises(RuntimeError, match="no move from PREFILL to PREFILL"):
        deadline.slot_taken(START)


SPANS = st.floats(0, 1e4)


@given(
    st.builds(Timeouts, queue_s=SPANS, prefill_s=SPANS, idle_s=SPANS, total_s=SPANS),
    st.lists(
        st.tuples(
            st.floats(0, 1e3), st.sampled_from([slot, token, last_token, stall, unstall, pause, leave, come_back])
        )
    ),
)
def test_it_never_passes_after_total_and_its_code_says_why(
    timeouts: Timeouts, events: list[tuple[float, Move]]
) -> None:
    now = START
    deadline = Deadline(timeouts, now)
    for elapsed, event in events:
        now += elapsed
        if event is slot and deadline.phase is not Phase.QUEUE:
            continue
        if event in (token, last_token) and deadline.phase is Phase.QUEUE:
            continue
        event(deadline, now)
        assert deadline.at <= START + timeouts.total_s
        assert (deadline.code == "total_timeout") == (deadline.at == deadline.total_at)
        assert not deadline.suspended or deadline.phase is not Phase.QUEUE
