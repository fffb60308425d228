"""Quart-Trio without what it does anew for every request, and nobody here needs.

It would look for handlers that block and for hosts with routes of their own, find routes by a search that leaves a
cycle behind, and wait for a body that is there.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

from quart import request
from quart.wrappers import Response, Websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from werkzeug.routing import Map, MapAdapter, Rule
from werkzeug.wrappers import Response as WerkzeugResponse


class App(QuartTrio):
    """All handlers are coroutine functions, and all hosts are the same to the routes."""

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
        return _Adapter(self._routes, self.url_map, *where)

    @cached_property
    def _routes(self) -> _Routes:
        return _Routes(self.url_map)  # all there will be: a request has come


class _Routes:
    """The routes' rules by path: Werkzeug's search for one leaves a cycle of closures behind, each time."""

    def __init__(self, url_map: Map) -> None:
        self._fixed: dict[tuple[str, str, bool], Rule] = {}
        self._open: list[tuple[re.Pattern[str], Rule]] = []
        for rule in url_map.iter_rules():
            if rule.arguments:
                self._open.append((_pattern(url_map, rule), rule))
            else:
                for method in rule.methods or ("GET",):
                    self._fixed.setdefault((rule.rule, method, rule.websocket), rule)

    def find(self, path: str, method: str, websocket: bool) -> tuple[Rule, dict[str, str]] | None:
        """The rule, and what stands for its arguments; None where it takes a search, if only to say what is wrong."""
        if (rule := self._fixed.get((path, method, websocket))) is not None:
            return rule, {}
        found = [(rule, match) for pattern, rule in self._open if (match := pattern.fullmatch(path))]
        found = [(rule, match) for rule, match in found if method in (rule.methods or ()) and not websocket]
        return (found[0][0], found[0][1].groupdict()) if len(found) == 1 else None


_ARGUMENT = re.compile(r"<(?:(\w+):)?(\w+)>")


def _pattern(url_map: Map, rule: Rule) -> re.Pattern[str]:
    pattern, at = "", 0
    for argument in _ARGUMENT.finditer(rule.rule):
        regex = url_map.converters[argument[1] or "default"].regex
        pattern += re.escape(rule.rule[at : argument.start()]) + f"(?P<{argument[2]}>{regex})"
        at = argument.end()
    return re.compile(pattern + re.escape(rule.rule[at:]))


class _Adapter(MapAdapter):
    """Werkzeug's, which looks into the routes before it searches."""

    def __init__(self, routes: _Routes, *args: Any) -> None:
        super().__init__(*args)
        self._routes = routes

    def match(self, *args: Any, **kwargs: Any) -> Any:
        found = None
        if not args and kwargs == {"return_rule": True}:  # as Quart asks
            found = self._routes.find(self.path_info, self.default_method, self.websocket)
        return found or super().match(*args, **kwargs)


async def whole_body() -> bytes:
    """All of the body of the request that is being handled; no checkpoint where it came with the head, as most do.

    Raises:
        RequestEntityTooLarge, RequestTimeout: it is too large, or too slow.
    """
    body = request.body
    if body._complete.is_set() and body._must_raise is None:
        return bytes(body._data)
    return await request.get_data(True, False, False)
