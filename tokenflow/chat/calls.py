"""Tool calls, as the models of each family write them.

Each reader reads a message after its reasoning: content, and calls wherever they come. A call begins once its name is
known; text that only looks like a call until then is content. Once begun it stays one, and its arguments go out as they
come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenflow.chat.message import MessageBuilder
from tokenflow.chat.source import Marks, Read, Source, gathered, nothing
from tokenflow.chat.values import (
    dumps,
    json_arguments,
    json_call,
    parameter_kinds,
    python_arguments,
    python_name,
    tagged_value,
)

Reader = Callable[[Source, MessageBuilder], Read[None]]


def attempt(source: Source, message: MessageBuilder, mark: str, read: Reader) -> Read[None]:
    """Read what should be a call after its `mark`. If none begins, the mark and what follows it were text.

    A message that was stopped there says nothing: that was markup, and nobody can tell of what.
    """
    begun = message.begun
    source.keep()
    yield from read(source, message)
    if message.begun == begun and not (source.cut and source.exhausted):
        source.back()
        message.content(mark)
    source.forget()


# --- Hermes, Qwen: <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call> -------------------------------------------

_TOOL_CALL, _TOOL_CALL_END = Marks("<tool_call>"), Marks("</tool_call>")


def hermes(source: Source, message: MessageBuilder) -> Read[None]:
    while mark := (yield from source.until(_TOOL_CALL, message.content)):
        yield from attempt(source, message, mark, _hermes_call)


def _hermes_call(source: Source, message: MessageBuilder) -> Read[None]:
    yield from source.skip()
    begun = message.begun
    yield from json_call(source, message)
    if message.begun > begun:
        yield from source.until(_TOOL_CALL_END, nothing)


# --- Llama 3: {"name": …, "parameters": {…}}, or <|python_tag|> before it or before name.call(…) ----------------------

_PYTHON_TAG = Marks("<|python_tag|>")


def llama3(source: Source, message: MessageBuilder) -> Read[None]:
    source.keep()
    yield from source.skip()
    if (yield from source.peek()) == "{":
        yield from _llama_calls(source, message, known=True)
    if message.begun:
        return
    source.back()
    while mark := (yield from source.until(_PYTHON_TAG, message.content)):
        yield from attempt(source, message, mark, _llama_tagged)


def _llama_tagged(source: Source, message: MessageBuilder) -> Read[None]:
    yield from source.skip()
    if (yield from source.peek()) == "{":
        yield from _llama_calls(source, message, known=False)
        return
    name = yield from python_name(source)
    if name.endswith(".call") and (yield from source.take("(")):
        message.call(name.removesuffix(".call"))
        yield from python_arguments(source, message)


def _llama_calls(source: Source, message: MessageBuilder, *, known: bool) -> Read[None]:
    """Calls in a row; what follows the last one is content. Nothing is read for good if there is none."""
    first = message.begun
    while (yield from source.sees("{")):
        begun = message.begun
        whole = yield from json_call(source, message, known=known)
        if message.begun == begun:
            if begun == first:
                return
            _back(source)
            break
        if not whole:
            return
        yield from source.skip(" \t\r\n;,")
        source.keep()
    source.forget()
    yield from source.rest(message.content)


def _back(source: Source) -> None:
    """What follows a call is none, and so text; unless it was stopped there, like what `attempt` reads."""
    if not (source.cut and source.exhausted):
        source.back()


# --- Llama 3.2 and 4: [name(a=1, b="x"), …] ---------------------------------------------------------------------------


def pythonic(source: Source, message: MessageBuilder) -> Read[None]:
    source.keep()
    yield from source.skip()
    wrapped = yield from source.take("<|python_start|>")
    begun = -1
    if (yield from source.take("[")):
        while message.begun > begun:
            begun = message.begun
            yield from source.skip()
            if begun:
                source.keep()
            name = yield from python_name(source)
            if not (message.knows(name) and (yield from source.take("("))):
                if begun:
                    _back(source)
                    source.forget()
                break
            message.call(name)
            if not (yield from python_arguments(source, message)):
                return
            yield from source.skip(" \t\r\n,")
            if (yield from source.take("]")):
                break
    source.back()
    if wrapped and message.begun:
        yield from source.take("<|python_end|>")
    yield from source.rest(message.content)


# --- Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}], or [TOOL_CALLS]name[CALL_ID]…[ARGS]{…} ---------------------

_TOOL_CALLS = Marks("[TOOL_CALLS]")
_NAME_ENDS = Marks("[CALL_ID]", "[ARGS]", "{", "[TOOL_CALLS]")
_ID_ENDS = Marks("[ARGS]")


def mistral(source: Source, message: MessageBuilder) -> Read[None]:
    while mark := (yield from source.until(_TOOL_CALLS, message.content)):
        yield from attempt(source, message, mark, _mistral_calls)


def _mistral_calls(source: Source, message: MessageBuilder) -> Read[None]:
    yield from source.skip()
    if not (yield from source.take("[")):
        yield from _mistral_named(source, message)
        return
    while (yield from source.peek()) == "{":
        if not (yield from json_call(source, message)):
            return
        yield from source.skip(" \t\r\n,")
    yield from source.take("]")


def _mistral_named(source: Source, message: MessageBuilder) -> Read[None]:
    mark, name = yield from gathered(lambda sink: source.until(_NAME_ENDS, sink))
    if mark == "[CALL_ID]":
        mark = yield from source.until(_ID_ENDS, nothing)
    if mark == "{":
        source.at -= 1
    if mark in ("{", "[ARGS]") and name.strip():
        yield from _call(source, message, name.strip())


def _call(source: Source, message: MessageBuilder, name: str) -> Read[None]:
    """A call whose name has been read, and whose JSON arguments follow."""
    message.call(name)
    yield from source.skip()
    if (yield from json_arguments(source, message.arguments)):
        message.call_ends()


# --- DeepSeek: V3 and R1 say the type, then the name, then a block of JSON; V3.1 the name, then the JSON --------------


def _bars(name: str) -> tuple[str, ...]:
    """DeepSeek's marks, as they are and as distilled models misspell them."""
    return tuple(f"<｜{name.replace(' ', blank)}｜>" for blank in "▁_ ")


