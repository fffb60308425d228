"""A process that compiles grammars before the server does: what goes wrong with one ends this process and no other.

llguidance bounds most of what a grammar can cost, but not all: a schema of a hundred characters can take minutes, or
gigabytes, and a long chain of references ends the process. So the server has every grammar compiled here first, where
that costs nothing but time, and kills this process when the time is up.

Run by its path, with nothing imported but llguidance. Each message on stdin and stdout is its length (4 bytes, big
endian), then a value in `marshal`'s format: `LLTokenizer`'s arguments once, then (kind, source, seconds) for each
grammar, answered by (grammar for llguidance, "", "") or (None, what is wrong, where: a path into a JSON schema).
"""

from __future__ import annotations

import json
import marshal
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

STACK_BYTES = 1 << 20
"""Far less than threads have by default: what recurses too deeply for the server must not get through here."""
MEMORY_BYTES = 2 << 30
MAX_ITEMS_IN_ROW = 10_000
"""Ways to go on at one place, by default 2,000: 1,500 optional properties need 6,000, and up to 24 ms for a token."""
MAX_ITEMS = 250_000
"""Of these all together in one step, by default 50,000; llguidance takes 20,000 of them a millisecond."""
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
"""Between JSON's parts. Without a bound, a small model that likes newlines writes nothing else."""


class Tokenizer:
    """What `LLTokenizer` asks for: a vocabulary and a way to tokenize."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: list[int], specials: list[int], tokenize: Any) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]
        self.special_token_ids = specials
        self._tokenize = tokenize

    def __call__(self, text: str | bytes) -> list[int]:
        found: list[int] = self._tokenize(text if isinstance(text, str) else str(text, "utf-8", "replace"))
        return found


def make_tokenizer(tokens: list[bytes], ends: list[int], specials: list[int], tokenize: Any = None) -> Any:
    """An `LLTokenizer`; without `tokenize` one that knows the tokens' texts alone. Takes some tenths of a second."""
    from llguidance import LLTokenizer

    def greedy(text: str) -> list[int]:
        found: list[int] = made.greedy_tokenize(text)
        return found

    # A slice is a set of tokens that is looked at as a whole, which makes masks quick; this one is JSON's plain text.
    vocabulary: Any = Tokenizer(tokens, ends, specials, tokenize or greedy)
    made: Any = LLTokenizer(vocabulary, eos_token=ends, slices=LLTokenizer.json_slices()[-1:])
    return made


def make_matcher(tokenizer: Any, grammar: str) -> Any:
    """An `LLMatcher`, in an error state if something is wrong with `grammar`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, step_max_items=MAX_ITEMS, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def _grammar_for(kind: str, source: str) -> str:
    from llguidance import LLMatcher, grammar_from

    if kind == "json_schema":
        source = json.dumps(closed(json.loads(source)))
        return LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": WHITESPACE})
    return grammar_from(kind, source)  # type: ignore[arg-type]  # its Literal has "regex" and "grammar"


_JOINS = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
_OPENS = ("additionalProperties", "patternProperties", "propertyNames", "minProperties", "$ref", "anyOf", "oneOf")


def closed(schema: Any) -> Any:
    """`schema`, where an object that lists its properties has no others, unless it says so.

    What matches it matches `schema` too. JSON Schema allows any others, and small models go on inventing them. Where a
    schema joins others, or one of its objects asks for more than it lists, nothing is changed.
    """
    text = json.dumps(schema)
    return schema if any(f'"{word}":' in text for word in _JOINS) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    part = {key: _closed_under(key, value) for key, value in schema.items()}
    listed = schema.get("properties")
    if isinstance(listed, dict) and not any(word in schema for word in _OPENS):
        wanted = schema.get("required", [])
        if isinstance(wanted, list) and all(isinstance(name, str) and name in listed for name in wanted):
            part["additionalProperties"] = False
    return part


def _closed_under(keyword: str, value: Any) -> Any:
    if keyword in ("const", "enum", "default", "examples"):
        return value
    if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
        return {name: _closed(part) for name, part in value.items()}  # names, which may be those of keywords
    return _closed(value)


def check(tokenizer: Any, kind: str, source: str) -> tuple[str | None, str, str]:
    """Compile a grammar and take its first step: see the module for what it gives."""
    try:
        grammar = _grammar_for(kind, source)
    except (ValueError, RecursionError) as exc:
        return None, _in_short(str(exc)), ""
    error = _error_of(tokenizer, grammar)
    if error is None:
        return grammar, "", ""
    return None, error, _place(tokenizer, json.loads(source), error) if kind == "json_schema" else ""


def _error_of(tokenizer: Any, grammar: str) -> str | None:
    matcher = make_matcher(tokenizer, grammar)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if matcher.is_stopped() or not any(mask):
            return "Nothing can match it."
    return _in_short(matcher.get_error()) if matcher.is_error() else None


def _place(tokenizer: Any, schema: Any, error: str) -> str:
    """Where in a schema the fault is: the innermost part that has the same fault by itself."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    path = ""
    while isinstance(schema, dict):
        for step, part in _parts(schema):
            alone = {**definitions, **part} if isinstance(part, dict) else part
            if _error_of(tokenizer, _grammar_for("json_schema", json.dumps(alone))) == error:
                path, schema = path + step, part
                break
        else:
            break
    return path


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            yield from ((f".{key}.{name}", part) for name, part in schema[key].items())
    for key in ("prefixItems", "allOf", "anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            yield from ((f".{key}[{i}]", part) for i, part in enumerate(schema[key]))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield f".{key}", schema[key]


def _in_short(error: str) -> str:
    """llguidance's message without the picture of the source, which need not fit into a line."""
    if error.startswith("panic"):
        return "It is too large."
    lines = error.splitlines()
    cause = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    first = re.sub(r"(regex parse error):?$", r"\1", lines[0].strip()) if lines else "It does not compile."
    return ": ".join([first[:300], *cause[:1]]).rstrip(".") + "."


def main() -> None:
    tokenizer = make_tokenizer(*_receive(sys.stdin.buffer))
    _send(sys.stdout.buffer, True)
    while True:
        kind, source, seconds = _receive(sys.stdin.buffer)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, seconds)  # the end, also where there is no server any more to kill it
        answer = check(tokenizer, kind, source)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        _send(sys.stdout.buffer, answer)


def _receive(stream: BinaryIO) -> Any:
    header = stream.read(4)
    if len(header) < 4:
        raise SystemExit
    return marshal.loads(stream.read(int.from_bytes(header, "big")))


def _send(stream: BinaryIO, value: Any) -> None:
    data = marshal.dumps(value)
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process when it ends
    _bound_memory()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
