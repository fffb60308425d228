"""The first half of loading: file, environment and flags laid over each other, and where each key came from.

Nothing is known here of which keys exist or what they mean; `load` checks that. What is kept beside the values is a
`Source` for each key, so that every later complaint can point to the line, the variable or the flag to change.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokenflow.config.keys import KeyPath, dotted, parse_dotted, parse_value
from tokenflow.config.locate import locate
from tokenflow.config.words import assigned
from tokenflow.errors import ConfigError

PREFIX = "TOKENFLOW_"
_LAST = 2**31


class Flag(NamedTuple):
    """A value given on the command line, and by which flag: `Flag("--port", 8000)`."""

    name: str
    value: object


class Source(NamedTuple):
    """Where a value was written. Sorts by line, in a file; what came from elsewhere follows."""

    text: str
    line: int = _LAST


@dataclass
class Raw:
    """What was written, unchecked."""

    name: str
    """What to call the whole: the file's path as given."""
    folder: Path
    """What relative paths are relative to."""
    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[KeyPath, Source] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)
    """Values given as text outside the file, as they were before they were read as TOML."""
    problems: list[tuple[Source, str]] = field(default_factory=list)
    wrong: set[KeyPath] = field(default_factory=set)
    """Keys that have a problem."""

    def source(self, path: KeyPath) -> Source:
        """Where a key was written; of a table that only variables made, one of them; else what it is missing from."""
        inside = [source for known, source in self.sources.items() if known[: len(path)] == path]
        if path not in self.sources and inside:
            return min(inside)
        for length in range(len(path), 0, -1):
            if found := self.sources.get(path[:length]):
                return found
        return Source(self.name, 0)

    def problem(self, path: KeyPath, text: str) -> None:
        """Note what is wrong with a key."""
        key = f"{dotted(path)}: " if path else ""
        self.problems.append((self.source(path), f"{key}{text}"))
        self.wrong.add(path)

    def is_wrong(self, path: KeyPath) -> bool:
        """Whether a key, or something under it, has a problem: then there is a default in its place."""
        return any(known[: len(path)] == path for known in self.wrong)

    def put(self, path: KeyPath, value: object, source: Source) -> None:
        """Lay a value over what there is."""
        table: Any = self.data
        for depth, name in enumerate(path[:-1], 1):
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                name = dotted(path[:depth])
                whole = _whole(source, path[:depth])
                example = f": {assigned(whole, '[…]' if isinstance(table, list) else '…')}" if whole else ""
                self.problems.append((source, f"{dotted(path)}: {name} is no table; give it as a whole{example}"))
                return
        table[path[-1]] = value
        for known in [known for known in self.sources if known[: len(path)] == path]:
            del self.sources[known]
        self.sources[path] = source

    def put_text(self, path: KeyPath, text: str, source: Source) -> None:
        """Lay over a value that came as text."""
        value = parse_value(text)
        self.put(path, value, source)
        self.texts[path] = text

    def outside(self, path: KeyPath) -> str:
        """Where to give a key as a whole, if it, or what is under it, was given as text; empty: in the file."""
        given = any(known[: len(path)] == path for known in self.texts)
        return _whole(self.source(path), path) if given else ""

    def raise_problems(self) -> None:
        if self.problems:
            raise ConfigError([f"{source.text}: {text}" for source, text in sorted(self.problems, key=_line)])


def _whole(source: Source, path: KeyPath) -> str:
    """The variable of a key, or its flag, as `source` is one; empty in a file."""
    if source.line != _LAST:
        return ""
    if source.text.startswith("environment "):
        return PREFIX + "__".join(_variable_name(str(step)) for step in path)
    return f"--set {dotted(path)}"


def _line(problem: tuple[Source, str]) -> int:
    return problem[0].line


def read(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, object]) -> Raw:
    """Read all three. Raises ConfigError where the file cannot be read at all."""
    raw = _read_file(path) if path is not None else Raw(name="configuration", folder=Path())
    for name in sorted(env):
        if name.startswith(PREFIX) and "__" in name:
            _put_variable(raw, name, env[name])
    for key, value in overrides.items():
        _put_override(raw, key, value)
    return raw


# --- file -----------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> Raw:
    try:
        # Some editors put a byte order mark in front, which tomllib takes for a key.
        text = path.read_bytes().decode("utf-8-sig")
        data = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file; write one with `tokenflow config template > {path}`"]) from None
    except OSError as exc:
        raise ConfigError([f"{path}: cannot be read: {exc.strerror}; name a readable file with -c"]) from exc
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        raise ConfigError([f"{path}:{line}: byte {exc.object[exc.start]:#x} is not UTF-8; save it as UTF-8"]) from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError([_syntax_problem(path, str(exc), text)]) from exc
    except ValueError:
        raise ConfigError([f"{path}: a number in it has thousands of digits; shorten it"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: it is nested too deeply to be read; mend its brackets"]) from None
    sources = {key: Source(f"{path}:{line}", line) for key, line in locate(text).items()}
    return Raw(name=str(path), folder=path.parent, data=data, sources=sources)


def _syntax_problem(path: Path, message: str, text: str) -> str:
    # Before Python 3.14 tomllib tells the place in its message only: "Invalid value (at line 2, column 8)".
    what, _, place = message.partition(" (at ")
    found = re.search(r"line (\d+), column (\d+)", place)
    line = int(found[1]) if found else max(len(text.splitlines()), 1)
    column = f" at column {found[2]}" if found else " at the end"
    return f"{path}:{line}: no valid TOML: {what[:1].lower()}{what[1:]}{column}; {_way_out(what)}"


def _way_out(what: str) -> str:
    if what.startswith("Invalid value"):
        return 'texts stand in quotes: key = "text"'
    if what.startswith("Cannot"):
        return "keep one of the two"
    return "a line is `key = value`, `[table]` or `# comment`"


# --- environment and flags ------------------------------------------------------------------------------------------


def _put_variable(raw: Raw, name: str, text: str) -> None:
    source = Source(f"environment {name}")
    path = _variable_path(raw.data, name.removeprefix(PREFIX).split("__"))
    if _is_text(text):
        raw.put_text(path, text, source)
    else:
        raw.problems.append((source, f"{dotted(path)}: the value is not UTF-8; set it as UTF-8"))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # os.environ keeps undecodable bytes as surrogates (PEP 383)
        return False
    return True


def _variable_path(data: object, parts: Iterable[str]) -> tuple[str, ...]:
    """Keys of a variable: an existing key that reads the same (`my-model` for MY_MODEL), else in lower case."""
    path: list[str] = []
    for part in parts:
        known = data if isinstance(data, dict) else {}
        key = next((key for key in known if _variable_name(key) == part.upper()), part.lower())
        path.append(key)
        data = known.get(key)
    return tuple(path)


def _variable_name(key: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", key.upper())


def _put_override(raw: Raw, key: str, value: object) -> None:
    flag = value if isinstance(value, Flag) else Flag(f"--set {key}", value)
    source = Source(flag.name)
    try:
        path = parse_dotted(key)
    except ValueError:
        raw.problems.append((source, f"{key!r} is no key; write it like server.port"))
        return
    if isinstance(flag.value, str):
        raw.put_text(path, flag.value, source)
    else:
        raw.put(path, flag.value, source)
