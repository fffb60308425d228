"""The application's side of a connection: what one ASGI call receives and sends, whatever the protocol.

Hypercorn starts every application, for HTTP/1.1, HTTP/2 and WebSocket alike, through `TaskGroup.spawn_app`. `AppTasks`
overrides that one method and puts an `AppChannel` between the two sides:

* `receive` is a bounded inbox. A full one makes the protocol wait, and with it the client; meanwhile somebody else
  has to look for the client's leaving, because the reader cannot. An HTTP disconnect overtakes a body nobody read.
* `send` raises `ClientDisconnected` once the client has left. Hypercorn returns silently and without a checkpoint, so
  that an application which sends in a loop freezes the process.
* `Direct`, an extension in the scope, is `send` without the wait: for whoever has a token and is not the application's
  own task. `when_left` and `take_body` are `receive` without a task that waits in it.
"""

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.task_group import TaskGroup
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, Scope

from .at_once import Direct

# A send that the kernel takes at once does not block, so it is no checkpoint; a fast client must still let others run.
_SENDS_PER_CHECKPOINT = 16


class ClientDisconnected(OSError):
    """The client has left, or was cut off because it stopped reading. Stop working for it (ASGI 2.4, `send`)."""


def error_body(status: int, message: str) -> bytes:
    """The body of an error that the transport itself has to send, in the envelope that every error has."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = HTTPStatus(status).name.lower()
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


_EXTENSION = "tokenflow"


def direct(scope: Any) -> Direct | None:
    """How the client of this ASGI scope is written to directly, where the server offers it."""
    offered: Direct | None = scope["extensions"].get(_EXTENSION, {}).get("direct")
    return offered


def when_left(scope: Any, do: Callable[[], object]) -> None:
    """Call `do` at once, from whichever task sees it, when the client has left or its response has ended.

    It must not block. Where the server does not offer it nothing is called: `receive` tells of the disconnect too.
    """
    offered = scope["extensions"].get(_EXTENSION)
    if offered is not None:
        offered["when_left"](do)


def take_body(scope: Any, take: Callable[[bytes, bool], object]) -> Callable[[], None] | None:
    """Call `take` with each piece of the request's body and whether more will come: what has come now, the rest as it
    does, from whichever task has it, until what this returns is called. `take` must not block, and gets no
    back-pressure: it must bound what it keeps by itself.

    None: the server does not offer it; then they come by `receive`.
    """
    offered = scope["extensions"].get(_EXTENSION)
    if offered is None:
        return None
    stop: Callable[[], None] = offered["take_body"](take)
    return stop


async def for_server(scope: Scope, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
    """The application for `OPTIONS *`, which asks for the server itself and for none of its paths: it is there."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class AppChannel:
    """Both directions between the protocol and one application call."""

    __slots__ = (
        "_app_send",
        "_bell",
        "_disconnect",
        "_flush",
        "_inbox",
        "_inbox_limit",
        "_is_http",
        "_response_started",
        "_sends",
        "_take",
        "_watch_hangup",
        "_when_left",
    )

    def __init__(
        self,
        scope: Scope,
        app_send: Callable[[ASGISendEvent | None], Awaitable[None]],
        inbox_limit: int,
        watch_hangup: Callable[[], Awaitable[None]],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        self._is_http = scope["type"] == "http"
        self._app_send = app_send
        self._inbox_limit = inbox_limit
        self._watch_hangup = watch_hangup
        self._flush = flush
        self._inbox: list[ASGIReceiveEvent] = []  # short: an empty deque is ten times as large
        self._bell: trio.Event | None = None  # while somebody waits for the inbox to change
        self._disconnect: ASGIReceiveEvent | None = None
        self._when_left: Callable[[], object] | None = None
        self._take: Callable[[bytes, bool], object] | None = None
        self._response_started = False
        self._sends = 0

    async def put(self, event: ASGIReceiveEvent) -> None:
        """Called by the protocol. Waits while the inbox is full; never waits to say that the client has left."""
        if event["type"] in ("http.disconnect", "websocket.disconnect"):
            self._leave(event)
            return
        if self._take is None and len(self._inbox) >= self._inbox_limit:
            await self._wait_for_room()
        if not self._hand_over(event) and self._disconnect is None:  # perhaps it takes since this began to wait
            self._inbox.append(event)
            self._ring()

    def disconnect(self) -> None:
        """The connection is gone, whether or not the protocol says so."""
        if self._disconnect is None:
            self._leave(
                {"type": "http.disconnect"} if self._is_http else {"type": "websocket.disconnect", "code": 1006}
            )

    def _leave(self, event: ASGIReceiveEvent) -> None:
        self._disconnect = event
        self._ring()
        if self._when_left is not None:
            do, self._when_left = self._when_left, None
            do()

    def when_left(self, do: Callable[[], object]) -> None:
        """As in the function of that name."""
        if self._disconnect is None:
            self._when_left = do
        else:
            do()

    def take_body(self, take: Callable[[bytes, bool], object]) -> Callable[[], None]:
        """As in the function of that name."""
        self._take = take
        events, self._inbox = self._inbox, []
        self._ring()
        for event in events:
            self._hand_over(event)
        return self._leave_body

    def _leave_body(self) -> None:
        self._take = None

    def _hand_over(self, event: Any) -> bool:
        """Whether somebody takes it."""
        if self._take is None:
            return False
        self._take(event["body"], event["more_body"])
        return True

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.set()
            self._bell = None

    async def _change(self) -> None:
        """Wait until the inbox changes."""
        if self._bell is None:
            self._bell = trio.Event()
        await self._bell.wait()

    async def _wait_for_room(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_hangup)
            while len(self._inbox) >= self._inbox_limit and self._disconnect is None:
                await self._change()
            nursery.cancel_scope.cancel()

    async def receive(self) -> ASGIReceiveEvent:
        """The next event. No checkpoint for a message that is there: there are not many."""
        while True:
            # WebSocket messages sent before the close are still wanted; half a request body is not.
            if self._disconnect is not None and (self._is_http or not self._inbox):
                await trio.lowlevel.checkpoint()
                return self._disconnect
            if self._inbox:
                event = self._inbox.pop(0)
                self._ring()
                return event
            await self._change()

    async def send(self, message: ASGISendEvent) -> None:
        # The checkpoint comes first: cancelled here, nothing of the message is on the wire.
        self._sends += 1
        if self._disconnect is not None or self._sends % _SENDS_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()
        if self._disconnect is not None:
            raise ClientDisconnected(f"{message['type']} after the client had left or the response had ended")
        self._response_started |= message["type"] == "http.response.start"
        await self._app_send(message)
        if message["type"] == "http.response.body" and message.get("more_body") and not message.get("body"):
            await self._flush()  # what an empty piece is sent for: the head is to go out before the body begins

    async def run(self, app: AppWrapper, config: Config, scope: Scope) -> None:
        """Run the application and, when it ends without having ended its response, do that."""
        try:
            await app(scope, self.receive, self.send, trio.to_thread.run_sync, trio.from_thread.run)
        except* ClientDisconnected:
            pass  # the usual end of an application whose client left: not an error
        except* Exception:
            await config.log.exception("Error in ASGI Framework")
            with suppress(ClientDisconnected):
                await self._send_failure()
        with suppress(ClientDisconnected):
            await self._app_send(None)

    def close(self) -> None:
        """The application has ended: let go of the protocol, so that neither keeps the other."""
        self._app_send = _dropped
        self._when_left = self._take = None

    async def _send_failure(self) -> None:
        if not self._is_http or self._response_started or self._disconnect is not None:
            return
        body = error_body(500, "The server failed to answer this request; its log says why.")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._app_send({"type": "http.response.start", "status": 500, "headers": headers})
        await self._app_send({"type": "http.response.body", "body": body, "more_body": False})


class AppTasks(TaskGroup):
    """The tasks of one connection: its applications, and whatever the protocol itself spawns."""

    def __init__(self, watch_hangup: Callable[[], Awaitable[None]], direct: Direct) -> None:
        super().__init__()
        self._watch_hangup = watch_hangup
        self._direct = direct
        self._channels: set[AppChannel] = set()

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        assert scope["type"] != "lifespan"
        channel = AppChannel(scope, send, config.max_app_queue_size, self._watch_hangup, self._direct.flush)
        extensions: Any = scope["extensions"]
        offered = {"direct": self._direct, "when_left": channel.when_left, "take_body": channel.take_body}
        extensions[_EXTENSION] = offered
        self._channels.add(channel)
        super().spawn(self._run_app, channel, app, config, scope)
        return channel.put

    async def _run_app(self, channel: AppChannel, app: AppWrapper, config: Config, scope: Scope) -> None:
        try:
            await channel.run(app, config, scope)
        finally:
            self._channels.discard(channel)
            channel.close()

    def disconnect(self) -> None:
        """Tell every application that the client has left. Hypercorn's streams forget to, after some errors."""
        for channel in tuple(self._channels):
            channel.disconnect()

    def spawn(self, func: Callable[..., Awaitable[None]], *args: Any) -> None:
        # A lost client must not cancel the other tasks: the applications are told by a disconnect.
        super().spawn(_until_disconnected, func, *args)


async def _dropped(message: ASGISendEvent | None) -> None:
    pass


async def _until_disconnected(func: Callable[..., Awaitable[None]], *args: Any) -> None:
    with suppress(ClientDisconnected):
        await func(*args)
