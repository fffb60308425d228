"""A conversation with a server: what `tokenflow chat` does, without the terminal.

The client does the work: it comes back when the connection breaks, and tells the end of an answer from a cut. Here is
only what a person at a keyboard adds: Ctrl-C ends the answer and not the program, and an error is one line that says
what to do.
"""

from __future__ import annotations

import math
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx2
import trio

from tokenflow.client import BadAnswer, Client, ClientError, CutOff, ServerError, Unreachable
from tokenflow.errors import TokenflowError

Message = Mapping[str, str]

LISTED = 10
"""So many models are named where another was asked for."""


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
    killed_by: int | None = None
    """The signal that is to end the program too, once the server knows."""
    why_cut: str = ""
    """Of an answer with the finish reason `length`: what allowed no more, as far as it can be known here."""


class Question(NamedTuple):
    """What is sent beside the messages."""

    model: str
    options: dict[str, float]
    entry: Mapping[str, Any]
    """The model as the server lists it; empty where nobody asked, or it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A server, and what is asked of it each time."""

    url: str
    key: str | None = None
    model: str | None = None
    """None: the first that the server lists."""
    options: Mapping[str, float] = field(default_factory=dict)
    """`max_tokens` and the like, sent as they are."""
    usual: Mapping[str, float] = field(default_factory=dict)
    """Sent too, each where the model can do it and has no default of its own: nobody asked for them."""
    transport: httpx2.AsyncBaseTransport | None = None
    """Instead of the network."""

    async def meet(self) -> Talk:
        """The same with its model's name: what is wrong with the server or the model is known before anything is asked.

        Raises:
            ChatError: what is.
        """
        self._check([])
        try:
            async with self._client() as client:
                offered = await self._offered(client)
        except ClientError as exc:
            raise self._error(exc) from exc
        ids = [str(entry["id"]) for entry in offered]
        if self.model and ids and self.model not in ids:
            more = ", …" if len(ids) > LISTED else ""
            raise ChatError(f'no model "{self.model}" is served there; there is {", ".join(ids[:LISTED])}{more}')
        return replace(self, model=self.model or ids[0])

    async def ask(
        self, messages: list[Message], show: Callable[[str], None], think: Callable[[str], None] = lambda text: None
    ) -> Reply:
        """Send the messages and hand each piece of the answer to `show` as it comes, and of the reasoning to `think`.

        Ctrl-C leaves the answer, which cancels the generation.

        Raises:
            ChatError: what went wrong; what was said before it has been shown.
        """
        self._check(messages)
        reply = Reply()
        error = None
        # A closed terminal and a kill are a client that leaves, too: the server is to know at once.
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_interrupt, signals, reply, nursery.cancel_scope)
                # The error leaves the nursery bare, not in a group.
                error = await self._answer(messages, reply, show, think)
                nursery.cancel_scope.cancel()
        if error is not None and not reply.interrupted:
            raise error
        if reply.killed_by is not None:
            raise SystemExit(128 + reply.killed_by)
        return reply

    def _check(self, messages: list[Message]) -> None:
        """Refuse what no request can carry: terminals, environments and pipes hold any bytes. Raises ChatError."""
        key = self.key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            raise ChatError("the API key is empty or has a character that no key has; look at --key and TOKENFLOW_KEY")
        texts = [
            ("the model's id", self.model or ""),
            *((f"the {m['role']}'s message", m["content"]) for m in messages),
        ]
        for what, text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ChatError(f"{what} is not UTF-8; convert it, for example with iconv") from None
        for name, value in self.options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ChatError(f"{name} is {value}, which is no number that can be sent; choose another")

    async def _answer(
        self, messages: list[Message], reply: Reply, show: Callable[[str], None], think: Callable[[str], None]
    ) -> ChatError | None:
        try:
            async with self._client() as client:
                question = await self._question(client)
                async with client.chat(messages, model=question.model, **question.options) as stream:
                    async for delta in stream:
                        if delta.reasoning:
                            think(delta.reasoning)
                        if delta.text:
                            reply.text += delta.text
                            show(delta.text)
                    reply.finish_reason, reply.done = stream.finish_reason, True
                    if reply.finish_reason == "length":
                        reply.why_cut = why_cut(question, stream.usage or {})
        except ClientError as exc:
            return self._error(exc)
        return None

    def _client(self) -> Client:
        return Client(self.url, self.key, transport=self.transport)

    def _error(self, exc: ClientError) -> ChatError:
        error = ChatError(_advice(exc, self.key))
        error.__cause__ = exc
        return error

    async def _offered(self, client: Client) -> list[dict[str, Any]]:
        """The models that the server lists; with one's name given there may be none."""
        try:
            offered = await client.listing()
        except (ServerError, BadAnswer) as exc:
            if not self.model or (isinstance(exc, ServerError) and exc.status == 401):
                raise
            return []  # another server may list none; what else is wrong, the question will be told
        if not self.model and not offered:
            raise ServerError("the server lists no models")
        return offered

    async def _question(self, client: Client) -> Question:
        """Which model is asked, and with which options."""
        if self.model and not self.usual:
            return Question(self.model, dict(self.options), {})
        offered = await self._offered(client)
        model = self.model or str(offered[0]["id"])
        entry = next((entry for entry in offered if entry["id"] == model), {})
        can = entry.get("capabilities")
        sent = {"max_tokens", *(can if isinstance(can, list) else ())} - set(_own(entry))
        usual = {name: value for name, value in self.usual.items() if name in sent}
        return Question(model, usual | dict(self.options), entry)


