"""What is asked at each scrape: gauges, and counters that the engines keep."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenflow.api import Gauges

GAUGES = (
    ("ready", "model_ready", "1 while the model's engine is open and takes requests, 0 while it starts or has failed."),
    ("active", "active_streams", "Streams that hold slots now."),
    ("waiting", "waiting_streams", "Streams in the waiting room now. Rising steadily: demand exceeds the slots."),
    ("waiting_capacity", "waiting_capacity_streams", "Places in the waiting room. All taken: whoever asks is refused."),
    ("paused", "paused_sequences", "Sequences that hold a slot and generate nothing, for their reader is behind."),
    ("slots", "slots", "Sequences that the engine can decode at once."),
    ("slots_used", "slots_used", "Slots that are taken now, as the engine counts them."),
    ("kv_tokens_used", "kv_cache_tokens_used", "Tokens in the KV cache now, prefix cache included."),
    ("kv_tokens_capacity", "kv_cache_tokens_capacity", "Tokens that the KV cache can hold; 0: not known."),
)
WHOLE = (
    ("replay_bytes", "replay_bytes", "Memory that all replay logs hold, Python's own overhead in."),
    ("replay_bytes_capacity", "replay_capacity_bytes", "Memory that they may hold; full, new streams are refused."),
    ("kept_streams", "kept_streams", "Streams that have ended and can be replayed."),
    ("connections", "open_connections", "Connections that are open now."),
)
COUNTERS = (
    (
        "kv_tokens_evicted",
        "kv_cache_tokens_evicted_total",
        "Tokens thrown out of the prefix cache to make room. Rising fast: prompts are evaluated again and again.",
    ),
    (
        "generated_tokens",
        "engine_generated_tokens_total",
        "Tokens that the engine has sampled, at this moment; its rate is the throughput. Restarts with the engine.",
    ),
    (
        "prompt_tokens",
        "engine_prompt_tokens_total",
        "Prompt tokens that the engine has evaluated, without cached ones, at this moment. Restarts with the engine.",
    ),
)


class Moment(Collector):
    """Families of the server at one moment. `now` is set before each scrape."""

    def __init__(self) -> None:
        self.now = Gauges(models=(), sink_events_dropped=0)
        self._versions = (version("tokenflow"), platform.python_version())  # read from disk: not at each scrape

    def collect(self) -> Iterator[Metric]:
        for field, name, help_text in GAUGES:
            yield self._fill(GaugeMetricFamily(f"tokenflow_{name}", help_text, labels=("model",)), field)
        for field, name, help_text in COUNTERS:
            yield self._fill(CounterMetricFamily(f"tokenflow_{name}", help_text, labels=("model",)), field)
        yield CounterMetricFamily(
            "tokenflow_sink_events_dropped_total",
            "Events of streams' lives that a slow sink's full channel refused. Not 0: these metrics or the ledger lack "
            "some streams.",
            value=float(self.now.sink_events_dropped),
        )
        for field, name, help_text in WHOLE:
            yield GaugeMetricFamily(f"tokenflow_{name}", help_text, value=float(getattr(self.now, field)))
        yield CounterMetricFamily(
            "tokenflow_replay_records_evicted_total",
            "Records that left the replay logs to make room. Rising: raise replay.total_bytes, or lower retention_s.",
            value=float(self.now.replay_records_evicted),
        )
        refusals = CounterMetricFamily(
            "tokenflow_refusals_total",
            "Connections and requests that were refused, by the limit that they met or the error's code.",
            labels=("reason",),
        )
        for reason, count in self.now.refused.items():
            refusals.add_metric((reason,), float(count))
        yield refusals
        info = GaugeMetricFamily(
            "tokenflow_build_info", "Always 1; its labels say what runs here.", labels=("version", "python_version")
        )
        info.add_metric(self._versions, 1.0)
        yield info

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, field: str) -> Metric:
        for model in self.now.models:
            family.add_metric((model.model,), float(getattr(model, field)))
        return family
