"""For lessons and tests, only with `debug = true`: `GET /_debug/generated`, the tokens that engines really made."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from tokenflow.http.answers import answer
from tokenflow.service.service import Service


def register(app: QuartTrio, service: Service) -> None:
    if not service.config.server.debug:
        return

    @app.get("/_debug/generated")
    async def generated() -> Response:
        total = sum(model.generated_tokens for model in (await service.gauges()).models)
        last = service.last_stream
        if last is None:
            return answer({"last": 0, "total": total, "last_stream": None})
        return answer({"last": last.generated_tokens, "total": total, "last_stream": last.identity.id})
