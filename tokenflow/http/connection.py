"""One HTTP request's life on the ASGI side.

Whatever a handler takes for its request (a stream's reader) is given back when the request is over, on every path: a
handler that returned its response and whose client left before the first byte of the body has no `finally` that would
run. So the clean-up hangs on the connection, synchronous and certain. Nor does it wait for the handler: a send is
shielded, and one to a client that does not read, but has reset its HTTP/2 stream or closed its WebSocket, may take
`stall_s` to fail.
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

from tokenflow.http.transport import take_body, when_left


class Ending:
    """What is to be done when the request of the task that makes this is over, each thing once; see `at_end`."""

    def __init__(self) -> None:
        self.due: list[Callable[[], object]] = []
        _ending.set(self)

    def come(self) -> None:
        """It is over, or its client has left: then whoever works for it has been cancelled. Repeatable."""
        while self.due:
            self.due.pop()()


_ending: ContextVar[Ending] = ContextVar("the end of this request")


class Connection(TrioASGIHTTPConnection):
    """Quart-Trio's, which gives back what its request held, and while it streams is one task and holds no request."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        ending = Ending()
        try:
            with trio.CancelScope() as scope:

                def leave() -> None:
                    scope.cancel()
                    ending.come()

                when_left(self.scope, leave)
                await self._send_response(send, await self._answer(receive, send))
        finally:
            ending.come()

    async def _answer(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> Response | WerkzeugResponse:
        request = self._create_request_from_scope(send)

        def take(data: bytes, more: bool) -> None:
            request.body.append(data)
            if not more:
                request.body.set_complete()

        if (stop := take_body(self.scope, take)) is not None:
            try:
                return await self.app.handle_request(request)
            finally:
                stop()  # what nobody has wanted by now is not taken: the client is held back
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ASGIHTTPConnection.handle_messages, self, request, receive)
            response = await self.app.handle_request(request)
            nursery.cancel_scope.cancel()  # also where nobody wanted the body
        return response


def at_end(do: Callable[[], object]) -> None:
    """Call `do` when the request that is being handled is over, however it ends. It must neither wait nor raise."""
    _ending.get().due.append(do)
