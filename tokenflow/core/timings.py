"""Latency, as this field names it. TTFT: admission to first token. TBT (also ITL): between tokens. TTLT: to the last.

Buckets are chosen for language models: TTFT spans a cached short prompt (milliseconds) to a long prefill on a laptop
(minutes); TBT spans a batch of one on a fast card (5 ms) to a starved stream (seconds).
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import Final

from tokenflow.core.lifecycle import Gaps

TBT_BUCKETS_S: Final = (
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    10.0,
)
TTFT_BUCKETS_S = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
TTLT_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1200.0)


class GapCounter:
    """Counts times between tokens into `TBT_BUCKETS_S`."""

    __slots__ = ("_counts", "_last", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(TBT_BUCKETS_S) + 1)
        self._sum_s = 0.0
        self._last = inf  # none yet: unlike None, that needs no object of its own

    def token(self, now: float) -> None:
        """A token came at `now`. The first one opens the first gap and closes none."""
        if self._last != inf:
            gap = now - self._last
            self._counts[bisect_left(TBT_BUCKETS_S, gap)] += 1
            self._sum_s += gap
        self._last = now

    def gaps(self) -> Gaps:
        return Gaps(counts=tuple(self._counts), sum_s=self._sum_s)


def merge(counters: list[GapCounter]) -> Gaps:
    """The gaps of several sequences as one."""
    all_gaps = [counter.gaps() for counter in counters]
    return Gaps(
        counts=tuple(map(sum, zip(*(gaps.counts for gaps in all_gaps), strict=True))),
        sum_s=sum(gaps.sum_s for gaps in all_gaps),
    )
