"""On which line each key of a TOML text stands.

`tomllib` gives values and forgets their places. This is a second, much simpler pass over a text that `tomllib` has
accepted already: since the text is valid, the pass needs no error handling, only enough of the grammar to tell keys
from everything that may hide something key-like (strings, comments, nested values). It is a cursor over the text: a
header moves the current table, a key is noted with its line, a value is skipped and noted inside if it is a container.

TOML 1.0, https://toml.io/en/v1.0.0; newlines inside inline tables, which 1.1 allows, are accepted too.
"""

from __future__ import annotations

import re
import tomllib

from tokenflow.config.keys import KeyPath

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_QUOTED_KEY = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
# A multi-line string ends at the first unescaped triple, but up to two quotes more may belong to its text.
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


def locate(text: str) -> dict[KeyPath, int]:
    """Line numbers, from 1, of all keys, tables and list items of a valid TOML text."""
    return _Locator(text.replace("\r\n", "\n")).run()


class _Locator:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.line_at = 0
        """Where `line` was counted: lines are counted forward from here, so that the whole pass stays linear."""
        self.lines: dict[KeyPath, int] = {}
        self.lengths: dict[KeyPath, int] = {}
        """Of arrays of tables: how many `[[headers]]` each has had."""

    def run(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip_blank():
            if self._peek("["):
                table = self._header()
            else:
                self._pair(table)
        return self.lines

    # --- tables -------------------------------------------------------------------------------------------------

    def _header(self) -> KeyPath:
        line = self._line()
        opening = "[[" if self._peek("[[") else "["
        self._take(opening)
        names = self._key()
        self._take("]" * len(opening))
        *outer, last = names
        path = (*self._descend(outer, line), last)
        if opening == "[[":
            self._note(path, line)
            self.lengths[path] = self.lengths.get(path, 0) + 1
        path = self._current(path)
        # A header outranks the implicit mention of its table in an earlier [table.child].
        self.lines[path] = line
        return path

    def _descend(self, names: list[str], line: int) -> KeyPath:
        path: KeyPath = ()
        for name in names:
            path = self._current((*path, name))
            self._note(path, line)
        return path

    def _current(self, path: KeyPath) -> KeyPath:
        """For an array of tables, its latest table; for anything else, itself."""
        length = self.lengths.get(path)
        return path if length is None else (*path, length - 1)

    # --- keys and values ----------------------------------------------------------------------------------------

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for name in self._key():
            path = (*path, name)
            self._note(path, line)
        self._skip_blank()
        self._take("=")
        self._skip_blank()
        self._value(path)

    def _key(self) -> list[str]:
        names = [self._name()]
        while dot := _DOT.match(self.text, self.at):
            self.at = dot.end()
            names.append(self._name())
        return names

    def _name(self) -> str:
        self._skip_blank()
        if quoted := _QUOTED_KEY.match(self.text, self.at):
            self.at = quoted.end()
            # tomllib knows the escapes.
            (name,) = tomllib.loads(f"{quoted[0]} = 0")
            return str(name)
        return self._match(_BARE_KEY)

    def _value(self, path: KeyPath) -> None:
        if self._peek("["):
            self._array(path)
        elif self._peek("{"):
            self._inline_table(path)
        elif string := _STRING.match(self.text, self.at):
            self.at = string.end()
        else:
            self._match(_SCALAR)

    def _array(self, path: KeyPath) -> None:
        self._take("[")
        index = 0
        while self._skip_blank() and not self._peek("]"):
            item = (*path, index)
            self._note(item, self._line())
            self._value(item)
            index += 1
            self._skip_comma()
        self._take("]")

    def _inline_table(self, path: KeyPath) -> None:
        self._take("{")
        while self._skip_blank() and not self._peek("}"):
            self._pair(path)
            self._skip_comma()
        self._take("}")

    # --- the cursor ---------------------------------------------------------------------------------------------

    def _note(self, path: KeyPath, line: int) -> None:
        self.lines.setdefault(path, line)

    def _line(self) -> int:
        self.line += self.text.count("\n", self.line_at, self.at)
        self.line_at = self.at
        return self.line

    def _peek(self, literal: str) -> bool:
        return self.text.startswith(literal, self.at)

    def _take(self, literal: str) -> None:
        self._skip_blank()
        assert self._peek(literal), f"expected {literal} at {self.at}"
        self.at += len(literal)

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        assert found is not None, f"expected {pattern.pattern} at {self.at}"
        self.at = found.end()
        return found[0]

    def _skip_blank(self) -> bool:
        """Past blanks, newlines and comments; False at the end of the text."""
        blank = _BLANK.match(self.text, self.at)
        assert blank is not None
        self.at = blank.end()
        return self.at < len(self.text)

    def _skip_comma(self) -> None:
        self._skip_blank()
        if self._peek(","):
            self.at += 1