async def _interrupt(signals: AsyncIterator[int], reply: Reply, scope: trio.CancelScope) -> None:
    async for number in signals:
        reply.interrupted = True
        reply.killed_by = None if number == signal.SIGINT else number
        scope.cancel()


def _own(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults that the server has for a model."""
    own = entry.get("defaults")
    return own if isinstance(own, dict) else {}


def why_cut(question: Question, usage: Mapping[str, Any]) -> str:
    """What allowed no more than these tokens; where it could be more than one thing, all of them."""
    made, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
    context = question.entry.get("context_length")
    if not isinstance(made, int):
        return "--max-tokens, the server or the context allows no more"
    room = context - prompt if isinstance(context, int) and isinstance(prompt, int) else None
    if room is not None and made >= room:
        return f"the model's context of {context} tokens is full"
    asked, own = question.options.get("max_tokens"), _own(question.entry).get("max_tokens")
    if asked is not None and made >= asked:
        return f"--max-tokens is {asked}"
    if asked is None and isinstance(own, int) and made >= own:
        return f"the server's default for this model is {own} tokens; --max-tokens asks for more"
    return f"the server allows no more than {made} tokens" if room else "the server or the context allows no more"


def is_too_long(error: ChatError) -> bool:
    """Whether the messages were more than the server takes, or the model's context holds."""
    match error.__cause__:
        case ServerError(status=413) | ServerError(code="context_length_exceeded"):
            return True
        case ServerError(status=400, param="messages"):
            return True
    return False


def about_key(exc: ServerError, key: str | None) -> str:
    """What a 401 means to somebody at a keyboard."""
    if key is None:
        return "the server wants an API key; pass --key, or set TOKENFLOW_KEY"
    return f"{exc.message.rstrip('.')}; look at --key and TOKENFLOW_KEY"


def _advice(exc: ClientError, key: str | None) -> str:
    """What happened, and what may help."""
    match exc:
        case ServerError(status=401):
            return about_key(exc, key)
        case Unreachable() if exc.message.startswith("cannot reach"):
            return f"{exc.message}; start it with `tokenflow serve`, or pass --url"
        case Unreachable() if exc.message.endswith("in time"):
            return f"{exc.message}; see its log, or pass --url"
        case CutOff():
            return f"the answer was cut off: {exc.message}"
        case ServerError() if not exc.code.startswith("http_") and exc.code != ServerError.code:
            return f"{exc.message} ({exc.code})"
    return exc.message
