"""Plain answers: a JSON body, or an error in the one envelope."""

from __future__ import annotations

import json
from typing import Any

from quart import Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge, RequestTimeout
from werkzeug.routing import WebsocketMismatch

from tokenflow.dialects.errors import envelope, error_headers, error_status
from tokenflow.dialects.openai_frames import utf8
from tokenflow.errors import TokenflowError


def answer(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`body` as JSON."""
    data = utf8(json.dumps(body, ensure_ascii=False, separators=(",", ":")))
    response = Response(data, status=status, content_type="application/json")
    response.headers.update(headers or {})
    return response


def nothing(headers: dict[str, str] | None = None) -> Response:
    """204: no body, and so neither a type nor a length of one (RFC 9110, 8.6)."""
    response = Response(b"", status=204, headers=headers)
    del response.headers["Content-Type"]
    response.headers.pop("Content-Length", None)
    return response


def refusal(error: TokenflowError) -> Response:
    """`error` with its status."""
    return answer(envelope(error), status=error_status(error), headers=error_headers(error))


_WORDS: dict[type[HTTPException], str] = {
    MethodNotAllowed: "This route does not take that method; `Allow` says which it takes.",
    RequestTimeout: "The body did not arrive in time.",
    WebsocketMismatch: "This route is no WebSocket; ask for it without an upgrade.",
}
"""For people who wrote a client, where werkzeug's are for people before a browser."""
_PATH_CHARS = 100
_ELSEWHERE = {
    "/v1/v1/": "the base URL ends in /v1, and the path must not begin with it again",
    "/v1/embeddings": "embeddings are not offered",
    "/v1/responses": "the Responses API is not offered; use /v1/chat/completions",
    "/v1/messages": "Anthropic's API is not offered; use /v1/chat/completions",
    "/api/": "Ollama's API is not offered; choose OpenAI's in your client, with a base URL that ends in /v1",
    "/chat/completions": "the base URL must end in /v1",
    "/completions": "the base URL must end in /v1",
    "/models": "the base URL must end in /v1",
}
"""What clients ask for that mean another API, or this one and are set up wrongly."""


def http_error(error: HTTPException, path: str, max_body_bytes: int) -> TokenflowError:
    """What HTTP itself refuses (no such route, wrong method, body too large or too slow), as an error of ours."""
    if isinstance(error, NotFound):
        words = f"There is no route {path[:_PATH_CHARS]!r}; {_instead(path)}."
    elif isinstance(error, RequestEntityTooLarge):
        words = f"The body is larger than the {max_body_bytes} bytes that this server takes (server.max_body_bytes)."
    else:
        words = _WORDS.get(type(error)) or error.description or error.name
    return TokenflowError(words, code=error.name.lower().replace(" ", "_"))


def _instead(path: str) -> str:
    for beginning, words in _ELSEWHERE.items():
        if path.startswith(beginning):
            return words
    return "those of the API begin with /v1/ and end without a slash"


def http_refusal(error: HTTPException, ours: TokenflowError) -> Response:
    """`ours` in the same envelope as any other, with the status of what it was made of."""
    code = error.code or 500
    body = envelope(ours)
    if code < 500:
        body["error"]["type"] = "invalid_request_error"
    allow = {name: value for name, value in error.get_headers() if name == "Allow"}
    return answer(body, status=code, headers=allow)