_CALLS_BEGIN = Marks(*_bars("tool calls begin"))
_CALL_BEGIN = Marks(*_bars("tool call begin"), *_bars("tool calls end"))
_SEPARATOR = Marks(*_bars("tool sep"))
_CALL_END = Marks(*_bars("tool call end"))
_LINE_END = Marks("\n")


def deepseek(source: Source, message: MessageBuilder) -> Read[None]:
    while mark := (yield from source.until(_CALLS_BEGIN, message.content)):
        yield from attempt(source, message, mark, _deepseek_calls)


def _deepseek_calls(source: Source, message: MessageBuilder) -> Read[None]:
    while mark := (yield from source.until(_CALL_BEGIN, nothing)):
        if "begin" not in mark:
            return
        mark, head = yield from gathered(lambda sink: source.until(_SEPARATOR, sink))
        if mark is None:
            return
        name = head.strip()
        yield from source.skip()
        if (yield from source.peek()) != "{":
            _, line = yield from gathered(lambda sink: source.until(_LINE_END, sink))
            name = line.strip()
            yield from source.skip()
            yield from source.take("```json")
            yield from source.skip()
        if not name or (yield from source.peek()) != "{":
            return
        yield from _call(source, message, name)
        yield from source.until(_CALL_END, nothing)


# --- Qwen3-Coder, Seed-OSS: <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function> …

_FUNCTION = Marks("<tool_call>", "<seed:tool_call>", "<function=")
_WRAPPED_END = Marks("</tool_call>", "</seed:tool_call>")
_TAG_END = Marks(">", "\n")
_NEXT_PARAMETER = Marks("<parameter=", "</function>")
_PARAMETER_END = Marks("\n</parameter>", "</parameter>")


def qwen_xml(source: Source, message: MessageBuilder) -> Read[None]:
    while mark := (yield from source.until(_FUNCTION, message.content)):
        yield from attempt(source, message, mark, _qwen_call if mark == "<function=" else _qwen_wrapped)


def _qwen_wrapped(source: Source, message: MessageBuilder) -> Read[None]:
    yield from source.skip()
    begun = message.begun
    if (yield from source.take("<function=")):
        yield from _qwen_call(source, message)
    if message.begun > begun:
        yield from source.until(_WRAPPED_END, nothing)


