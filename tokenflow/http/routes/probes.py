"""For machines that watch: `GET /health/live`, `GET /health/ready`, `GET /metrics`."""

from __future__ import annotations

from dataclasses import replace

from quart import Response
from quart_trio import QuartTrio

from tokenflow.errors import NotFound
from tokenflow.http.answers import answer
from tokenflow.http.transport import Traffic
from tokenflow.service.service import Service


def register(app: QuartTrio, service: Service, traffic: Traffic) -> None:
    @app.get("/health/live")
    async def live() -> Response:
        return answer({"status": "ok"})

    @app.get("/health")  # what probes made for vLLM and llama-server ask
    @app.get("/health/ready")
    async def ready() -> Response:
        why = await service.not_ready()
        if why is None:
            return answer({"status": "ok"})
        return answer({"status": "unavailable", "reason": why}, status=503, headers={"Retry-After": "1"})

    @app.get("/metrics")
    async def metrics() -> Response:
        if service.feeds.metrics is None:
            raise NotFound("No metrics sink is configured; add [sinks.prometheus] to the configuration.")
        gauges = replace(await service.gauges(), connections=traffic.connections, refused=traffic.refused)
        page = service.feeds.metrics.expose(gauges)
        return Response(page.body, content_type=page.content_type)
