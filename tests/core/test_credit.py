"""Sharing out credit: never more than there is, nothing lost, nothing taken back from who may be using it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenflow.core.credit import Grant, share_out

GRANTS = st.lists(
    st.builds(lambda sent, more, live: Grant(sent, sent + more, live), *[st.integers(0, 9)] * 2, st.booleans()),
    min_size=1,
    max_size=5,
)


def test_one_sequence_gets_all_of_it() -> None:
    assert share_out(1000, [Grant(0, 0, True)]) == [1000]
    assert share_out(7, [Grant(93, 95, True)]) == [100]


def test_several_share_evenly_and_the_odd_one_goes_to_who_had_least() -> None:
    assert share_out(7, [Grant(0, 0, True)] * 3) == [3, 2, 2]
    assert share_out(3, [Grant(5, 5, True), Grant(2, 4, True)]) == [5, 5]


def test_what_an_ended_one_did_not_use_is_there_for_the_others() -> None:
    assert share_out(6, [Grant(2, 5, False), Grant(2, 5, True)]) == [2, 8]


@given(GRANTS, st.integers(0, 40))
def test_never_more_than_there_is_and_nothing_lost(grants: list[Grant], budget: int) -> None:
    most = share_out(budget, grants)
    given = [m - grant.sent for m, grant in zip(most, grants, strict=True)]
    assert all(share >= 0 for share in given)
    assert sum(given) == (budget if any(grant.live for grant in grants) else 0)


@given(GRANTS, st.integers(0, 40))
def test_what_was_granted_stays_granted(grants: list[Grant], budget: int) -> None:
    live = [grant for grant in grants if grant.live]
    if sum(grant.most - grant.sent for grant in live) <= budget:
        most = share_out(budget, grants)
        assert all(m >= grant.most for m, grant in zip(most, grants, strict=True) if grant.live)
