"""What can be asked for: `GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import time

from quart import Response
from quart_trio import QuartTrio

from tokenflow.dialects.models import ModelEntry, model_list, model_object
from tokenflow.http.answers import answer
from tokenflow.service.service import Model, Service


def register(app: QuartTrio, service: Service) -> None:
    since = int(time.time())

    def entry(model: Model) -> ModelEntry:
        return ModelEntry(id=model.id, created=since, info=model.info, defaults=model.defaults.given)

    @app.get("/v1/models")
    async def models() -> Response:
        return answer(model_list([entry(model) for model in service.models.values()]))

    @app.get("/v1/models/<path:id>")
    async def model(id: str) -> Response:
        return answer(model_object(entry(service.model(id))))
