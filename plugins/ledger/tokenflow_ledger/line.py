"""A stream's usage record as one line of JSON. Keys and units are those of `tokenflow.api.Ended`."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from tokenflow.api import Ended

_json = json.JSONEncoder(separators=(",", ":")).encode


def line(record: Ended) -> bytes:
    """One line, its newline included. ASCII alone, so that no text in it can end the line or fail to encode."""
    gaps = sum(record.gaps.counts)
    fields = {
        "at": datetime.fromtimestamp(record.at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "id": record.id,
        "key": record.key,
        "model": record.model,
        "engine": record.engine,
        "route": record.route,
        "stream": record.stream,
        "choices": record.choices,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "generated_tokens": record.generated_tokens,
        "delivered_tokens": record.delivered_tokens,
        "after_leaving_tokens": record.after_leaving_tokens,
        "queue_s": _seconds(record.queue_s),
        "prefill_s": _seconds(record.prefill_s),
        "ttft_s": _seconds(record.ttft_s),
        "tbt_mean_s": _seconds(record.gaps.sum_s / gaps if gaps else None),
        "duration_s": _seconds(record.duration_s),
        "release_s": _seconds(record.release_s),
        "reason": record.reason,
        "code": record.code,
        "by": record.by,
        "phase": record.phase,
    }
    return _json(fields).encode("ascii") + b"\n"


def _seconds(value: float | None) -> float | None:
    """To the microsecond: what lies below is the clock's noise."""
    return None if value is None else round(value, 6)
