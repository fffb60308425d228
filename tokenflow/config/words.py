"""Validation errors in words for people: what was expected, and the way out.

pydantic names each kind of error; a table maps the kinds to our words. Kinds that are not in it keep pydantic's own
sentence, so that a new one is clumsy at worst, never lost.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from typing import Any, NamedTuple

from tokenflow.config.keys import KeyPath, dotted, got, is_bracketed, is_secret, toml
from tokenflow.config.shape import at, bounds, default_of, help_of, inside, like, tables

HOST_PATTERN = r"^[A-Za-z0-9.-]+$"
ORIGIN_PATTERN = r"^(\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s]+)$"
NAME_PATTERN = r"^[A-Za-z0-9_]+$"
SHA256_PATTERN = r"^[0-9A-Fa-f]{64}$"


class Fault(NamedTuple):
    """One error on its way into words."""

    path: KeyPath
    """Below `cls`."""
    kind: str
    value: object
    cls: type
    """Of the table that it is in."""
    context: Mapping[str, Any] = {}
    message: str = ""
    key: KeyPath = ()
    """The whole path."""
    outside: str = ""
    """The variable or flag to give it as a whole, if it is not in the file."""

    @property
    def default(self) -> object:
        return default_of(self.cls, self.path)

    @property
    def hint(self) -> Any:
        return at(self.cls, self.path)


class Words(NamedTuple):
    expected: str
    way_out: str


def sentence(faults: list[Fault]) -> str:
    """One sentence for all that is wrong with one key: more than one fault where it may be this or that."""
    first = faults[0]
    if first.kind == "missing":
        return _missing(first)
    if first.kind == "value_error":
        return str(first.context.get("error", first.message))
    words = [_words(fault) for fault in faults]
    expected = " or ".join(dict.fromkeys(word.expected for word in words))
    return f"expected {expected}, got {got(first.path, first.value)}; {words[0].way_out}"


def unknown_key(name: str, known: list[str]) -> str:
    """`unknown key`, with what may have been meant."""
    if close := difflib.get_close_matches(name, known, n=1):
        return f"unknown key; did you mean {close[0]}?"
    return "unknown key; " + (f"there is {', '.join(sorted(known))}" if known else "leave it out")


def _missing(fault: Fault) -> str:
    if fault.path and isinstance(fault.path[-1], str):
        return f"missing; add `{fault.path[-1]} = …`"
    return "too few items; add what is missing"


def _words(fault: Fault) -> Words:
    write = _KINDS.get(fault.kind)
    if write is None:
        message = fault.message.removeprefix("Input should be ")
        return Words(message[:1].lower() + message[1:], _example(fault, "change it"))
    return write(fault)


def _example(fault: Fault, otherwise: str) -> str:
    default = fault.default
    if default is MISSING or default is None or default == () or is_secret(fault.path):
        return otherwise
    return f"write {_kind_of(default)} like {toml(default)}"


def _kind_of(value: object) -> str:
    if isinstance(value, (int, float)):
        return "a number"
    return "a text" if isinstance(value, str) else "something"


def _integer(fault: Fault) -> Words:
    return Words("an integer", _unquoted(fault, int) or _example(fault, _within(fault, "like 1")))


def _number(fault: Fault) -> Words:
    return Words("a number", _unquoted(fault, float) or _example(fault, _within(fault, "like 1.5")))


def _finite(fault: Fault) -> Words:
    bounded = bounds(fault.hint).keys() & {"le", "lt"}
    return Words("a finite number", _example(fault, _within(fault, "") if bounded else "write a large one"))


def _within(fault: Fault, otherwise: str) -> str:
    """Which numbers are right, and one of them; where there is none to show, what the key is for."""
    limits = {**fault.context, **bounds(fault.hint)}
    span = _span(limits) or otherwise
    if isinstance(fault.default, (int, float)):
        return f"write a number {span}" + (f", like {toml(fault.default)}" if fault.default != limits.get("ge") else "")
    help = help_of(fault.cls, fault.path).rstrip(".")
    return f"write a number {span}" + (f" ({help})" if help else "")


def _span(bounds: Mapping[str, Any]) -> str:
    ge, gt, le, lt = (_plain(bounds.get(name)) for name in ("ge", "gt", "le", "lt"))
    if ge is not None and le is not None:
        return f"from {ge} to {le}"
    low = f"above {gt}" if gt is not None else f"from {ge} on" if ge is not None else ""
    high = f"below {lt}" if lt is not None else f"up to {le}" if le is not None else ""
    return " and ".join(filter(None, (low, high)))


def _plain(bound: Any) -> Any:
    """pydantic hands bounds of float fields over as floats: "above 0", not "above 0.0"."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _unquoted(fault: Fault, number: Callable[[str], object]) -> str:
    """`"8000"` needs no example, it needs no quotes."""
    try:
        return f"write {number(fault.value)} without quotes" if isinstance(fault.value, str) else ""
    except ValueError:
        return ""


