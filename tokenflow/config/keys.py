"""Key paths and values as people read and write them: dotted keys, TOML values, and what must never be shown."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import PurePath
from typing import TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
# `max_tokens` is no secret, `auth_token` is: only the last word of a key counts.
_SECRET = re.compile(r"(?:^|_)(?:key|secret|token|password|passphrase|credentials?)$", re.IGNORECASE)
_HASH = re.compile(r"(?:^|_)(?:sha256|hash|digest)$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_LONG = 60


def dotted(path: KeyPath) -> str:
    """`models."smol.lm".threads`, `auth.keys[0].name`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + (step if _BARE.fullmatch(step) else toml(step))
    return text


def parse_dotted(text: str) -> tuple[str, ...]:
    """The opposite, for keys given by hand. ValueError where it is none."""
    try:
        found: object = tomllib.loads(f"{text} = 0") if "\n" not in text else None
    except tomllib.TOMLDecodeError:
        raise ValueError(f"{text!r} is no dotted key") from None
    names: list[str] = []
    while isinstance(found, dict) and len(found) == 1:
        ((name, found),) = found.items()
        names.append(name)
    if found != 0:
        raise ValueError(f"{text!r} is no dotted key")
    return tuple(names)


def parse_value(text: str) -> object:
    """A TOML value, or a list or table in JSON, or else the text itself: so that nobody quotes quotes in a shell."""
    try:
        found = tomllib.loads(f"value = {text}")
        # A newline in the text could have smuggled in a second key.
        return found["value"] if len(found) == 1 else text
    except (ValueError, RecursionError):
        pass
    try:
        read = json.loads(text) if is_bracketed(text) else text
        json.dumps(read, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair, which is no text
    except (ValueError, RecursionError):
        return text
    return read


def is_bracketed(text: str) -> bool:
    """Whether it looks like a list or a table."""
    return text.lstrip().startswith(("[", "{"))


def has(value: object, step: str | int) -> bool:
    """Whether there is something under a key of a table, or at an index of a list."""
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, dict) and step in value


def toml(value: object) -> str:
    """A value as TOML writes it."""
    if value is None:
        return "null"  # JSON has it, in the environment
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, PurePath)):
        return _quoted(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return toml(sorted(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dotted((str(k),))} = {toml(v)}" for k, v in value.items()) + "}"
    return str(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else _escape(c) for c in escaped) + '"'


def _escape(character: str) -> str:
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return short.get(character) or f"\\U{ord(character):08x}"


def is_secret(path: KeyPath) -> bool:
    """Whether the value under this key must not appear anywhere. Decided by its name, so plugins get it for free."""
    names = [step for step in path if isinstance(step, str)]
    return bool(names) and _SECRET.search(names[-1]) is not None


def is_hash(path: KeyPath) -> bool:
    names = [step for step in path if isinstance(step, str)]
    return bool(names) and _HASH.search(names[-1]) is not None


def got(path: KeyPath, value: object) -> str:
    """A wrong value, for an error. Hashes are hidden too: a key pasted in a hash's place is still a key."""
    if isinstance(value, dict):
        return "a table"
    if is_secret(path) or is_hash(path):
        return f"{len(str(value))} characters"
    text = _USERINFO.sub("***", toml(value))
    return text if len(text) <= _LONG else text[:_LONG] + "…"


def shown(path: KeyPath, value: object) -> str:
    """A right value, for `config show`."""
    if is_secret(path) and value:
        return '"***"'
    if is_hash(path) and isinstance(value, str):
        return toml(value[:8] + "…")
    return "unset" if value is None else _USERINFO.sub("***", toml(value))
