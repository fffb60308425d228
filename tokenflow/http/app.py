"""The application: Quart-Trio with the routes, who may use them, and one envelope for everything that goes wrong."""

from __future__ import annotations

import logging
from functools import partial

from quart import Request, Response, Websocket, g, has_request_context, request, websocket
from werkzeug.exceptions import HTTPException, UnsupportedMediaType

from tokenflow.config import ServerConfig
from tokenflow.errors import TokenflowError
from tokenflow.http.answers import http_error, http_refusal, nothing, refusal
from tokenflow.http.auth import OPEN, authenticate
from tokenflow.http.connection import Connection
from tokenflow.http.framework import App
from tokenflow.http.pages import Pages
from tokenflow.http.routes import debug, generation, models, page, probes, streams, tokens, ws
from tokenflow.http.transport import ClientDisconnected, Traffic
from tokenflow.http.websocket import WebsocketConnection
from tokenflow.service.service import Service, new_id

log = logging.getLogger("tokenflow.http")

REFUSALS = (*range(400, 500), 503)
"""Statuses of what was refused, and did not fail."""
LOGGED_CHARS = 200
"""Of an error's message, and of a path."""
BODY_REASONS = {413: "body", 408: "body_timeout"}
"""What the transport's count calls them."""


def create_app(service: Service, traffic: Traffic | None = None) -> App:
    """Build the application around a service, which is open by the time of the first request.

    Args:
        traffic: what the transport counts, for the page of metrics.
    """
    traffic = traffic or Traffic()
    app = App("tokenflow", static_folder=None)
    app.url_map.merge_slashes = False  # a redirect would be a page of HTML
    app.asgi_http_class, app.asgi_websocket_class = Connection, WebsocketConnection
    config = service.config.server
    app.config.update(
        MAX_CONTENT_LENGTH=config.max_body_bytes,
        BODY_TIMEOUT=config.body_timeout_s,
        RESPONSE_TIMEOUT=None,  # a stream may last: the service has deadlines of its own
    )

    pages = Pages(service.config.http, open_to_all=not service.config.auth.keys)

    async def who() -> Response | None:
        if request.path not in OPEN:
            pages.check(request.headers)
        if request.method == "OPTIONS" and request.url_rule is not None:
            paths = app.create_url_adapter(request)
            assert paths is not None
            methods = ", ".join(sorted(paths.allowed_methods()))
            return nothing({"Allow": methods} | pages.preflight(request.headers, methods))
        if request.endpoint != page.ENDPOINT:
            authenticate(request, service.config.auth)
        return None

    async def tell_browsers(response: Response) -> Response:
        response.headers.update(pages.cors(request.headers))
        return response

    app.before_request(who)
    app.after_request(tell_browsers)
    app.before_request(_refuse_codings)
    app.register_error_handler(TokenflowError, partial(_refuse, service.config.server.name, traffic))
    app.register_error_handler(HTTPException, partial(_refuse_http, service.config.server, traffic))
    app.register_error_handler(ClientDisconnected, _left)
    app.register_error_handler(Exception, _fault)
    for routes in (generation, streams, models, tokens, debug, ws):
        routes.register(app, service)
    probes.register(app, service, traffic)
    if service.config.http.page:
        page.register(app)
    return app


async def _refuse(server: str, traffic: Traffic, error: TokenflowError) -> Response:
    response = refusal(error)
    if response.status_code in REFUSALS:
        traffic.refused[error.code] += 1
    _tell(server, response, error)
    _without_frames(error)  # a stream's error is kept with its log: not the frames of this request too
    return response


async def _refuse_http(config: ServerConfig, traffic: Traffic, error: HTTPException) -> Response:
    asked = _asked()
    ours = http_error(error, asked.path, config.max_body_bytes)
    response = http_refusal(error, ours)
    traffic.refused[BODY_REASONS.get(response.status_code, ours.code)] += 1
    _tell(config.name, response, ours)
    _without_frames(error)
    return response


def _asked() -> Request | Websocket:
    """What is being handled."""
    return request if has_request_context() else websocket


def _tell(server: str, response: Response, error: TokenflowError) -> None:
    """A line in the log, and in the answer what it is found by: the stream's id, or where there is none a new one."""
    asked = _asked()
    id = response.headers["X-Request-Id"] = g.get("stream") or new_id(server)
    about = "" if error.param is None else f" ({error.param})"
    said = error.message.encode("unicode_escape").decode()[:LOGGED_CHARS]  # it may repeat what the client sent
    log.info(
        *("%s %s %s %s from %s: %d %s%s: %s", id, asked.method, asked.path[:LOGGED_CHARS], g.get("key", "-")),
        *(asked.remote_addr, response.status_code, error.code, about, said),
    )


def _without_frames(error: Exception) -> None:
    """Let go of where it came from: the request has its error and the error its frames, and those the request."""
    error.__traceback__ = error.__context__ = None


async def _refuse_codings() -> None:
    """A compressed body is not read (RFC 9110, 15.5.16): better said so than by the JSON reader."""
    if any(coding.strip().lower() not in ("", "identity") for coding in request.headers.getlist("Content-Encoding")):
        raise UnsupportedMediaType("The body must not be compressed; send it without Content-Encoding.")


async def _left(error: ClientDisconnected) -> Response:
    """The client went while its handler was at work. There is nobody to answer."""
    return Response(b"", status=499)


async def _fault(error: Exception) -> Response:
    """A fault of ours: the log has all of it, the client a word."""
    what = f"{request.method} {request.path}" if has_request_context() else f"websocket {websocket.path}"
    log.error("%s failed", what, exc_info=error)
    return refusal(TokenflowError("The server failed on this request; its log says why."))