def _string(fault: Fault) -> Words:
    simple = isinstance(fault.value, (int, float)) and not is_secret(fault.path)
    return Words(
        "a string", f"write it in quotes: {toml(toml(fault.value))}" if simple else 'write one in quotes: "text"'
    )


def _list(fault: Fault) -> Words:
    rows = tables(inside(fault.hint, 0))
    text = isinstance(fault.value, str) and is_bracketed(fault.value)
    if rows and isinstance(fault.value, dict) and not fault.outside:
        way_out = f"write [[{dotted(fault.key)}]] above each of its tables"
    elif rows or text or isinstance(fault.value, dict) or is_secret(fault.path):
        way_out = _whole(fault, "write one in brackets")
    else:
        way_out = f"write it in brackets: [{toml(fault.value)}]"
    return Words("a list", way_out)


def _table(fault: Fault) -> Words:
    in_a_list = bool(fault.path) and isinstance(fault.path[-1], int)
    if fault.outside or in_a_list:
        return Words("a table", _whole(fault, "write one in braces"))
    return Words("a table", "write `key = value` lines under its [header]")


def _whole(fault: Fault, inside: str) -> str:
    """How to write a list or a table on one line."""
    example = like(fault.hint)
    if not fault.outside:
        return f"{inside}: {example}"
    broken = "it is neither TOML nor JSON; " if isinstance(fault.value, str) and is_bracketed(fault.value) else ""
    return f"{broken}write it as a whole, as TOML or JSON: {assigned(fault.outside, example)}"


def assigned(outside: str, example: str) -> str:
    """`NAME='…'`, or `--set 'key=…'`, as a shell takes it."""
    flag, blank, key = outside.rpartition(" ")
    return f"{flag} '{key}={example}'" if blank else f"{key}='{example}'"


def _bound(text: str, key: str, unit: str = "") -> Callable[[Fault], Words]:
    def write(fault: Fault) -> Words:
        expected = f"{text} {_plain(fault.context[key])}{unit}"
        return Words(expected, _example(fault, f"write {expected}") if unit else _within(fault, ""))

    return write


def _pattern(fault: Fault) -> Words:
    pattern = fault.context["pattern"]
    if pattern == SHA256_PATTERN:
        return Words("64 hex digits", _hash(str(fault.value)))
    if pattern == NAME_PATTERN:
        return Words("letters, digits and _ only", _example(fault, "leave out the rest"))
    if pattern == HOST_PATTERN:
        return Words("a host's name", "write it without scheme, port and path: models.example.org")
    if pattern == ORIGIN_PATTERN:
        return Words("an origin", "write it as browsers do, without a path: https://chat.example.org")
    return Words(f"a text that matches {pattern}", _example(fault, "change it"))


def _hash(text: str) -> str:
    if re.fullmatch(f"{SHA256_PATTERN[1:-1]}\\s.*", text, re.DOTALL):
        return "leave out what sha256sum writes after them"
    return 'make them with: printf %s "$KEY" | sha256sum'


def _choice(fault: Fault) -> Words:
    return Words(f"one of {fault.context['expected'].replace(chr(39), chr(34))}", _example(fault, "write one of them"))


_KINDS: dict[str, Callable[[Fault], Words]] = {
    "int_type": _integer,
    "int_from_float": _integer,
    "float_type": _number,
    "bool_type": lambda _: Words("true or false", "write true or false, without quotes"),
    "string_type": _string,
    "path_type": _string,
    "tuple_type": _list,
    "list_type": _list,
    "set_type": _list,
    "frozen_set_type": _list,
    "dict_type": _table,
    "mapping_type": _table,
    "dataclass_type": _table,
    "greater_than": _bound("a number above", "gt"),
    "greater_than_equal": _bound("at least", "ge"),
    "less_than": _bound("a number below", "lt"),
    "less_than_equal": _bound("at most", "le"),
    "too_short": _bound("at least", "min_length", " items"),
    "too_long": _bound("at most", "max_length", " items"),
    "string_too_short": _bound("at least", "min_length", " characters"),
    "string_too_long": _bound("at most", "max_length", " characters"),
    "string_pattern_mismatch": _pattern,
    "literal_error": _choice,
    "enum": _choice,
    "date_or_time": lambda fault: Words("no date", f"write it in quotes: {toml(str(fault.value))}"),
    "finite_number": _finite,
}
