"""The locator against texts written by hand, and against any that Hypothesis can think of.

The oracle for generated texts: every number in them is unique, so the line on which a number stands in the text is the
line that its key must have; and the keys found must be exactly those that `tomllib` finds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.config.keys import KeyPath
from tokenflow.config.locate import locate

DOCUMENT = '''\
# server.port = 1
top = "]] # [no] = header"   # [neither]
a.b . "c.d" = 2
[server]
port = 8000
text = """
[not.a.header]
key = "value" \\""" still
"""
literal = \'\'\'
also = 'none'\'\'\'\'
list = [ # a comment, with ] and [table]
  "one",
  { x = 1, "y z" = [2,
    3] },

]
[[auth.keys]]
name = "a"
[auth.keys.more]
deep = true
[[auth.keys]]
name = "b"
[ models . "smol.lm" ]
'tr icky' = 1979-05-27 07:32:00
"quoted\\u0041" = inf
[deep.er]
[deep]
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("top",), 2),
        (("a", "b", "c.d"), 3),
        (("a", "b"), 3),
        (("server",), 4),
        (("server", "port"), 5),
        (("server", "text"), 6),
        (("server", "literal"), 10),
        (("server", "list"), 12),
        (("server", "list", 0), 13),
        (("server", "list", 1), 14),
        (("server", "list", 1, "x"), 14),
        (("server", "list", 1, "y z", 0), 14),
        (("server", "list", 1, "y z", 1), 15),
        (("auth", "keys"), 18),
        (("auth", "keys", 0), 18),
        (("auth", "keys", 0, "name"), 19),
        (("auth", "keys", 0, "more", "deep"), 21),
        (("auth", "keys", 1), 22),
        (("auth", "keys", 1, "name"), 23),
        (("models", "smol.lm"), 24),
        (("models", "smol.lm", "tr icky"), 25),
        (("models", "smol.lm", "quotedA"), 26),
        (("deep", "er"), 27),
        (("deep",), 28),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_of_each_key(path: KeyPath, line: int, newline: str) -> None:
    assert locate(DOCUMENT.replace("\n", newline))[path] == line


def test_exactly_the_keys_that_tomllib_finds() -> None:
    assert set(locate(DOCUMENT)) == {path for path, _ in walk(tomllib.loads(DOCUMENT))}


@pytest.mark.parametrize("text", ["", "\n", "# only a comment", "a=1"])
def test_texts_without_an_end_of_line(text: str) -> None:
    assert set(locate(text)) == {path for path, _ in walk(tomllib.loads(text))}


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if path:
        yield path, value
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in steps:
        yield from walk(below, (*path, step))


# --- any text -------------------------------------------------------------------------------------------------------

# Texts made of all that could confuse: quotes, brackets, comment signs, backslashes, things that look like lines.
CONFUSING = st.text(alphabet=st.sampled_from("ab \"'[]{}#=,.\\\nä"), max_size=12)
BLANKS = st.sampled_from(["", " ", "\t"])
COMMENTS = st.builds("# {}".format, CONFUSING.map(lambda text: text.replace("\n", " ")))


class Writer:
    """Writes one random document. Numbers count up, so each is unique; keys do too, so none is a duplicate."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.count = 1_000_000

    def number(self) -> str:
        self.count += 1
        return str(self.count)

    def key(self) -> str:
        self.count += 1
        name = f"k{self.count}"
        style = self.draw(st.sampled_from(["bare", "basic", "literal"]))
        noise = self.draw(CONFUSING).replace("\n", "")
        if style == "basic":
            return '"' + escaped(name + noise) + '"'
        return f"'{name}{noise.replace(chr(39), '')}'" if style == "literal" else name

    def dotted(self) -> str:
        blank = self.draw(BLANKS)
        return f"{blank}.{blank}".join(self.key() for _ in range(self.draw(st.integers(1, 3))))

    def value(self, depth: int) -> str:
        kinds = ["number", "string"] + (["array", "table"] if depth else [])
        match self.draw(st.sampled_from(kinds)):
            case "string":
                return self.string()
            case "array":
                items = [self.value(depth - 1) for _ in range(self.draw(st.integers(0, 3)))]
                return "[" + self.gap() + "".join(f"{item}{self.gap()},{self.gap()}" for item in items) + "]"
            case "table":
                return "{" + ", ".join(self.pair(depth - 1) for _ in range(self.draw(st.integers(0, 3)))) + "}"
        return self.number()

    def string(self) -> str:
        text = self.draw(CONFUSING)
        match self.draw(st.sampled_from(["basic", "literal", "long basic", "long literal"])):
            case "basic":
                return f'"{escaped(text)}"'
            case "literal":
                return "'" + text.replace("'", "").replace("\n", "") + "'"
            case "long basic":
                quotes = self.draw(st.sampled_from(["", '"', '""']))  # these belong to the text
                return '"""' + escaped(text).replace("\\n", "\n").replace('\\"', '\\"') + quotes + '"""'
        return "'''" + text.replace("'", "") + self.draw(st.sampled_from(["", "'", "''"])) + "'''"

    def pair(self, depth: int) -> str:
        return f"{self.dotted()}{self.draw(BLANKS)}={self.draw(BLANKS)}{self.value(depth)}"

    def gap(self) -> str:
        """Between the items of an array there may be lines and comments."""
        return self.draw(st.sampled_from(["", " ", "\n"])) + self.draw(
            st.one_of(st.just(""), COMMENTS.map("{}\n".format))
        )

    def lines(self, depth: int) -> list[str]:
        lines = [
            self.pair(depth) + self.draw(st.one_of(st.just(""), COMMENTS)) for _ in range(self.draw(st.integers(0, 3)))
        ]
        return [*lines, self.draw(st.one_of(st.just(""), COMMENTS))]

    def document(self) -> str:
        lines = self.lines(2)
        for _ in range(self.draw(st.integers(0, 3))):
            name = self.dotted()
            if self.draw(st.booleans()):
                lines += [f"[{name}]", *self.lines(2)]
                continue
            for _ in range(self.draw(st.integers(1, 3))):
                lines += [f"[[ {name} ]]", *self.lines(1), f"[{name}.{self.key()}]", *self.lines(1)]
        return "\n".join(lines)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@st.composite
def documents(draw: Any) -> str:
    return Writer(draw).document()


@given(documents())
def test_any_document(text: str) -> None:
    found = locate(text)
    values = dict(walk(tomllib.loads(text)))
    assert set(found) == set(values)
    for path, value in values.items():
        if type(value) is int:
            assert found[path] == text.count("\n", 0, text.index(str(value))) + 1, path
