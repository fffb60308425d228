"""Quart-Trio without what it does anew for every request, and nobody here needs.

It would look for handlers that block, for hosts with routes of their own, for a path's rule as if it had never seen
it, and wait for a body that is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from quart import request
from quart.wrappers import Response, Websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from werkzeug.routing import MapAdapter, Rule
from werkzeug.wrappers import Response as WerkzeugResponse


class App(QuartTrio):
    """All handlers are coroutine functions, and all hosts are the same to the routes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rules: dict[tuple[str, str, bool], Rule] = {}

    def ensure_async(self, func: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        return func

    async def handle_websocket(self, websocket: Websocket) -> Response | WerkzeugResponse | None:
        # Quart-Trio's takes groups apart, and its frames hold what it took out, and are held by it.
        async with self.websocket_context(websocket) as context:
            try:
                return await self.full_dispatch_websocket(context)
            except Exception as error:
                return await self.handle_websocket_exception(error)

    def create_url_adapter(self, asked: BaseRequestWebsocket | None) -> MapAdapter | None:
        if asked is None:
            return None
        query = asked.query_string.decode("latin-1")
        where = "localhost", asked.root_path, "", asked.scheme, asked.path, asked.method, query
        return _Adapter(self._rules, self.url_map, *where)


class _Adapter(MapAdapter):
    """Werkzeug's, with the rules that each have one path: to search for one leaves a cycle of closures behind."""

    def __init__(self, rules: dict[tuple[str, str, bool], Rule], *args: Any) -> None:
        super().__init__(*args)
        self._rules = rules

    def match(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs != {"return_rule": True}:
            return super().match(*args, **kwargs)
        asked = self.path_info, self.default_method, self.websocket
        if (rule := self._rules.get(asked)) is not None:
            return rule, {}
        rule, values = super().match(return_rule=True)
        if not rule.arguments and rule.rule == self.path_info:  # a path can be written in ways without end
            self._rules[asked] = rule
        return rule, values


async def whole_body() -> bytes:
    """All of the body of the request that is being handled; no checkpoint where it came with the head, as most do.

    Raises:
        RequestEntityTooLarge, RequestTimeout: it is too large, or too slow.
    """
    body = request.body
    if body._complete.is_set() and body._must_raise is None:
        return bytes(body._data)
    return await request.get_data(True, False, False)
