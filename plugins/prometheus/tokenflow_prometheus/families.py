"""Counters and histograms as plain numbers, shown as metric families when somebody scrapes.

Not prometheus_client's own `Counter` and `Histogram`: those cannot take a histogram that was counted elsewhere (times
between tokens come as counts, one event a stream instead of one a token), they add a `_created` series to each series,
and they lock for threads that are not here. What is used of the library is its exposition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counter:
    """Rising numbers, one for each combination of labels."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...] = ("model",)) -> None:
        self.name, self._help, self._labels = name, help_text, labels
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *labels: str) -> None:
        """Add `amount`, which may be 0: the series exists from then on."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name, self._help, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """Observations counted into buckets, for each model. A bucket's bound belongs to it."""

    def __init__(self, name: str, help_text: str, buckets: tuple[float, ...]) -> None:
        self.name, self._help, self._buckets = name, help_text, buckets
        self._bounds = [*map(floatToGoString, buckets), "+Inf"]
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def touch(self, model: str) -> None:
        """The series exists from now on."""
        self._counts.setdefault(model, [0] * len(self._bounds))
        self._sums.setdefault(model, 0.0)

    def observe(self, value: float, model: str) -> None:
        self.touch(model)
        self._counts[model][bisect_left(self._buckets, value)] += 1
        self._sums[model] += value

    def merge(self, counts: Iterable[int], total: float, model: str) -> None:
        """Take in observations that were counted into the same buckets elsewhere."""
        self.touch(model)
        self._counts[model] = [a + b for a, b in zip(self._counts[model], counts, strict=True)]
        self._sums[model] += total

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self._help, labels=("model",))
        for model, counts in self._counts.items():
            buckets = list(zip(self._bounds, map(float, accumulate(counts)), strict=True))
            family.add_metric((model,), buckets, self._sums[model])
        return family


class Families(Collector):
    """A collector of what has a family."""

    def __init__(self, members: Iterable[Counter | Histogram]) -> None:
        self._members = tuple(members)

    def collect(self) -> Iterator[Metric]:
        for member in self._members:
            yield member.family()
