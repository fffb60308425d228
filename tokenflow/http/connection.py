"""One HTTP request's life on the ASGI side.

Whatever a handler takes for its request (a stream's reader) is given back when the request is over, on every path: a
handler that returned its response and whose client left before the first byte of the body has no `finally` that would
run. So the clean-up hangs on the connection, synchronous and certain.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import TypeVar

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart_trio.asgi import TrioASGIHTTPConnection

T = TypeVar("T")
_held: ContextVar[ExitStack] = ContextVar("held by this request")


class Connection(TrioASGIHTTPConnection):
    """Quart-Trio's, which gives back what its request held, and handles it in a task less."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        with ExitStack() as held:
            _held.set(held)  # this task is the request's own
            request = self._create_request_from_scope(send)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.handle_messages, nursery, request, receive)
                await self.handle_request(nursery, request, send)


def hold(thing: AbstractContextManager[T]) -> T:
    """Enter `thing` for as long as the request that is being handled lasts."""
    return _held.get().enter_context(thing)
