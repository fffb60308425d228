"""One HTTP request's life on the ASGI side.

Whatever a handler takes for its request (a stream's reader) is given back when the request is over, on every path: a
handler that returned its response and whose client left before the first byte of the body has no `finally` that would
run. So the clean-up hangs on the connection, synchronous and certain.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart.asgi import ASGIHTTPConnection
from quart.wrappers import Response
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.wrappers import Response as WerkzeugResponse

from tokenflow.http.transport import when_left

_at_end: ContextVar[list[Callable[[], object]]] = ContextVar("what is to be done at the end of this request")


class Connection(TrioASGIHTTPConnection):
    """Quart-Trio's, which gives back what its request held, and while it streams is one task and holds no request."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        at_end: list[Callable[[], object]] = []
        _at_end.set(at_end)  # this task is the request's own
        try:
            with trio.CancelScope() as scope:
                when_left(self.scope, scope.cancel)
                await self._send_response(send, await self._answer(receive, send))
        finally:
            for do in at_end:
                do()

    async def _answer(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> Response | WerkzeugResponse:
        request = self._create_request_from_scope(send)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ASGIHTTPConnection.handle_messages, self, request, receive)
            response = await self.app.handle_request(request)
            nursery.cancel_scope.cancel()  # also where nobody wanted the body
        return response


def at_end(do: Callable[[], object]) -> None:
    """Call `do` when the request that is being handled is over, however it ends. It must not raise."""
    _at_end.get().append(do)
