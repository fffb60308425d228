"""One table against its class: an instance, or everything that is wrong with it.

pydantic does the checking, over plain standard-library dataclasses and without touching them. The values go in as
JSON, because that is where its strict mode means what we mean: a list may become a tuple and a string a `Path`, since
JSON has no such things, but "8000" is no integer and true is no 1. Three matters it cannot do that way are done here:
unknown keys (it would need a setting on each class), dates (they would turn into strings), infinities.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tokenflow.config.keys import KeyPath, has
from tokenflow.config.raw import Raw
from tokenflow.config.shape import unknown
from tokenflow.config.words import Fault, sentence, unknown_key
from tokenflow.errors import PluginError

T = TypeVar("T")


def check_table(raw: Raw, path: KeyPath, value: object, cls: type[T], beside: Iterable[str] = ()) -> T | None:
    """An instance of `cls` from a table that was read; what is wrong is noted in `raw`.

    `beside`: keys that the table has as well, and that are read elsewhere.

    If something is wrong, the instance is made of the right keys only: it serves later checks and is never used to run.
    None if they do not suffice.
    """
    faults, instance = _check(value, cls)
    if _as_text(raw, path, value, faults):
        faults, instance = _check(value, cls)
    strange = list(unknown(cls, value))
    for below, known in strange:
        raw.problem((*path, *below), unknown_key(str(below[-1]), [*known, *beside] if len(below) == 1 else known))
    if faults:
        right = _without(value, faults)
        rules, instance = _check(right, cls)
        # Keys that were left out may be missed now, and that is no news; what the class says of the others is.
        faults += [fault for fault in rules if fault.kind == "value_error"]
        if instance is None:
            _, instance = _check(right, _without_rules(cls))
    by_key: dict[KeyPath, list[Fault]] = {}
    for fault in faults:
        by_key.setdefault((*path, *fault.path), []).append(fault)
    for key, together in by_key.items():
        raw.problem(key, sentence([fault._replace(key=key, outside=raw.outside(key)) for fault in together]))
    return instance


def _without(value: object, faults: list[Fault]) -> object:
    """A table without those of its keys that are at fault."""
    wrong = {fault.path[0] for fault in faults if fault.path}
    return {key: below for key, below in value.items() if key not in wrong} if isinstance(value, dict) else value


def _without_rules(cls: type[T]) -> type[T]:
    """The class, but for what it says of its keys together."""
    mute = type(cls.__name__, (cls,), {"__post_init__": lambda self: None, "__module__": cls.__module__})
    frozen: bool = vars(cls)["__dataclass_params__"].frozen
    return dataclass(frozen=frozen)(mute)


def adapter(cls: type[T]) -> TypeAdapter[T]:
    """pydantic's view of a class. Raises PluginError where it cannot make sense of it."""
    try:
        made = TypeAdapter(cls)
        made.rebuild(raise_errors=True)  # a type that does not exist would be noticed at first use otherwise
        return made
    except Exception as exc:  # the class is a plugin's: its annotations may raise anything
        reason = str(exc).partition("\n")[0]
        raise PluginError(
            f"the configuration class {cls.__module__}.{cls.__qualname__} cannot be used: {reason}"
        ) from exc


def _check(value: object, cls: type[T]) -> tuple[list[Fault], T | None]:
    strange = list(_beyond_json(value, cls))
    instance = None
    faults = []
    try:
        instance = adapter(cls).validate_json(json.dumps(value, default=lambda _: None), strict=True)
    except ValidationError as exc:
        errors: list[Any] = exc.errors(include_url=False)
        noted = [fault.path for fault in strange]
        faults = [fault for error in errors if (fault := _fault(error, value, cls)).path not in noted]
    return strange + faults, None if strange else instance


def _fault(error: Mapping[str, Any], value: object, cls: type) -> Fault:
    path = _key_path(error, value)
    return Fault(path, error["type"], error["input"], cls, error.get("ctx", {}), error["msg"])


def _key_path(error: Mapping[str, Any], value: Any) -> KeyPath:
    """pydantic's location without the steps that name a side of a union and so are no keys."""
    path: KeyPath = ()
    for step in error["loc"]:
        if has(value, step):
            value = value[step]
        elif error["type"] != "missing" or step != error["loc"][-1]:
            continue
        path = (*path, step)
    return path


def _as_text(raw: Raw, path: KeyPath, value: object, faults: list[Fault]) -> bool:
    """Put back the text of variables that read like numbers where a string is wanted: TOKENFLOW_SERVER__NAME=7."""
    mended = False
    for fault in faults:
        text = raw.texts.get((*path, *fault.path))
        if text is None or fault.kind not in ("string_type", "path_type", "date_or_time") or not fault.path:
            continue
        table: Any = value
        for step in fault.path[:-1]:
            table = table[step]
        mended = mended or table[fault.path[-1]] != text
        table[fault.path[-1]] = text
    return mended


def _beyond_json(value: object, cls: type, path: KeyPath = ()) -> Iterator[Fault]:
    kind = ""
    if isinstance(value, (datetime.date, datetime.time)):
        kind = "date_or_time"
    elif isinstance(value, float) and not math.isfinite(value):
        kind = "finite_number"
    if kind:
        yield Fault(path, kind, value, cls)
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in steps:
        yield from _beyond_json(below, cls, (*path, step))
