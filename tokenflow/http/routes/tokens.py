"""Exact token counts: `POST /v1/tokenize` and `POST /v1/detokenize`."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from tokenflow.dialects import tokens
from tokenflow.errors import InvalidRequest
from tokenflow.http.answers import answer
from tokenflow.http.framework import whole_body
from tokenflow.service.service import Service


def register(app: QuartTrio, service: Service) -> None:
    @app.post("/v1/tokenize")
    async def tokenize() -> Response:
        asked = tokens.parse_tokenize(await whole_body())
        model = service.model(asked.model)
        ids = await model.planner.tokenize(asked.prompt, model.engine)
        return answer(tokens.tokenized(ids, model.host.info.context_length))

    @app.post("/v1/detokenize")
    async def detokenize() -> Response:
        asked = tokens.parse_detokenize(await whole_body())
        model = service.model(asked.model)
        try:
            text = await model.engine.detokenize(list(asked.tokens))
        except ValueError as exc:
            raise InvalidRequest(str(exc), param="tokens") from exc
        return answer(tokens.detokenized(text))
