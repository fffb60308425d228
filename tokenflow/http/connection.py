"""One HTTP request's life on the ASGI side.

Whatever a handler takes for its request (a stream's reader) is given back when the request is over, on every path: a
handler that returned its response and whose client left before the first byte of the body has no `finally` that would
run. So the clean-up hangs on the connection, synchronous and certain.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import Request
from quart_trio.asgi import TrioASGIHTTPConnection

T = TypeVar("T")
_KEY = "tokenflow.leaving"


class Connection(TrioASGIHTTPConnection):
    """Quart-Trio's, with an exit stack in the scope."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        with ExitStack() as leaving:
            self.scope[_KEY] = leaving  # type: ignore[typeddict-unknown-key]  # ASGI lets servers add keys
            await super().__call__(receive, send)


def hold(request: Request, thing: AbstractContextManager[T]) -> T:
    """Enter `thing` for as long as the request lasts."""
    leaving: ExitStack = request.scope[_KEY]  # type: ignore[typeddict-item]  # see Connection
    return leaving.enter_context(thing)
