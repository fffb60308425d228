"""What a configuration class looks like: which tables and keys it has, seen through its type hints.

`Annotated`, `X | None`, lists and mappings are looked through, so that every question here is about plain classes.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from tokenflow.config.docs import field_docs
from tokenflow.config.keys import KeyPath


class Key(NamedTuple):
    """One key of a table."""

    name: str
    hint: Any
    default: object
    """MISSING: it must be given."""


@lru_cache(maxsize=256)
def keys(cls: type) -> dict[str, Key]:
    """The keys of a table, in order, by name."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: Key(f.name, hints[f.name], _default(f)) for f in fields(cls) if f.init}


def _default(field: Any) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def alternatives(hint: Any) -> list[Any]:
    """A hint without `Annotated`, one for each side of a union."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [plain for side in get_args(hint) for plain in alternatives(side)]
    return [hint]


def tables(hint: Any) -> list[type]:
    """The classes that a table under this hint may become."""
    return [plain for plain in alternatives(hint) if isinstance(plain, type) and is_dataclass(plain)]


def inside(hint: Any, step: str | int) -> Any:
    """The hint of what lies under a key or at an index; None where that is not known."""
    for plain in alternatives(hint):
        arguments = get_args(plain)
        if isinstance(step, str):
            if isinstance(plain, type) and is_dataclass(plain) and step in keys(plain):
                return keys(plain)[step].hint
            if _is(plain, Mapping) and len(arguments) == 2:
                return arguments[1]
        elif arguments and not _is(plain, Mapping):
            return arguments[min(step, len(arguments) - 1)] if arguments[-1] is not Ellipsis else arguments[0]
    return None


def _is(hint: Any, base: type) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, base)


def at(cls: type, path: KeyPath) -> Any:
    """The hint of what lies at a path below a class; None where that is not known."""
    hint: Any = cls
    for step in path:
        hint = inside(hint, step)
    return hint


def default_of(cls: type, path: KeyPath) -> object:
    """The default of the key at a path below a class; MISSING if it has none."""
    return next((keys(table)[name].default for table, name in _owners(cls, path)), MISSING)


def help_of(cls: type, path: KeyPath) -> str:
    """Its help."""
    return next((field_docs(table).get(name, "") for table, name in _owners(cls, path)), "")


def _owners(cls: type, path: KeyPath) -> Iterator[tuple[type, str]]:
    """The classes that have the key at a path, and its name in them."""
    match path:
        case (*above, str(name)):
            yield from ((table, name) for table in tables(at(cls, tuple(above))) if name in keys(table))


def bounds(hint: Any) -> dict[str, Any]:
    """What `Annotated` says of a number: `ge`, `gt`, `le`, `lt`."""
    found: dict[str, Any] = {}
    if get_origin(hint) in (Union, types.UnionType):
        for side in get_args(hint):
            found |= bounds(side)
    elif get_origin(hint) is Annotated:
        inner, *said = get_args(hint)
        found = bounds(inner)
        for one, name in itertools.product(said, ("ge", "gt", "le", "lt")):
            if (bound := getattr(one, name, None)) is not None:
                found[name] = bound
    return found


def like(hint: Any) -> str:
    """What a value may look like, in TOML: of a table, the keys that it must have."""
    for plain in alternatives(hint):
        if isinstance(plain, type) and is_dataclass(plain):
            known = list(keys(plain).values())
            needed = [key for key in known if key.default is MISSING] or known[:1]
            return "{" + ", ".join(f"{key.name} = {like(key.hint)}" for key in needed) + "}"
        if _is(plain, Mapping):
            return "{key = " + like(inside(plain, "key")) + "}"
        if get_origin(plain) in (tuple, list, set, frozenset):
            return f"[{like(inside(plain, 0))}]"
        if plain in _LIKE:
            return _LIKE[plain]
    return "…"


_LIKE: dict[Any, str] = {str: '"…"', Path: '"…"', int: "1", float: "1.0", bool: "true"}


def unknown(hint: Any, value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, list[str]]]:
    """Keys in a value that the classes of its hint do not have, each with those that they do."""
    classes = tables(hint)
    known = [name for cls in classes for name in keys(cls)]
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in steps:
        if classes and isinstance(value, dict) and step not in known:
            yield (*path, step), known
        else:
            yield from unknown(inside(hint, step), below, (*path, step))
