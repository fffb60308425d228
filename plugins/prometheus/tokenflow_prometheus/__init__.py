"""Metrics for Prometheus, at `GET /metrics`.

[sinks.prometheus]
"""

from __future__ import annotations

from typing import Any

from tokenflow.api import SinkPlugin, hookimpl
from tokenflow_prometheus.sink import PrometheusConfig, open_prometheus


@hookimpl
def register_sinks() -> list[SinkPlugin[Any]]:
    return [SinkPlugin(name="prometheus", config=PrometheusConfig, open=open_prometheus)]
