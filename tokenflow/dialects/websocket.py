"""The WebSocket dialect: what a client's frame asks for, and what the server's frames say. JSON text, nothing else.

    {"action": "generate", "id", "messages" | "prompt", "credit", …any field of a request}   (or without the action)
    {"action": "cancel" | "pause" | "resume", "id"}
    {"action": "attach", "id", "stream", "after", "credit"}
    {"action": "credit", "id", "n"}
    {"type": "ping"}

A generation has two names, the client's own `id` and the stream's; wherever a frame says `id`, both will do. What the
server sends carries the client's `id`, or the stream's where the client gave none:

    {"id", "stream", "n"}                                   it has begun; the client has everything up to n
    {"id", "stream", "n", "index", "delta": {"content"}}    of one choice; with "logprobs" where asked for, and with
                                                            "reasoning_content" or "tool_calls" where there are any
    {"id", "stream", "n", "done": true, "finish_reason", "usage"}   with "finish_reasons", by choice, where n > 1
    {"id", "stream", "n", "error": {…}}                     it ended otherwise
    {"id", "error": {…}}                                    a frame was refused, and nothing else has changed

So an error with `stream` is the end of a generation, and one without it is the answer to a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Literal

from tokenflow.core.types import Delta, FinishReason, GenerationRequest, MessageDelta, Usage
from tokenflow.dialects import openai_chat, openai_completions
from tokenflow.dialects.errors import envelope
from tokenflow.dialects.fields import INVALID_TYPE, Fields, kind, loads, missing, shown
from tokenflow.dialects.openai_frames import dumps, usage_object, utf8
from tokenflow.errors import InvalidRequest, TokenflowError

MAX_ID_CHARS = 256
MAX_CREDIT = 1 << 53
"""What a JSON number can count without doubt."""

PING = '{"type":"ping"}'
PONG = '{"type":"pong"}'

# --- from the client --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Begin a generation."""

    id: str | None
    request: GenerationRequest
    credit: int | None
    """How many records may come before more is allowed; None: it does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steer:
    """Cancel a generation, hold it, or let it go on."""

    action: Literal["cancel", "pause", "resume"]
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Read a stream that there is already."""

    id: str | None
    stream: str
    after: int
    credit: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Allow `n` more records."""

    id: str
    n: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Is anybody there?"""


@dataclass(frozen=True, slots=True)
class Pong:
    """Somebody is."""


ClientFrame = Generate | Steer | Attach | Credit | Ping | Pong


def read(data: str | bytes) -> Fields:
    """A frame's fields.

    Raises:
        InvalidRequest: it is not a JSON object in a text frame.
    """
    if isinstance(data, bytes):
        raise InvalidRequest("Send text frames: this one is binary.", code=INVALID_TYPE)
    value = loads(data)
    if not isinstance(value, dict):
        raise InvalidRequest(f"A frame is a JSON object, not {kind(value)}.", code=INVALID_TYPE)
    return Fields(value)


def said_id(fields: Fields) -> str | None:
    """The frame's `id` if it is one, for the answer to a frame that is wrong otherwise."""
    id = fields.get("id")
    return utf8(id).decode() if isinstance(id, str) and len(id) <= MAX_ID_CHARS else None


def parse(fields: Fields) -> ClientFrame:
    """What a frame asks for.

    Raises:
        InvalidRequest: with `param` naming the field.
    """
    match fields.get("action"):
        case None:
            return _without_action(fields)
        case "generate":
            return _generate(fields)
        case "cancel" | "pause" | "resume" as action:
            return Steer(action=action, id=_name(fields))
        case "attach":
            return _attach(fields)
        case "credit":
            n = fields.integer("n", least=1, most=MAX_CREDIT)
            if n is None:
                raise missing("n")
            return Credit(id=_name(fields), n=n)
        case other:
            raise InvalidRequest(
                f"'action' is generate, cancel, pause, resume, attach or credit, not {shown(other)}.", param="action"
            )


