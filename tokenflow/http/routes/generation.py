"""Generating: a dialect parses the body, the service judges it and opens a stream, and the answer reads from it.

A new dialect is a line in `speak.DIALECTS`; if its requests are plain POSTs, a line in `PATHS` too.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from quart import Response, g, request
from quart_trio import QuartTrio

from tokenflow.core.types import GenerationRequest
from tokenflow.errors import InvalidRequest
from tokenflow.http.framework import whole_body
from tokenflow.http.speak import DIALECTS, as_body, as_events
from tokenflow.service.service import Service

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/chat/completions_stream", "/generate", "/v1/chat/stream")
MAX_KEY_CHARS = 255


def register(app: QuartTrio, service: Service) -> None:
    for path in PATHS:

        async def generate(path: str = path) -> Response:
            return await _generate(service, path)

        app.add_url_rule(path, f"generate {path}", generate, methods=["POST"])


async def _generate(service: Service, path: str) -> Response:
    dialect = DIALECTS[path]
    body = await whole_body()
    asked = _with_idempotency_key(dialect.parse(body))
    digest = b"" if asked.idempotency_key is None else sha256(path.encode() + b"\0" + body).digest()
    try:
        stream, reader = await service.open(asked, key=g.key, route=path, digest=digest)
    except InvalidRequest as exc:
        exc.param = exc.param and dialect.called.get(exc.param, exc.param)
        raise
    if asked.stream:
        return as_events(service, stream, reader, dialect, ids=asked.attendance.resumable)
    return await as_body(stream, reader, dialect)


def _with_idempotency_key(asked: GenerationRequest) -> GenerationRequest:
    key = request.headers.get("Idempotency-Key")
    if not key:
        return asked
    if len(key) > MAX_KEY_CHARS:
        raise InvalidRequest(f"An Idempotency-Key has at most {MAX_KEY_CHARS} characters.", param="Idempotency-Key")
    return replace(asked, idempotency_key=key)
