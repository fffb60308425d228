"""What can be asked for: `GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from tokenflow.dialects.models import model_list, model_object
from tokenflow.http.answers import answer
from tokenflow.service.service import Service


def register(app: QuartTrio, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return answer(model_list([(model.id, model.host.info) for model in service.models.values()]))

    @app.get("/v1/models/<path:id>")
    async def model(id: str) -> Response:
        return answer(model_object(id, service.model(id).host.info))
