"""Times between tokens: counted into buckets whose bounds are inclusive, as Prometheus has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.core.timings import TBT_BUCKETS_S, TTFT_BUCKETS_S, TTLT_BUCKETS_S, GapCounter, merge


@pytest.mark.parametrize("buckets", [TBT_BUCKETS_S, TTFT_BUCKETS_S, TTLT_BUCKETS_S])
def test_bounds_rise(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] > 0


def test_one_token_opens_a_gap_and_closes_none() -> None:
    counter = GapCounter()
    assert sum(counter.gaps().counts) == 0
    counter.token(5.0)
    assert sum(counter.gaps().counts) == 0
    assert counter.gaps().sum_s == 0.0


@pytest.mark.parametrize("index", range(len(TBT_BUCKETS_S)))
def test_a_gap_as_long_as_a_bound_counts_below_it_and_a_longer_one_above(index: int) -> None:
    bound = TBT_BUCKETS_S[index]
    counter = GapCounter()
    for now in (0.0, bound):
        counter.token(now)
    assert counter.gaps().counts[index] == 1
    longer = GapCounter()
    for now in (0.0, bound * 1.0001):
        longer.token(now)
    assert longer.gaps().counts[index + 1] == 1


TIMES = st.lists(st.floats(0, 100), max_size=30).map(sorted)


@given(st.lists(TIMES, min_size=1, max_size=4))
def test_counts_and_sums_add_up_over_sequences(sequences: list[list[float]]) -> None:
    counters = []
    for times in sequences:
        counter = GapCounter()
        for now in times:
            counter.token(now)
        counters.append(counter)
        assert sum(counter.gaps().counts) == max(0, len(times) - 1)
        assert counter.gaps().sum_s == pytest.approx(times[-1] - times[0] if times else 0)
    whole = merge(counters)
    assert sum(whole.counts) == sum(max(0, len(times) - 1) for times in sequences)
    assert whole.sum_s == pytest.approx(sum(times[-1] - times[0] for times in sequences if times))
    assert len(whole.counts) == len(TBT_BUCKETS_S) + 1
