"""Harmony, the format of gpt-oss: a message is several, each on a channel, and some of them are for a tool.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

`analysis` is reasoning; `final` is content, and so is `commentary` for nobody, which is meant for the user; what is for
a function are a call's arguments. The prompt ends with `<|start|>assistant`, and `<|call|>` and `<|return|>` end the
sequence, so that they are not in its text.

OpenAI's own parser of it works on token ids and fetches its vocabulary from the network, so it is not used here.
"""  # noqa: E501

from __future__ import annotations

import re

from tokenflow.chat.message import MessageBuilder
from tokenflow.chat.source import Marks, Read, Source, gathered, nothing
from tokenflow.chat.values import arguments_of, json_arguments

SIGN = "<|channel|>"
MARKS = frozenset({"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"})

_HEAD_BEGINS = Marks("<|start|>", "<|channel|>")
_HEAD_ENDS = Marks("<|message|>")
_BODY_ENDS = Marks("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def harmony(source: Source, message: MessageBuilder, continued: bool = False) -> Read[None]:
    mark: str | None = "<|start|>"  # the prompt ends within a head
    if continued:  # or within a body, which is content
        mark = yield from _next_head(source, (yield from source.until(_BODY_ENDS, message.content)))
    elif not ((yield from source.sees("<|")) or (yield from source.sees(" to="))):
        mark = yield from source.until(_HEAD_BEGINS, message.content)  # it has lost its format
    while mark is not None:
        ended, head = yield from gathered(lambda sink: source.until(_HEAD_ENDS, sink))
        if ended is None:
            return
        mark = yield from _next_head(source, (yield from _message(source, message, mark + head)))


def _next_head(source: Source, mark: str | None) -> Read[str | None]:
    """What begins the next message's head, after what ended a body."""
    return mark if mark == "<|start|>" else (yield from source.until(_HEAD_BEGINS, nothing))


def _message(source: Source, message: MessageBuilder, head: str) -> Read[str | None]:
    """One message's body, by what its head says."""
    recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
    if recipient is not None and message.has_tools:
        message.call(recipient[1].removeprefix("functions."))
        return (yield from _arguments(source, message))
    if channel is not None and channel[1] == "analysis":
        message.reasoning_begins()
        return (yield from source.until(_BODY_ENDS, message.reasoning))
    message.content_begins()
    return (yield from source.until(_BODY_ENDS, message.content))


def _arguments(source: Source, message: MessageBuilder) -> Read[str | None]:
    """A body that is the open call's arguments: an object, which may have marks within its strings, or any text."""
    yield from source.skip()
    first = yield from source.peek()
    if first == "{":
        if (yield from json_arguments(source, message.arguments)):
            message.call_ends()
        return (yield from source.until(_BODY_ENDS, nothing))
    mark, text = yield from gathered(lambda sink: source.until(_BODY_ENDS, sink, within=True))
    if mark is not None or not source.cut:
        message.arguments(arguments_of(text))
        message.call_ends()
    elif first not in ('"', "n"):  # of these nobody can tell what they would have become
        message.arguments(text)
    return mark