def _without_action(fields: Fields) -> ClientFrame:
    match fields.get("type"):
        case "ping":
            return Ping()
        case "pong":
            return Pong()
    if fields.get("messages") is not None or fields.get("prompt") is not None:
        return _generate(fields)
    raise missing("action")


def _generate(fields: Fields) -> Generate:
    id, credit = _id(fields), _credit(fields)
    chat = fields.get("messages") is not None
    if chat and fields.get("prompt") is not None:
        raise InvalidRequest("Send 'messages' or 'prompt', not both.", param="prompt")
    if not chat and fields.get("prompt") is None:
        raise missing("messages")
    values = {name: fields.get(name) for name in fields}
    request = (openai_chat if chat else openai_completions).parse(values, stream=True)
    return Generate(id=id, request=request, credit=credit)


def _attach(fields: Fields) -> Attach:
    stream = fields.text("stream")
    if stream is None:
        raise missing("stream")
    after = fields.integer("after", least=0) or 0
    return Attach(id=_id(fields), stream=stream, after=after, credit=_credit(fields))


def _credit(fields: Fields) -> int | None:
    return fields.integer("credit", least=0, most=MAX_CREDIT)


def _id(fields: Fields) -> str | None:
    id = fields.text("id")
    if id is not None and not 0 < len(id) <= MAX_ID_CHARS:
        raise InvalidRequest(f"'id' must have 1 to {MAX_ID_CHARS} characters.", param="id")
    return id


def _name(fields: Fields) -> str:
    """Which generation is meant: by `id`, or by `stream` where that is how the client thinks of it."""
    name = _id(fields) or fields.text("stream")
    if name is None:
        raise missing("id")
    return name


# --- to the client ----------------------------------------------------------------------------------------------------


def refused(id: str | None, error: TokenflowError) -> str:
    """The answer to a frame that could not be followed."""
    return dumps({"id": id} | envelope(error)).decode()


class Encoder:
    """One generation's frames: the head once, and into it what each record says.

    Args:
        id: the client's own, or the stream's where it gave none.
        stream: the stream's.
    """

    def __init__(self, id: str, stream: str) -> None:
        self._head = dumps({"id": id, "stream": stream}).decode()[:-1] + ',"n":'

    def begun(self, n: int) -> str:
        """The first frame, so that the client knows the stream's id before there is any text."""
        return f"{self._head}{n}}}"

    def delta(self, n: int, index: int, delta: Delta) -> str:
        if isinstance(delta, MessageDelta):
            return self._message(n, index, delta)
        text = encode_basestring(delta.text)
        if not text.isascii():
            text = utf8(text).decode()
        frame = f'{self._head}{n},"index":{index},"delta":{{"content":{text}}}'
        if delta.logprobs:
            frame += ',"logprobs":' + dumps(openai_chat.logprobs_object(delta.logprobs)).decode()
        return frame + "}"

    def _message(self, n: int, index: int, delta: MessageDelta) -> str:
        said = openai_chat.delta_object(delta) | ({"content": delta.text} if delta.text or delta.logprobs else {})
        frame: dict[str, Any] = {"index": index, "delta": said}
        if delta.logprobs:
            frame["logprobs"] = openai_chat.logprobs_object(delta.logprobs)
        return self._with(n, frame)

    def end(self, n: int, reasons: Sequence[FinishReason], usage: Usage) -> str:
        """The end that went well, or by the client's own cancel."""
        whole = "cancelled" if "cancelled" in reasons else reasons[0]
        said: dict[str, Any] = {"done": True, "finish_reason": whole}
        if len(reasons) > 1:
            said["finish_reasons"] = list(reasons)
        return self._with(n, said | {"usage": usage_object(usage)})

    def failure(self, n: int, error: TokenflowError) -> str:
        """The end that did not."""
        return self._with(n, envelope(error))

    def _with(self, n: int, said: dict[str, Any]) -> str:
        return f"{self._head}{n},{dumps(said).decode()[1:]}"
