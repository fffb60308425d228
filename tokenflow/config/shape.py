"""What a configuration class looks like: which tables and keys it has, seen through its type hints.

`Annotated`, `X | None`, lists and mappings are looked through, so that every question here is about plain classes.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

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


def default_of(cls: type, path: KeyPath) -> object:
    """The default of the key at a path below a class; MISSING if it has none."""
    hint: Any = cls
    for step in path[:-1]:
        hint = inside(hint, step)
    for table in tables(hint) if path and isinstance(path[-1], str) else []:
        if path[-1] in keys(table):
            return keys(table)[str(path[-1])].default
    return MISSING


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
