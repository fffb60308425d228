"""Streams' lives as metrics. Each is counted when it happens: a first token at the first token, not at the end.

What exists for a model exists from the first scrape that shows the model, at 0; otherwise `rate` would miss each
series' first event. Labels are bounded: models are those configured, reasons, phases and `by` are closed sets, and of
error codes, which plugins may make up, the first `MAX_CODES` are told apart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.process_collector import ProcessCollector

from tokenflow.api import (
    TBT_BUCKETS_S,
    TTFT_BUCKETS_S,
    TTLT_BUCKETS_S,
    Admitted,
    Ended,
    Exposition,
    FirstToken,
    Gauges,
    LifecycleEvent,
    SlotTaken,
)
from tokenflow_prometheus.families import Counter, Families, Histogram
from tokenflow_prometheus.moment import Moment

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CODES = 50
FAILURES = ("engine_error", "engine_stuck", "queue_timeout", "prefill_timeout", "idle_timeout", "total_timeout")
"""Errors that end streams which were let in, and which an operator is woken for."""
TPS_BUCKETS = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 100.0, 150.0, 200.0, 300.0, 500.0, 1000.0)
RELEASE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusConfig:
    """`[sinks.prometheus]`. It has no keys."""


class Streams:
    """All that is counted from streams' lives."""

    def __init__(self) -> None:
        self.admitted = Counter("tokenflow_streams_admitted_total", "Streams that were let in, to a slot or to wait.")
        self.ended = Counter(
            "tokenflow_streams_ended_total",
            "Streams that ended, by reason (stop, length, tool_calls, cancelled, disconnected, error) and the error's "
            "code.",
            ("model", "reason", "code"),
        )
        self.cancellations = Counter(
            "tokenflow_cancellations_total",
            "Streams that were cancelled or whose client left, by phase (queue, prefill, decode, done) and by whom.",
            ("model", "phase", "by"),
        )
        self.ttft = Histogram(
            "tokenflow_time_to_first_token_seconds",
            "From admission to the first token, queue and prefill included: what a user waits for a first sign.",
            TTFT_BUCKETS_S,
        )
        self.queue = Histogram(
            "tokenflow_queue_seconds",
            "From admission to the slot, for streams that got one; those that did not ended with code queue_timeout.",
            TTFT_BUCKETS_S,
        )
        self.prefill = Histogram(
            "tokenflow_prefill_seconds", "From the slot to the first token: evaluating the prompt.", TTFT_BUCKETS_S
        )
        self.tbt = Histogram(
            "tokenflow_time_between_tokens_seconds",
            "Between two tokens of a sequence, waits for a slow reader included. Counted when the stream ends.",
            TBT_BUCKETS_S,
        )
        self.ttlt = Histogram(
            "tokenflow_time_to_last_token_seconds",
            "From admission to the end, for streams that the model ended (stop, length, tool_calls).",
            TTLT_BUCKETS_S,
        )
        self.tps = Histogram(
            "tokenflow_decode_tokens_per_second",
            "Tokens a second of one sequence after its first token, one observation a stream.",
            TPS_BUCKETS,
        )
        self.release = Histogram(
            "tokenflow_release_seconds",
            "From a cancel or disconnect to the free slot. High: work for readers who have left.",
            RELEASE_BUCKETS_S,
        )
        self.after_leaving = Counter(
            "tokenflow_tokens_after_leaving_total",
            "Tokens generated after a cancel or disconnect, for nobody: the price of stopping late.",
        )
        self.prompt = Counter("tokenflow_prompt_tokens_total", "Prompt tokens of streams that have ended.")
        self.cached = Counter(
            "tokenflow_cached_tokens_total", "Of the prompt tokens, those that came out of a prefix cache."
        )
        self.generated = Counter(
            "tokenflow_generated_tokens_total", "Tokens sampled for streams that have ended, delivered or not."
        )
        self.delivered = Counter(
            "tokenflow_delivered_tokens_total", "Of the generated tokens, those that reached the client's connection."
        )
        self._by_model = (
            *(self.admitted, self.after_leaving, self.prompt, self.cached, self.generated, self.delivered),
            *(self.ttft, self.queue, self.prefill, self.tbt, self.ttlt, self.tps, self.release),
        )
        self._models: set[str] = set()
        self._codes: set[str] = {""}

    def families(self) -> Families:
        return Families((*self._by_model, self.ended, self.cancellations))

    def touch(self, model: str) -> None:
        """`model` is served here: its series exist from now on."""
        if model in self._models:
            return
        self._models.add(model)
        for member in self._by_model:
            if isinstance(member, Histogram):
                member.touch(model)
            else:
                member.add(0, model)
        for reason in ("stop", "length", "tool_calls", "cancelled", "disconnected"):
            self.ended.add(0, model, reason, "")
        for code in FAILURES:
            self.ended.add(0, model, "error", code)
        for phase, by in product(("queue", "prefill", "decode"), ("client", "server")):
            self.cancellations.add(0, model, phase, by)

    def take(self, event: LifecycleEvent) -> None:
        match event:
            case Admitted():
                self.admitted.add(1, event.model)
            case SlotTaken():
                self.queue.observe(event.queue_s, event.model)
            case FirstToken():
                self.ttft.observe(event.ttft_s, event.model)
                self.prefill.observe(event.prefill_s, event.model)
            case _:
                self._end(event)

    def _end(self, event: Ended) -> None:
        model = event.model
        self.ended.add(1, model, event.reason, self._code(event.code))
        if event.reason in ("cancelled", "disconnected"):
            self.cancellations.add(1, model, event.phase, event.by)
        elif event.reason != "error":
            self.ttlt.observe(event.duration_s, model)
        self.prompt.add(event.prompt_tokens, model)
        self.cached.add(event.cached_tokens, model)
        self.generated.add(event.generated_tokens, model)
        self.delivered.add(event.delivered_tokens, model)
        self.after_leaving.add(event.after_leaving_tokens, model)
        self.tbt.merge(event.gaps.counts, event.gaps.sum_s, model)
        if event.release_s is not None:
            self.release.observe(event.release_s, model)
        if (rate := decode_rate(event)) is not None:
            self.tps.observe(rate, model)

    def _code(self, code: str | None) -> str:
        code = code or ""
        if code not in self._codes:
            if len(self._codes) > MAX_CODES:
                return "other"
            self._codes.add(code)
        return code


def decode_rate(event: Ended) -> float | None:
    """Tokens a second of one sequence, over all its stream's sequences; None where there was no second token.

    A step may make several tokens at once, so tokens are counted and not gaps; each sequence's first opens its time.
    """
    tokens = event.generated_tokens - event.after_leaving_tokens - event.choices
    return tokens / event.gaps.sum_s if tokens > 0 and event.gaps.sum_s > 0 else None


class PrometheusSink:
    """Counts streams' lives and shows them with the server's state at that moment."""

    def __init__(self) -> None:
        self._streams = Streams()
        self._moment = Moment()
        self._registry = CollectorRegistry()
        self._registry.register(self._streams.families())
        self._registry.register(self._moment)
        ProcessCollector(registry=self._registry)

    async def record(self, event: LifecycleEvent) -> None:
        self._streams.take(event)

    def expose(self, gauges: Gauges) -> Exposition:
        """The page, in Prometheus' text format 0.0.4."""
        for model in gauges.models:
            self._streams.touch(model.model)
        self._moment.now = gauges
        return Exposition(generate_latest(self._registry), CONTENT_TYPE)


@asynccontextmanager
async def open_prometheus(config: PrometheusConfig) -> AsyncIterator[PrometheusSink]:
    yield PrometheusSink()
