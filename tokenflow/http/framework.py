"""Quart-Trio without what it does for applications that need it: handlers that block, hosts, bodies in pieces.

All of it is done anew for every request, and together takes a tenth of the time to the first token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from quart.wrappers import Response, Websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from quart_trio.wrappers.request import TrioRequest
from werkzeug.routing import MapAdapter
from werkzeug.wrappers import Response as WerkzeugResponse


class Request(TrioRequest):
    """A request whose body mostly came with its head."""

    async def whole_body(self) -> bytes:
        """All of the body; no checkpoint where it is there.

        Raises:
            RequestEntityTooLarge, RequestTimeout: it is too large, or too slow.
        """
        body = self.body
        if body._complete.is_set() and body._must_raise is None:
            return bytes(body._data)
        return await self.get_data(True, False, False)


class App(QuartTrio):
    """All handlers are coroutine functions, and all hosts are the same to the routes."""

    request_class = Request

    def ensure_async(self, func: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        return func

    async def handle_websocket(self, websocket: Websocket) -> Response | WerkzeugResponse | None:
        # Quart-Trio's takes groups apart, and its frames hold what it took out, and are held by it.
        async with self.websocket_context(websocket) as context:
            try:
                return await self.full_dispatch_websocket(context)
            except Exception as error:
                return await self.handle_websocket_exception(error)

    def create_url_adapter(self, request: BaseRequestWebsocket | None) -> MapAdapter | None:
        if request is None:
            return None
        query = request.query_string.decode("latin-1")
        return MapAdapter(
            self.url_map, "localhost", request.root_path, "", request.scheme, request.path, request.method, query
        )
