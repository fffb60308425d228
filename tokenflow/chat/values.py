"""Values in a model's output, turned into the JSON text of a call's arguments as they come.

JSON is handed on as the model wrote it, character for character. What other formats write (text between tags, Python's
literals) is turned into JSON: strings in pieces as they come, everything else once it is whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, NoReturn
from urllib.parse import unquote

from tokenflow.chat.message import MessageBuilder
from tokenflow.chat.source import BLANKS, Marks, Read, Sink, Source, gathered, nothing

ARGUMENTS = frozenset({"arguments", "parameters"})
"""What models call them."""
_BESIDE = frozenset({"name", "type", "id"})
"""What else a call has."""

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_MAX_REFERENCES = 32

# --- JSON -----------------------------------------------------------------------------------------------------------


def json_value(source: Source, sink: Sink) -> Read[bool]:
    """One JSON value, as it is written. False: there is none, or not whole. Only brackets and quotes are looked at."""
    edge, some = _Edge(), False
    while True:
        start = source.at
        end = edge.find(source.text, start)
        source.at = len(source.text) if end is None else end
        if source.at > start:
            some = True
            sink(source.text[start : source.at])
        if end is not None or source.ended:
            return some and end is not None
        yield


class _Edge:
    """Looks for the end of a JSON value, piece by piece."""

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str, start: int) -> int | None:
        """Where in this piece, from `start` on, the value has ended; None: it goes on."""
        for at in range(start, len(text)):
            char = text[at]
            if self._quoted:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == '"':
                    self._quoted = False
                    if not self._depth:
                        return at + 1
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1 + self._depth  # below 0 it is a bracket of what the value stands in
            elif not self._depth and (char == "," or char in BLANKS):
                return at
        return None


def json_text(source: Source) -> Read[str | None]:
    """A JSON string. None: it is none, or not whole."""
    if (yield from source.peek()) != '"':
        return None
    whole, text = yield from gathered(lambda sink: json_value(source, sink))
    if not whole:
        return None
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def json_call(source: Source, message: MessageBuilder, *, known: bool = False) -> Read[bool]:
    """`{"name": …, "arguments": {…}}`, keys in any order, others left out.

    Args:
        known: nothing says that it is a call but that it looks like one: of a tool that there is, and with no key that
            a call has not.

    Returns:
        Whether it was read to its closing brace. No call has begun where it turns out to be none.
    """
    if not (yield from source.take("{")):
        return False
    begun = said = False
    early: list[str] = []  # arguments that come before the name
    while True:
        yield from source.skip()
        key = yield from json_text(source)
        if known and not begun and key not in ARGUMENTS | _BESIDE:
            return False
        if key is None or not (yield from _colon(source)):
            return False
        if key == "name" and not begun:
            name = yield from json_text(source)
            if not name or (known and not message.knows(name)):
                return False
            begun = True
            message.call(name)
            for piece in early:
                message.arguments(piece)
            if said:
                message.call_ends()
        elif key in ARGUMENTS and not said:
            said = yield from json_arguments(source, message.arguments if begun else early.append)
            if begun and said:
                message.call_ends()
        else:
            yield from json_value(source, nothing)
        yield from source.skip()
        if not (yield from source.take(",")):
            break
    if not (yield from source.take("}")):
        return False
    if begun and not said:
        message.arguments("{}")
        message.call_ends()
    return begun


def _colon(source: Source) -> Read[bool]:
    yield from source.skip()
    found = yield from source.take(":")
    yield from source.skip()
    return found


def json_arguments(source: Source, sink: Sink) -> Read[bool]:
    """The value of `arguments`: an object as it is written, the text of a string that holds one, nothing as `{}`."""
    first = yield from source.peek()
    if first == '"':
        text = yield from json_text(source)
        if text is None:
            return False
        sink(text or "{}")
        return True
    if first == "n":
        sink("{}")
        return (yield from json_value(source, nothing))
    return (yield from json_value(source, sink))


def arguments_of(text: str) -> str:
    """The arguments that a whole text is: itself, the text of a JSON string, `{}` for none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text or "{}"
    if isinstance(value, str):
        return value or "{}"
    return "{}" if value is None else text


# --- text between tags ------------------------------------------------------------------------------------------------


