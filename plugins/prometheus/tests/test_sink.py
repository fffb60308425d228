"""The page, read back with the library's own parser: exact values after a scripted day of streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tokenflow_prometheus import register_sinks
from tokenflow_prometheus.sink import MAX_CODES, PrometheusSink, Streams, decode_rate

from tokenflow.api import (
    Admitted,
    Ended,
    FirstToken,
    Gauges,
    LifecycleEvent,
    MetricsSink,
    ModelGauges,
    SinkPlugin,
    SlotTaken,
)
from tokenflow.core.lifecycle import Gaps
from tokenflow.core.timings import TBT_BUCKETS_S

EMPTY = Gauges(models=(), sink_events_dropped=0)
SMALL = ModelGauges(
    model="small",
    ready=True,
    active=3,
    waiting=2,
    waiting_capacity=64,
    slots=4,
    slots_used=3,
    paused=1,
    generated_tokens=1000,
    prompt_tokens=500,
    kv_tokens_used=700,
    kv_tokens_capacity=8192,
    kv_tokens_evicted=64,
)
NOW = Gauges(models=(SMALL, replace(SMALL, model="big", ready=False, active=0)), sink_events_dropped=5)
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def gaps(*values: float) -> Gaps:
    counts = [0] * (len(TBT_BUCKETS_S) + 1)
    for value in values:
        counts[next((i for i, bound in enumerate(TBT_BUCKETS_S) if value <= bound), len(TBT_BUCKETS_S))] += 1
    return Gaps(counts=tuple(counts), sum_s=sum(values))


ADMITTED = Admitted(id="s", at=0.0, model="small", engine="e", key="-", route="/", stream=True, choices=1)
SLOT = SlotTaken(id="s", model="small", queue_s=0.25)
FIRST = FirstToken(id="s", model="small", ttft_s=0.75, prefill_s=0.5)
ENDED = Ended(
    id="s",
    at=0.0,
    model="small",
    engine="e",
    key="-",
    route="/",
    stream=True,
    choices=1,
    prompt_tokens=12,
    cached_tokens=4,
    generated_tokens=5,
    delivered_tokens=5,
    after_leaving_tokens=0,
    queue_s=0.25,
    prefill_s=0.5,
    ttft_s=0.75,
    duration_s=1.25,
    release_s=None,
    reason="stop",
    code=None,
    by="engine",
    phase="decode",
    gaps=gaps(0.125, 0.125, 0.125, 0.125),
)
LEFT = replace(
    ENDED,
    reason="disconnected",
    by="client",
    generated_tokens=7,
    delivered_tokens=3,
    after_leaving_tokens=2,
    release_s=0.004,
)
FAILED = replace(
    ENDED,
    reason="error",
    code="queue_timeout",
    by="server",
    phase="queue",
    prompt_tokens=0,
    cached_tokens=0,
    generated_tokens=0,
    delivered_tokens=0,
    gaps=gaps(),
)


def scrape(sink: PrometheusSink, gauges: Gauges = EMPTY) -> Values:
    text = sink.expose(gauges).body.decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def after(events: Iterable[LifecycleEvent]) -> PrometheusSink:
    sink = PrometheusSink()
    for event in events:
        await sink.record(event)
    return sink


def get(values: Values, name: str, **labels: str) -> float | None:
    return values.get((f"tokenflow_{name}", tuple(sorted({"model": "small", **labels}.items()))))


async def test_the_plugin_offers_one_sink_for_metrics() -> None:
    (plugin,) = register_sinks()
    assert isinstance(plugin, SinkPlugin)
    assert plugin.name == "prometheus"
    async with plugin.open(plugin.config()) as sink:
        assert isinstance(sink, MetricsSink)
        page = sink.expose(EMPTY)
    assert page.content_type == "text/plain; version=0.0.4; charset=utf-8"


async def test_a_life_of_streams_to_the_number() -> None:
    values = scrape(await after([ADMITTED, SLOT, FIRST, ENDED, ADMITTED, SLOT, FIRST, LEFT, ADMITTED, FAILED]), NOW)
    expected: dict[str, float] = {
        "streams_admitted_total": 3,
        "prompt_tokens_total": 24,
        "cached_tokens_total": 8,
        "generated_tokens_total": 12,
        "delivered_tokens_total": 8,
        "tokens_after_leaving_total": 2,
        "time_to_first_token_seconds_count": 2,
        "time_to_first_token_seconds_sum": 1.5,
        "queue_seconds_count": 2,
        "queue_seconds_sum": 0.5,
        "prefill_seconds_count": 2,
        "prefill_seconds_sum": 1.0,
        "time_between_tokens_seconds_count": 8,
        "time_between_tokens_seconds_sum": 1.0,
        "time_to_last_token_seconds_count": 1,
        "time_to_last_token_seconds_sum": 1.25,
        "decode_tokens_per_second_count": 2,
        "decode_tokens_per_second_sum": 16.0,
        "release_seconds_count": 1,
        "release_seconds_sum": 0.004,
    }
    assert {name: get(values, name) for name in expected} == expected
    assert get(values, "streams_ended_total", reason="stop", code="") == 1
    assert get(values, "streams_ended_total", reason="disconnected", code="") == 1
    assert get(values, "streams_ended_total", reason="error", code="queue_timeout") == 1
    assert get(values, "cancellations_total", phase="decode", by="client") == 1
    assert sum(v for (name, _), v in values.items() if name == "tokenflow_cancellations_total") == 1


async def test_buckets_are_cumulative_and_their_bounds_inclusive() -> None:
    values = scrape(await after([replace(FIRST, ttft_s=s) for s in (0.75, 0.5, 0.005, 1000.0)]))
    bounds = ("0.005", "0.01", "0.3", "0.5", "0.75", "160.0", "+Inf")
    assert [get(values, "time_to_first_token_seconds_bucket", le=le) for le in bounds] == [1, 1, 1, 2, 3, 3, 4]


async def test_each_event_counts_when_it_happens() -> None:
    sink = PrometheusSink()
    seen = []
    for event in (ADMITTED, SLOT, FIRST, ENDED):
        await sink.record(event)
        values = scrape(sink)
        seen.append(
            [
                get(values, name) or 0
                for name in (
                    "streams_admitted_total",
                    "queue_seconds_count",
                    "time_to_first_token_seconds_count",
                    "time_to_last_token_seconds_count",
                )
            ]
        )
    assert seen == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_the_moment_is_shown_as_it_is_at_the_scrape() -> None:
    sink = PrometheusSink()
    scrape(sink, NOW)
    values = scrape(sink, replace(NOW, models=(replace(SMALL, active=9),)))
    expected = {
        "model_ready": 1,
        "active_streams": 9,
        "waiting_streams": 2,
        "waiting_capacity_streams": 64,
        "paused_sequences": 1,
        "slots": 4,
        "slots_used": 3,
        "kv_cache_tokens_used": 700,
        "kv_cache_tokens_capacity": 8192,
        "kv_cache_tokens_evicted_total": 64,
        "engine_generated_tokens_total": 1000,
        "engine_prompt_tokens_total": 500,
    }
    assert {name: get(values, name) for name in expected} == expected
    assert values[("tokenflow_sink_events_dropped_total", ())] == 5
    assert get(values, "model_ready", model="big") is None  # it is not served any more


def test_an_empty_server_has_a_page() -> None:
    values = scrape(PrometheusSink())
    names = {name for name, _ in values}
    assert values[("tokenflow_sink_events_dropped_total", ())] == 0
    assert "tokenflow_build_info" in names
    assert "process_resident_memory_bytes" in names


def test_series_of_a_model_start_at_zero_before_its_first_stream() -> None:
    """`rate` needs a 0 to rise from."""
    values = scrape(PrometheusSink(), NOW)
    for name in ("streams_admitted_total", "release_seconds_count", "time_between_tokens_seconds_count"):
        assert get(values, name) == 0
        assert get(values, name, model="big") == 0
    assert get(values, "streams_ended_total", reason="stop", code="") == 0
    assert get(values, "streams_ended_total", reason="error", code="engine_error") == 0
    assert get(values, "cancellations_total", phase="queue", by="server") == 0


async def test_two_sinks_share_nothing() -> None:
    first, second = await after([ADMITTED]), PrometheusSink()
    assert get(scrape(first), "streams_admitted_total") == 1
    assert get(scrape(second), "streams_admitted_total") is None


async def test_error_codes_are_told_apart_up_to_a_bound() -> None:
    values = scrape(await after([replace(FAILED, code=f"code_{n}") for n in range(MAX_CODES + 10)] + [FAILED, FAILED]))
    ended = {dict(labels)["code"]: v for (name, labels), v in values.items() if name == "tokenflow_streams_ended_total"}
    assert len(ended) == MAX_CODES + 1
    assert ended["code_0"] == 1
    assert ended["other"] == 12


async def test_any_model_name_can_be_read_back() -> None:
    name = 'a "quoted"\\ name\nof two lines'
    values = scrape(await after([replace(ADMITTED, model=name)]))
    assert get(values, "streams_admitted_total", model=name) == 1


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, 8.0),
        ({"generated_tokens": 1, "gaps": gaps()}, None),
        ({"generated_tokens": 7, "after_leaving_tokens": 2}, 8.0),
        ({"generated_tokens": 9, "gaps": gaps(0.5, 0.5)}, 8.0),  # several tokens a step
        ({"choices": 2, "generated_tokens": 10, "gaps": gaps(*[0.125] * 8)}, 8.0),
        ({"generated_tokens": 0, "gaps": gaps()}, None),
    ],
)
def test_the_rate_is_one_sequences(changes: dict[str, Any], rate: float | None) -> None:
    assert decode_rate(replace(ENDED, **changes)) == rate


COUNTS = st.lists(st.integers(0, 1000), min_size=len(TBT_BUCKETS_S) + 1, max_size=len(TBT_BUCKETS_S) + 1).map(tuple)
GAPS = st.builds(Gaps, counts=COUNTS, sum_s=st.floats(0, 1e6))


@given(st.lists(st.tuples(st.sampled_from(["small", "big"]), GAPS), max_size=8))
def test_merged_gaps_add_up_over_streams(streams: list[tuple[str, Gaps]]) -> None:
    counted = Streams()
    for model, its in streams:
        counted.take(replace(ENDED, model=model, gaps=its))
    samples = counted.tbt.family().samples
    for model in {model for model, _ in streams}:
        mine = [its for name, its in streams if name == model]
        found = {
            (s.name.rsplit("_", 1)[1], s.labels.get("le", "")): s.value for s in samples if s.labels["model"] == model
        }
        assert found[("count", "")] == sum(sum(its.counts) for its in mine)
        assert found[("sum", "")] == pytest.approx(sum(its.sum_s for its in mine))
        for index, bound in enumerate(TBT_BUCKETS_S):
            assert found[("bucket", str(bound))] == sum(sum(its.counts[: index + 1]) for its in mine)


def test_gaps_counted_into_other_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Streams().take(replace(ENDED, gaps=Gaps(counts=(1, 2), sum_s=1.0)))
