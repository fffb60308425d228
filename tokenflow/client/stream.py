"""One generation as its reader sees it, over however many connections it takes.

    open -> read -> (broke -> wait -> come back)* -> end

There is one way to connect: while the stream has no id, the request is the POST that makes it (with an Idempotency-Key,
so that asking again cannot generate twice); from then on it is `GET /v1/streams/{id}` with the last record's id. What
has come is kept in `Records`, which makes each record count once; when to try again is `Patience`'s.

It reads only when asked for something it does not have: at most one piece of 64 KiB is ever ahead of the caller, and
the rest waits in the kernel, where the server sees it. A cancelled read loses nothing: the next one comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx2
import trio

from tokenflow.client.errors import BadAnswer, CutOff, ServerError, refusal
from tokenflow.client.patience import Patience
from tokenflow.client.records import Delta, Records, chunk_id
from tokenflow.client.words import id_of, is_event_stream, retry_after_s, some_of, unreachable, unwind
from tokenflow.core.sse import Event, Parser

GOODBYE_S = 2.0
"""The most that leaving may take: closing the connection, and the DELETE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What makes a stream, or says which one to read."""

    path: str = ""
    body: Mapping[str, Any] | None = None
    idempotency_key: str = ""
    id: str | None = None
    """Of a stream that is there already."""
    after: int = 0
    resumable: bool = True
    """The server keeps it for a reader that lost its connection."""
    cancel_on_leave: bool = True


class Stream:
    """Deltas, one after the other: `async with client.chat(…) as stream: async for delta in stream: …`.

    For one task at a time. Leaving the block before the end closes the connection and cancels the generation.

    Raises (from `async with` and `async for`):
        Unreachable: no request got through at all.
        ServerError: the server refused, or the generation failed. `ResumeWindowLost`: it forgot what comes next.
        CutOff: the answer broke off and could not be taken up again in time; it has what was received.
        BadAnswer: the peer speaks something else.
    """

    def __init__(self, http: httpx2.AsyncClient, asked: Asked, patience: Patience, proxy: str = "") -> None:
        self._http = http
        self._proxy = proxy
        self._asked = asked
        self._patience = patience
        self._records = Records(asked.after)
        self._records.id = asked.id
        self._records.numbered = asked.id is not None
        self._resumable = asked.resumable
        self._reached = False
        self._first = asked.id is None  # the first event says whether ids mean anything here
        self._ready: deque[Delta] = deque()
        self._response: httpx2.Response | None = None
        self._pieces: AsyncGenerator[bytes, None] | None = None
        self._parser = Parser()
        self._left = False
        self.connections = 0
        """How many answers were begun: 1 where nothing broke."""
        self.cancel_on_leave = asked.cancel_on_leave
        """Leaving early sends the DELETE. False lets the stream be, for `on_disconnect` to decide."""

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str | None:
        """The stream's id, once the server has said it."""
        return self._records.id

    @property
    def n(self) -> int:
        """The last record that came: with the id, where another client could go on (`Client.attach`)."""
        return self._records.n

    @property
    def finished(self) -> bool:
        """Its end was seen, whether good or bad."""
        return self._records.done

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `tool_calls` or `cancelled`, of the first choice; None until then."""
        return self._records.finish_reasons.get(0)

    @property
    def finish_reasons(self) -> dict[int, str]:
        """The same by choice."""
        return dict(self._records.finish_reasons)

    @property
    def usage(self) -> dict[str, Any] | None:
        """Token counts as the server sent them, before the end."""
        return self._records.usage

    @property
    def received(self) -> dict[int, str]:
        """All text so far, by choice."""
        return self._records.texts

    async def text(self, index: int = 0) -> str:
        """Read to the end; all text of a choice, what was read before included."""
        async for _ in self:
            pass
        return self._records.texts.get(index, "")

    # --- reading ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Stream:
        try:
            await self._connect()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        await trio.lowlevel.checkpoint()
        while not self._ready:
            if self._records.failure is not None:
                raise self._records.failure
            if self._records.done:
                raise StopAsyncIteration
            await self._read()
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Leave. Repeatable; bounded by two seconds, also when cancelled."""
        with trio.move_on_after(GOODBYE_S, shield=True):
            await self._disconnect()
            unfinished = self.id is not None and self._resumable and not self.finished
            if unfinished and self.cancel_on_leave and not self._left:
                self._left = True
                with suppress(httpx2.HTTPError):  # it can only be told; its grace is the net below
                    await self._http.delete(f"/v1/streams/{self.id}", timeout=GOODBYE_S)

    async def _read(self) -> None:
        """One piece from the connection, or a new connection."""
        if self._pieces is None:
            await self._connect()
            return
        try:
            piece = await anext(self._pieces, None)
        except httpx2.TransportError as exc:
            await self._broke(f"the connection broke: {exc or type(exc).__name__}", exc)
            return
        except BaseException:
            self._pieces = None  # cancelled: the generator is spent, and the next read comes back
            raise
        if piece is None:
            await self._broke("the connection was closed before the end", None)
            return
        try:
            self._take(self._parser.feed(piece))
        except ValueError as exc:
            raise BadAnswer(f"no event stream: {exc}") from exc

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if self._first:
                self._first = False
                self._resumable = self._asked.resumable and self.id is not None and chunk_id(event) == self.id
                self._records.numbered = self._resumable
            before = self._records.n
            self._ready += self._records.take(event)
            if self._records.n > before:
                self._patience.progress()

    # --- connections ------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Have an answer to read from, or know the end.

        Raises: see the class.
        """
        while True:
            await self._disconnect()
            try:
                response = await self._send(self._request())
            except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.ConnectError, httpx2.ConnectTimeout) as exc:
                if not self._reached:
                    raise unreachable(exc, str(self._http.base_url), self._proxy) from exc
                await self._wait(f"the server cannot be reached: {exc or type(exc).__name__}", exc)
            except httpx2.TransportError as exc:
                self._reached = True
                await self._wait(f"the connection broke: {exc or type(exc).__name__}", exc)
            else:
                self._reached = True
                if await self._accept(response):
                    return

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        """A reader follows redirects, as `EventSource` does; a POST is not sent to where nobody meant it to go."""
        try:
            response = await self._http.send(request, stream=True, follow_redirects=request.method == "GET")
        except httpx2.TooManyRedirects as exc:
            raise BadAnswer(f"{request.url} redirects in a circle") from exc
        if response.has_redirect_location:
            self._response = response
            raise BadAnswer(f"{request.url} redirects to {response.headers['Location']}; use that URL")
        return response

    def _request(self) -> httpx2.Request:
        if self.id is None:
            headers = {"Accept": "text/event-stream", "Idempotency-Key": self._asked.idempotency_key}
            return self._http.build_request("POST", self._asked.path, json=self._asked.body, headers=headers)
        headers = {"Accept": "text/event-stream", "Last-Event-ID": f"{self.id}:{self.n}"}
        return self._http.build_request("GET", f"/v1/streams/{self.id}", headers=headers)

    async def _accept(self, response: httpx2.Response) -> bool:
        """Whether to read on with it; if not, it was worth waiting and asking again."""
        self._response = response
        if response.status_code == 200:
            if not is_event_stream(response.headers):
                raise BadAnswer(f"{response.url} answered with no event stream; is it tokenflow?")
            self.connections += 1
            self._records.id = self.id or id_of(response.headers.get("X-Request-Id", ""))
            self._records.connected()
            self._parser = Parser(retry_ms=self._parser.retry_ms)
            self._pieces = response.aiter_raw()
            return True
        if response.status_code == 204:
            self._records.done = True
            return True
        await self._refused(response)
        return False

    async def _refused(self, response: httpx2.Response) -> None:
        """Wait where that may help; raise where not."""
        status = response.status_code
        after_s = retry_after_s(response.headers.get("Retry-After"))
        error = refusal(status, await some_of(response), after_s)
        if status in (408, 429, 503) or (status >= 500 and self.id is not None):
            await self._wait(str(error), error, at_least_s=after_s or 0.0)
        elif status == 404 and self.connections:
            raise self._cut("the server does not have the stream any more", error)
        else:
            raise error

    async def _broke(self, how: str, exc: Exception | None) -> None:
        await self._disconnect()
        if self.id is None or not self._resumable:
            raise self._cut(how, exc)
        await self._wait(how, exc)

    async def _wait(self, how: str, exc: Exception | None, at_least_s: float = 0.0) -> None:
        """Until the next attempt; beyond the patience, the error."""
        await self._disconnect()
        at_least_s = max(at_least_s, (self._parser.retry_ms or 0) / 1000)
        pause_s = self._patience.next_pause_s(trio.current_time(), at_least_s)
        if pause_s is None:
            if isinstance(exc, ServerError) and not self.connections:
                raise exc  # it never began: what the server says is all there is
            raise self._cut(how, exc)
        await trio.sleep(pause_s)

    def _cut(self, how: str, exc: Exception | None) -> CutOff:
        error = CutOff(how, received=self.received)
        error.__cause__ = exc
        return error

    async def _disconnect(self) -> None:
        pieces, self._pieces = self._pieces, None
        response, self._response = self._response, None
        if pieces is not None:
            await unwind(pieces)
        if response is not None:
            await response.aclose()
