"""A configuration file to start from: every key with its default and its help, written from the classes.

A key that has no default is there too, switched off: `#max_tokens = <integer>`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tokenflow.config.docs import field_docs, summary
from tokenflow.config.keys import dotted, toml
from tokenflow.config.load import SECTIONS
from tokenflow.config.model import MODEL_TABLES, ModelConfig
from tokenflow.config.shape import Key, alternatives, inside, keys, tables

_HEAD = """\
# Every key with its default and its help: `tokenflow config template` writes this file. Delete what you do not change.
# The environment outranks this file (TOKENFLOW_SERVER__PORT=9000), and flags outrank the environment (--port 9000).
# Values are written there as here, but texts need no quotes, and lists and tables may be JSON.
# What holds, and where from: `tokenflow config show`.
"""
_WIDTH = 118
_PLACEHOLDERS = {int: "<integer>", float: "<number>", bool: "<true or false>", str: '"<text>"', Path: '"<path>"'}


def template(models: Mapping[str, tuple[str, type]], sinks: Mapping[str, type]) -> str:
    """The text of a file.

    Args:
        models: by the id that clients use: the engine's name and its configuration class.
        sinks: by name: the configuration class.
    """
    parts = [_HEAD]
    parts += [_table((name,), cls) for name, cls in SECTIONS.items()]
    for name, (engine, cls) in models.items():
        first = [*_comment(field_docs(ModelConfig)["engine"]), f"engine = {toml(engine)}"]
        parts += [_table(("models", name), cls, first)]
        parts += [_table(("models", name, table), below) for table, below in MODEL_TABLES.items()]
    parts += [_table(("sinks", name), cls) for name, cls in sinks.items()]
    return "\n".join(parts)


def _table(path: tuple[str, ...], cls: type, first: list[str] | None = None) -> str:
    lines = [*_comment(summary(cls)), f"[{dotted(path)}]", *(first or [])]
    help = field_docs(cls)
    for key in keys(cls).values():
        lines += _key(path, key, help.get(key.name, ""))
    return "".join(f"{line}\n" for line in lines)


def _key(path: tuple[str, ...], key: Key, help: str) -> Iterator[str]:
    yield from _comment(help)
    rows = tables(inside(key.hint, 0))
    if rows and key.default == ():
        # An empty list would have to be deleted before a first table could be added.
        yield f"#[[{dotted((*path, key.name))}]]"
        for inner in keys(rows[0]).values():
            yield from _comment(field_docs(rows[0]).get(inner.name, ""))
            yield f"#{inner.name} = {_placeholder(inner.hint)}"
    elif key.default is MISSING or key.default is None:
        yield f"#{key.name} = {_placeholder(key.hint)}"
    else:
        yield f"{key.name} = {toml(key.default)}"


def _placeholder(hint: Any) -> str:
    for plain in alternatives(hint):
        if get_origin(plain) is Literal:
            return toml(get_args(plain)[0])
        if isinstance(plain, type) and plain in _PLACEHOLDERS:
            return _PLACEHOLDERS[plain]
    return "<value>"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
