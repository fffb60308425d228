"""The waiting room against a naive model: first come, first served, all slots at once or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.core.admission import Admission, Ticket
from tokenflow.errors import InvalidRequest, QueueFull


def test_who_asks_for_more_than_there_is_is_refused_for_good() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Admission(4, 8).enter(5, lambda: None)
    assert caught.value.param == "n"


def test_no_places_and_no_slots_is_refused_with_a_time_to_come_back() -> None:
    admission = Admission(1, 0)
    admission.enter(1, lambda: None)
    with pytest.raises(QueueFull) as caught:
        admission.enter(1, lambda: None)
    assert caught.value.retry_after_s


def test_the_last_place_is_not_given_while_others_wait() -> None:
    admission = Admission(2, 1)
    first = admission.enter(1, lambda: None)
    admission.enter(2, lambda: None)
    assert (admission.free, admission.waiting) == (1, 1)
    with pytest.raises(QueueFull):  # one slot is free, but nobody overtakes
        admission.enter(1, lambda: None)
    first.leave()
    assert (admission.free, admission.waiting) == (0, 0)


def test_only_what_changes_something_is_told() -> None:
    admission, told = Admission(1, 8), []
    admission.listen(lambda: told.append(admission.waiting))
    holder = admission.enter(1, lambda: None)
    waiters = [admission.enter(1, lambda: None) for _ in range(3)]
    assert told == [1]  # the first to wait: a thousand more must not make anybody look again
    waiters[0].leave()
    assert told == [1]
    holder.leave()
    assert told == [1, 1]


Move = st.tuples(st.sampled_from(["enter", "leave", "leave again"]), st.integers(0, 20), st.integers(1, 4))


@given(slots=st.integers(1, 4), places=st.integers(0, 5), moves=st.lists(Move, max_size=60))
def test_against_a_list(slots: int, places: int, moves: list[tuple[str, int, int]]) -> None:
    admission = Admission(slots, places)
    live: list[tuple[Ticket, list[bool]]] = []
    gone: list[Ticket] = []
    for what, which, n in moves:
        if what == "enter":
            ready: list[bool] = []
            try:
                live.append((admission.enter(n, lambda ready=ready: ready.append(True)), ready))
            except (QueueFull, InvalidRequest) as exc:
                assert isinstance(exc, InvalidRequest) == (n > slots)
        elif what == "leave" and live:
            ticket, _ = live.pop(which % len(live))
            ticket.leave()
            gone.append(ticket)
        elif gone:
            gone[which % len(gone)].leave()
        holding = [ticket for ticket, _ in live if ticket.held]
        waiting = [ticket for ticket, _ in live if not ticket.held]
        assert admission.free == slots - sum(ticket.n for ticket in holding) >= 0
        assert admission.waiting == len(waiting) <= places
        assert [t for t, _ in live if t.held] + waiting == [t for t, _ in live], "nobody overtakes"
        assert not waiting or waiting[0].n > admission.free, "nobody waits for what is there"
        assert all(len(ready) == ticket.held for ticket, ready in live), "told once, when it holds"
