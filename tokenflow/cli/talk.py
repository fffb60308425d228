"""A conversation with a server over `/v1/chat/completions`: what `tokenflow chat` does, without the terminal."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx2
import trio

from tokenflow.core.sse import Parser
from tokenflow.errors import TokenflowError

Message = Mapping[str, str]

CONNECT_S = 10.0
SILENCE_S = 120.0
"""Servers send a heartbeat far more often than this."""


class ChatError(TokenflowError):
    """The server cannot be had, or said no. The message is for people."""

    code = "chat_failed"


@dataclass
class Reply:
    """An answer, as far as it has come."""

    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A server, and what is asked of it each time."""

    url: str
    key: str | None = None
    model: str | None = None
    """None: the first that the server lists."""
    options: Mapping[str, float] = field(default_factory=dict)
    """`max_tokens` and the like, sent as they are."""
    transport: httpx2.AsyncBaseTransport | None = None
    """Instead of the network."""

    async def ask(self, messages: list[Message], show: Callable[[str], None]) -> Reply:
        """Send the messages and hand each piece of the answer to `show` as it comes.

        Ctrl-C ends the generation by closing the response, which the server takes as its client's leaving.

        Raises:
            ChatError: what went wrong; what was said before it has been shown.
        """
        reply = Reply()
        error = None
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_interrupt, signals, reply, nursery.cancel_scope)
                # The error leaves the nursery bare, not in a group.
                error = await self._answer(messages, reply, show)
                nursery.cancel_scope.cancel()
        if error is not None and not reply.interrupted:
            raise error
        return reply

    async def _answer(self, messages: list[Message], reply: Reply, show: Callable[[str], None]) -> ChatError | None:
        timeout = httpx2.Timeout(CONNECT_S, read=SILENCE_S)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with httpx2.AsyncClient(
                base_url=self.url, headers=headers, timeout=timeout, transport=self.transport
            ) as client:
                body = {"model": self.model or await _first_model(client), "messages": messages, "stream": True}
                await _stream(client, body | dict(self.options), reply, show)
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as exc:
            return ChatError(f"{self.url!r} is no URL ({exc}); write one like http://127.0.0.1:8000")
        except httpx2.ConnectError as exc:
            return ChatError(f"cannot reach {self.url}: {_cause(exc)}; start it with `tokenflow serve`, or pass --url")
        except httpx2.TimeoutException:
            return ChatError(f"{self.url} did not answer in time; see its log, or pass --url")
        except httpx2.TransportError as exc:
            return ChatError(f"the connection to {self.url} broke: {exc}")
        except ChatError as exc:
            return exc
        return None


async def _interrupt(signals: AsyncIterator[int], reply: Reply, scope: trio.CancelScope) -> None:
    async for _ in signals:
        reply.interrupted = True
        scope.cancel()


async def _first_model(client: httpx2.AsyncClient) -> str:
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise _refusal(response.status_code, response.content)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ChatError(f"{client.base_url} lists no models as OpenAI's dialect does; is it tokenflow?") from None


async def _stream(client: httpx2.AsyncClient, body: object, reply: Reply, show: Callable[[str], None]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise _refusal(response.status_code, await response.aread())
        parser = Parser()
        async with aclosing(response.aiter_bytes()) as pieces:
            async for data in pieces:
                for event in parser.feed(data):
                    _take(event.data, reply, show)
    if not reply.done:
        raise ChatError("the stream was cut before its end")


def _take(data: str, reply: Reply, show: Callable[[str], None]) -> None:
    if data == "[DONE]":
        reply.done = True
        return
    chunk = _json(data)
    if error := chunk.get("error"):
        raise ChatError(_described(error))
    for choice in chunk.get("choices", ()):
        text = choice.get("delta", {}).get("content") or ""
        reply.text += text
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        if text:
            show(text)


def _refusal(status: int, content: bytes) -> ChatError:
    error = _json(content).get("error")
    return ChatError(_described(error) if error else f"the server answered {status}; is it tokenflow?")


def _described(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    code = error.get("code")
    return f"{error.get('message', 'the server reports an error')}" + (f" ({code})" if code else "")


def _cause(exc: BaseException) -> str:
    """The operating system's own words at the bottom of an error; libraries on the way only say that they failed."""
    inner: BaseException | None = exc
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno:
            # Trio puts the address in front of strerror; name resolution has numbers of its own, below 0.
            return os.strerror(inner.errno) if inner.errno > 0 else str(inner.strerror)
        inner = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner.__cause__ or inner.__context__
    return str(exc)


def _json(text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