def _qwen_call(source: Source, message: MessageBuilder) -> Read[None]:
    mark, name = yield from gathered(lambda sink: source.until(_TAG_END, sink))
    if mark != ">" or not name.strip():
        return
    name = name.strip()
    schema = message.schema(name)
    message.call(name)
    opening = "{"
    while (mark := (yield from source.until(_NEXT_PARAMETER, nothing))) == "<parameter=":
        mark, key = yield from gathered(lambda sink: source.until(_TAG_END, sink))
        if mark is None:
            return
        key = key.strip()
        message.arguments(f"{opening}{dumps(key)}: ")
        opening = ", "
        yield from source.take("\n")
        if not (yield from tagged_value(source, _PARAMETER_END, parameter_kinds(schema, key), message.arguments)):
            return
    if mark is not None:
        message.arguments("}" if opening != "{" else "{}")
        message.call_ends()


# --- GLM: <tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call> -------------------------

_GLM_NAME_ENDS = Marks("\n", "<arg_key>", "</tool_call>")
_NEXT_KEY = Marks("<arg_key>", "</tool_call>")
_KEY_END = Marks("</arg_key>")
_VALUE = Marks("<arg_value>")
_VALUE_END = Marks("</arg_value>")


def glm(source: Source, message: MessageBuilder) -> Read[None]:
    while mark := (yield from source.until(_TOOL_CALL, message.content)):
        yield from attempt(source, message, mark, _glm_call)


def _glm_call(source: Source, message: MessageBuilder) -> Read[None]:
    yield from source.skip()
    mark, name = yield from gathered(lambda sink: source.until(_GLM_NAME_ENDS, sink))
    name = name.strip()
    if mark is None or not name or " " in name:
        return
    schema = message.schema(name)
    message.call(name)
    if mark == "\n":
        mark = yield from source.until(_NEXT_KEY, nothing)
    opening = "{"
    while mark == "<arg_key>":
        ended, key = yield from gathered(lambda sink: source.until(_KEY_END, sink))
        if ended is None or (yield from source.until(_VALUE, nothing)) is None:
            return
        key = key.strip()
        message.arguments(f"{opening}{dumps(key)}: ")
        opening = ", "
        if not (yield from tagged_value(source, _VALUE_END, parameter_kinds(schema, key), message.arguments)):
            return
        mark = yield from source.until(_NEXT_KEY, nothing)
    if mark is not None:
        message.arguments("}" if opening != "{" else "{}")
        message.call_ends()


# --- the table of them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models calls tools."""

    read: Reader
    signs: tuple[str, ...]
    """A template that writes all of these teaches this format."""
    marks: frozenset[str] = frozenset()
    """Control tokens that belong to it."""
    id_chars: int | None = None
    """The length of a call's id, where templates insist on one."""


CALLS = {
    "deepseek": CallFormat(
        deepseek,
        ("<｜tool▁calls▁begin｜>",),
        frozenset(m for n in ("calls begin", "call begin", "sep", "call end", "calls end") for m in _bars("tool " + n)),
    ),
    "glm": CallFormat(glm, ("<arg_key>",), frozenset({"<tool_call>", "</tool_call>"})),
    "qwen_xml": CallFormat(
        qwen_xml,
        ("<function=", "<parameter="),
        frozenset({"<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"}),
    ),
    "hermes": CallFormat(hermes, ("<tool_call>",), frozenset({"<tool_call>", "</tool_call>"})),
    "mistral": CallFormat(mistral, ("[TOOL_CALLS]",), frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}), 9),
    "pythonic": CallFormat(
        pythonic, ("[func_name1(",), frozenset({"<|python_start|>", "<|python_end|>", "<|python_tag|>"})
    ),
    "llama3": CallFormat(llama3, ("<|start_header_id|>", '"parameters"'), frozenset({"<|python_tag|>"})),
}
"""By the name that a configuration has for it; a template is held against each in this order."""


def taught_by(source: str) -> Iterator[str]:
    """Formats whose signs a template has, the likeliest first."""
    return (name for name, format in CALLS.items() if all(sign in source for sign in format.signs))
