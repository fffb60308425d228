"""The requests that `tokenflow lab` makes, and when their answers came.

Everything goes over the small dialect, one JSON object a token, and is timed where a reader would see it: at the
client. How much was made for a reader that left only the server knows; it is asked until its count stands still.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import trio

from tokenflow.cli.figures import ASKED, TAKEN, TOKENS, Found, Timed, expected_text
from tokenflow.cli.talk import about_key
from tokenflow.client import BadAnswer, ClientError, CutOff, ServerError
from tokenflow.client.errors import from_envelope, refusal
from tokenflow.client.words import is_event_stream, network, unreachable, untrusting, unwind
from tokenflow.core.sse import Event, Parser
from tokenflow.errors import TokenflowError

STILL_S, PATIENCE_S, POLL_S = 0.5, 10.0, 0.05
START_IT = "start it with `tokenflow serve -c conf/lab.toml`"


class LabError(TokenflowError):
    """The exercise cannot be done against this server. The message is for people."""

    code = "lab_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """A server, and what it is asked.

    Args:
        url: the server.
        key: its API key.
        prompt: plain text.
        transport: instead of the network.
    """

    url: str
    key: str | None
    prompt: str
    transport: httpx2.AsyncBaseTransport | None = None

    async def check(self) -> None:
        """Whether there is a server for this.

        Raises:
            LabError: there is none; with what to do.
        """
        async with self._http() as http:
            await _debug(http)

    async def run(self, step: Callable[[int], object]) -> Found:
        """All measurements, one after the other: they would be in each other's way.

        Args:
            step: is told of tokens as they come, `TOKENS_IN_ALL` altogether.

        Raises:
            LabError: something went wrong that is no measurement.
        """
        async with self._http() as http:
            texts = (await self._generate(http), await self._generate(http))
            step(2 * TOKENS)
            timed = await self._timed(http, step)
            generated = await self._leave(http, step)
        expected = expected_text(self.prompt, TOKENS)
        return Found(prompt=self.prompt, texts=texts, expected=expected, timed=timed, generated=generated)

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[httpx2.AsyncClient]:
        """Connections to the server, and its faults in words."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with self._client(headers) as http:
                yield http
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol, httpx2.InvalidURL) as exc:
            message = unreachable(exc, self.url).message
            nobody = message.startswith("cannot reach") or isinstance(exc, httpx2.ConnectTimeout)
            raise LabError(f"{message}; {START_IT}, or pass --url" if nobody else message) from exc
        except httpx2.TransportError as exc:
            raise LabError(f"the connection to {self.url} broke: {exc or type(exc).__name__}") from exc
        except ServerError as exc:
            unknown = exc.status == 401
            raise LabError(
                about_key(exc, self.key) if unknown else f"the server says: {exc.message} ({exc.code})"
            ) from exc
        except ClientError as exc:
            raise LabError(exc.message) from exc

    def _client(self, headers: dict[str, str]) -> httpx2.AsyncClient:
        timeout = httpx2.Timeout(10, read=45)
        try:
            transport = self.transport or network(self.url, httpx2.Limits())
            return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, transport=transport)
        except OSError as exc:
            raise untrusting(exc) from exc

    async def _generate(self, http: httpx2.AsyncClient) -> str:
        response = await http.post("/generate", json={"prompt": self.prompt, "max_tokens": TOKENS})
        return str(_json(response).get("text"))

    async def _timed(self, http: httpx2.AsyncClient, step: Callable[[int], object]) -> Timed:
        begun, texts, arrivals = trio.current_time(), [], []
        async with self._events(http, TOKENS, "pause") as (_, events):
            async for event in events:
                if (text := _token(event)) is None:
                    break
                texts.append(text)
                arrivals.append(trio.current_time() - begun)
                step(1)
            else:
                raise CutOff("the stream was cut off", received={0: "".join(texts)})
        if not arrivals:
            raise BadAnswer("the stream brought no token")
        return Timed(text="".join(texts), arrivals_s=tuple(arrivals), total_s=trio.current_time() - begun)

    async def _leave(self, http: httpx2.AsyncClient, step: Callable[[int], object]) -> int:
        """Read a few tokens, leave, and ask how many were made in the end."""
        async with self._events(http, ASKED, "cancel") as (id, events):
            taken = 0
            async for event in events:
                if _token(event) is None:
                    break
                step(1)
                taken += 1
                if taken == TAKEN:
                    break
        with trio.move_on_after(PATIENCE_S):
            return await _until_still(http, id)
        raise LabError(f"{PATIENCE_S:.0f} s after its reader left, the server still generates")

    @asynccontextmanager
    async def _events(
        self, http: httpx2.AsyncClient, tokens: int, on_disconnect: str
    ) -> AsyncIterator[tuple[str, AsyncIterator[Event]]]:
        """The stream's id, and its events as they come; leaving the block closes the connection."""
        query = {"prompt": self.prompt, "max_tokens": str(tokens), "on_disconnect": on_disconnect}
        async with http.stream("GET", "/stream", params=query) as response:
            if response.status_code != 200 or not is_event_stream(response.headers):
                raise refusal(response.status_code, await response.aread())
            pieces = response.aiter_raw()
            try:
                yield response.headers.get("X-Request-Id", ""), _Events(pieces)
            finally:
                await unwind(pieces)


class _Events:
    """Pieces of bytes to events. Not a generator: there is nothing in it to be closed."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._parser = Parser()
        self._ready: list[Event] = []

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            self._ready = self._parser.feed(await anext(self._pieces))
        return self._ready.pop(0)


def _token(event: Event) -> str | None:
    """The token's text; None for the end."""
    if event.data == "[DONE]":
        return None
    try:
        value = json.loads(event.data)
        if event.event == "error" or "error" in value:
            raise from_envelope(value["error"])
        return str(value["token"])
    except (ValueError, LookupError, TypeError):
        raise BadAnswer(f"this is no token: {event.data!r:.80}") from None


async def _until_still(http: httpx2.AsyncClient, id: str) -> int:
    """The count of the last stream's tokens, once it has not changed for a while."""
    before, since = -1, trio.current_time()
    while True:
        counted = await _debug(http)
        if counted["last_stream"] != id:
            raise LabError("somebody else uses this server: its last stream is not ours; try again alone")
        now = trio.current_time()
        if counted["last"] != before:
            before, since = counted["last"], now
        elif now - since >= STILL_S:
            return int(before)
        await trio.sleep(POLL_S)


async def _debug(http: httpx2.AsyncClient) -> dict[str, Any]:
    response = await http.get("/_debug/generated")
    if response.status_code == 404:
        raise LabError(f"this server does not count its tokens (debug = true); {START_IT}")
    counted = _json(response)
    if not isinstance(counted.get("last"), int) or "last_stream" not in counted:
        raise BadAnswer("/_debug/generated answered something else; is it tokenflow?")
    return counted


def _json(response: httpx2.Response) -> dict[str, Any]:
    if response.status_code != 200:
        raise refusal(response.status_code, response.content)
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadAnswer(f"{response.url} answered something else; is it tokenflow?")
    return value
