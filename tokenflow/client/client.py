"""A server, and what can be asked of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any

import httpx2

from tokenflow.client.errors import BadAnswer, Unreachable, refusal
from tokenflow.client.patience import Patience
from tokenflow.client.stream import Asked, Stream
from tokenflow.client.words import id_of, network, proxy_for, retry_after_s, unreachable, untrusting

CONNECT_S = 10.0
SILENCE_S = 45.0
"""Three heartbeats: a connection that says nothing for so long is gone."""
PATIENCE_S = 15.0
"""The default grace of a stream: beyond it there is nothing to come back to."""


class Client:
    """A tokenflow server (any server of OpenAI's dialect will do, but only this one is come back to). Trio only.

    Args:
        url: like `http://127.0.0.1:8000`.
        key: the API key.
        patience_s: how long an outage may last before `CutOff`; more than the stream's grace makes no sense.
        connect_s: deadline for a connection.
        silence_s: deadline between any two bytes; the server's heartbeat must be more frequent.
        transport: instead of the network.
        random: where jitter comes from.

    Raises:
        Unreachable: `url` is no URL, or the certificates that `SSL_CERT_FILE` names cannot be read, or the proxy that
            the environment names cannot be used. (This machine is never asked through one.)
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
        connect_s: float = CONNECT_S,
        silence_s: float = SILENCE_S,
        transport: httpx2.AsyncBaseTransport | None = None,
        random: Random | None = None,
    ) -> None:
        # A compressor on the way would hold tokens back, and a cache has no business with them.
        headers = {"Accept-Encoding": "identity", "Cache-Control": "no-store"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        encoded = httpx2.Headers(headers)
        timeout = httpx2.Timeout(connect_s, read=silence_s)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)  # a stream holds one for long
        self._proxy = proxy_for(url) if transport is None else ""
        try:
            transport = transport or network(url, limits)
            self._http = httpx2.AsyncClient(
                base_url=url, headers=encoded, timeout=timeout, limits=limits, transport=transport
            )
        except httpx2.InvalidURL as exc:
            raise unreachable(exc, url) from exc
        except (ValueError, ImportError) as exc:
            way_out = "mend http_proxy, https_proxy or all_proxy, or unset it"
            raise Unreachable(f"a proxy of the environment cannot be used: {str(exc).rstrip('.')}; {way_out}") from exc
        except OSError as exc:
            raise untrusting(exc) from exc
        self._patience_s = patience_s
        self._random = Random() if random is None else random

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(exc_type, exc, trace)

    async def models(self) -> list[str]:
        """The ids of what can be asked for. Raises as `listing` does."""
        return [entry["id"] for entry in await self.listing()]

    async def listing(self) -> list[dict[str, Any]]:
        """What can be asked for, each as the server describes it: `id`, and what this server adds, like `capabilities`.

        Raises:
            Unreachable: no answer.
            ServerError: the server said no.
            BadAnswer: it answered something else.
        """
        try:
            response = await self._http.get("/v1/models")
        except (httpx2.TransportError, httpx2.InvalidURL) as exc:
            raise unreachable(exc, str(self._http.base_url), self._proxy) from exc
        if response.status_code != 200:
            wait_s = retry_after_s(response.headers.get("Retry-After"))
            raise refusal(response.status_code, response.content, wait_s)
        try:
            return [dict(entry) | {"id": str(entry["id"])} for entry in response.json()["data"]]
        except (ValueError, LookupError, TypeError):
            message = f"{self._http.base_url} lists no models as OpenAI's dialect does; is it tokenflow?"
            raise BadAnswer(message) from None

    def chat(self, messages: Sequence[Mapping[str, Any]], *, model: str | None = None, **fields: Any) -> Stream:
        """An answer to a conversation: enter it with `async with`.

        Args:
            messages: as OpenAI's dialect has them.
            model: None leaves it to the server.
            fields: any other field of the request. `stream_options` may say what a lost connection means; unless it
                says `cancel`, the stream is come back to.
        """
        return self._generate("/v1/chat/completions", model, {"messages": list(messages)} | fields)

    def completions(self, prompt: str | Sequence[Any], *, model: str | None = None, **fields: Any) -> Stream:
        """A continuation of plain text: enter it with `async with`. See `chat`."""
        return self._generate("/v1/completions", model, {"prompt": prompt} | fields)

    def attach(self, id: str, *, after: int = 0) -> Stream:
        """A stream that is there already, from after record `after`: enter it with `async with`.

        Leaving it early does not cancel it, for others may be reading; set `cancel_on_leave` if it should.
        """
        if id_of(id) is None:
            raise ValueError(f"this is no stream's id: {id!r:.80}")
        return self._stream(Asked(id=id, after=after, cancel_on_leave=False))

    def _generate(self, path: str, model: str | None, fields: Mapping[str, Any]) -> Stream:
        options = {"on_disconnect": "pause", "include_usage": True} | dict(fields.get("stream_options") or {})
        body: dict[str, Any] = {} if model is None else {"model": model}
        body |= dict(fields) | {"stream": True, "stream_options": options}
        asked = Asked(
            path=path,
            body=body,
            idempotency_key=secrets.token_urlsafe(16),
            resumable=options["on_disconnect"] in ("pause", "continue"),
            cancel_on_leave=options["on_disconnect"] == "pause",
        )
        return self._stream(asked)

    def _stream(self, asked: Asked) -> Stream:
        return Stream(self._http, asked, Patience(self._patience_s, self._random), self._proxy)