def parameter_kinds(schema: object, name: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows for a parameter; none: it does not say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return kinds(properties.get(name), schema) if isinstance(properties, Mapping) else frozenset()


def kinds(schema: object, root: object = None) -> frozenset[str]:
    """The JSON types that a parameter's schema allows; none: it does not say.

    Args:
        schema: the parameter's.
        root: the schema that it stands in, which it may refer to.
    """
    return _kinds(schema, root, set())


def _kinds(schema: object, root: object, seen: set[str]) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset({said})
    if isinstance(said, list):
        return frozenset(kind for kind in said if isinstance(kind, str))
    if "const" in schema:
        return _kinds_of([schema["const"]])
    if isinstance(values := schema.get("enum"), list) and values:
        return _kinds_of(values)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            return frozenset().union(*(_kinds(option, root, seen) for option in options))
    if isinstance(parts := schema.get("allOf"), list):
        told = [some for part in parts if (some := _kinds(part, root, seen))]
        return frozenset.intersection(*told) if told else frozenset()
    reference = schema.get("$ref")
    # Each is followed once, for they may go in circles, and not many, for they may go on.
    if isinstance(reference, str) and reference not in seen and len(seen) < _MAX_REFERENCES:
        seen.add(reference)
        return _kinds(_referred(reference, root), root, seen)
    return frozenset()


def _kinds_of(values: list[Any]) -> frozenset[str]:
    return frozenset(_KINDS.get(type(value), "null") for value in values)


def _referred(reference: str, root: object) -> object:
    """What a reference within a schema refers to; None: nothing, or it is elsewhere."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def tagged_value(source: Source, end: Marks, allowed: frozenset[str], sink: Sink) -> Read[bool]:
    """Text up to its end tag, as JSON of one of the types that are allowed. False: the end came first."""
    if allowed == {"string"}:
        sink('"')
        mark = yield from source.until(end, lambda text: sink(encode_basestring(text)[1:-1]), within=True)
        if mark is not None:
            sink('"')
        return mark is not None
    mark, text = yield from gathered(lambda sink: source.until(end, sink))
    if mark is None:
        return False
    sink(_as_json(text, allowed))
    return True


def _as_json(text: str, allowed: frozenset[str]) -> str:
    """A value as a model wrote it, that may be JSON, a Python literal or just text."""
    value = literal(text.strip())
    kind = _KINDS.get(type(value), "null")
    fits = kind in allowed or not allowed or (kind == "integer" and "number" in allowed)
    return dumps(value if fits or "string" not in allowed else text)


def literal(text: str) -> Any:
    """JSON, a Python literal, or else the text itself."""
    for read in (_json, ast.literal_eval):
        try:
            value = read(text)
            dumps(value)
            return value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# --- Python's literals ------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[\w.-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_STRING = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}


def python_name(source: Source) -> Read[str]:
    """A name, dots included; empty: there is none."""
    return (yield from source.match(_NAME))


def python_arguments(source: Source, message: MessageBuilder) -> Read[bool]:
    """`a=1, b="x")` as the open call's arguments, its parenthesis read. False: it is something else, or not whole."""
    message.arguments("{")
    first = True
    while True:
        yield from source.skip()
        if (yield from source.take(")")):
            message.arguments("}")
            message.call_ends()
            return True
        name = yield from python_name(source)
        yield from source.skip()
        if not name or not (yield from source.take("=")):
            return False
        message.arguments(("" if first else ", ") + dumps(name) + ": ")
        first = False
        yield from source.skip()
        if not (yield from _python_value(source, message.arguments)):
            return False
        yield from source.skip()
        if not (yield from source.take(",")) and (yield from source.peek()) != ")":
            return False


def _python_value(source: Source, sink: Sink) -> Read[bool]:
    """A literal as JSON: a string as it comes, another once it is whole."""
    quote = yield from source.peek()
    if quote in ("'", '"'):
        for opening in (quote * 3, quote):
            if (yield from source.take(opening)):
                return (yield from _python_string(source, opening, sink))
            if source.stopped_in(opening):
                return False
    text = yield from _python_source(source)
    if text is None:
        return False
    sink(dumps(literal(text.strip())))
    return True


def _python_string(source: Source, closing: str, sink: Sink) -> Read[bool]:
    """A string's characters, from after its opening quote past its closing one."""
    sink('"')
    plain = _STRING[closing[0]]
    while True:
        found = plain.match(source.text, source.at)
        if found is not None:
            source.at = found.end()
            sink(encode_basestring(found[0])[1:-1])
        char = yield from source.peek()
        if (yield from source.take(closing)):
            sink('"')
            return True
        if not char or source.stopped_in(closing):
            return False
        if char == "\\":
            source.at += 1
            text = yield from _python_escape(source)
            if text is None:
                return False
            sink(encode_basestring(text)[1:-1])
        elif char == closing[0]:  # a quote within triple ones
            source.at += 1
            sink(encode_basestring(char)[1:-1])


def _python_escape(source: Source) -> Read[str | None]:
    """What stands after a backslash. None: the end came first."""
    char = yield from source.peek()
    if not char:
        return None
    source.at += 1
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char not in _CODES:
        return char if char in "\\'\"" else "\\" + char
    while len(source.text) - source.at < _CODES[char] and not source.ended:
        yield
    digits = source.text[source.at : source.at + _CODES[char]]
    if source.cut and len(digits) < _CODES[char]:
        return None
    try:
        text = chr(int(digits, 16))
        text.encode()
    except (ValueError, OverflowError):
        return "\\" + char
    source.at += len(digits)
    return text


def _python_source(source: Source) -> Read[str | None]:
    """The text of a value, up to the comma or parenthesis after it. None: the end came first."""
    pieces: list[str] = []
    depth, quote, escaped = 0, "", False
    while True:
        char = yield from source.peek()
        if not char:
            return None
        if quote:
            if escaped or char == "\\":
                escaped = not escaped
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif not depth and char in ",)":
            return "".join(pieces)
        elif char in ")]}":
            depth -= 1
        source.at += 1
        pieces.append(char)
