"""What models' own chat templates run in: jinja2's sandbox, and bounds on whatever makes much out of little.

The sandbox keeps a template from touching anything. The bounds keep each text and each list that it makes within
`max_chars`, and numbers small:

    operators   `+`, `*`, `%` and `**` by what comes out, or would; `~` likewise, by a compiler of our own
    buffers     what a macro, a block or `{% set %}…{% endset %}` has written
    filters     all by what comes out; those that repeat something, before they do
    methods     likewise
    conversion  of a list or an object to a text, wherever it happens: it may hold one list many times over

What is left: many texts in one list can still fill the memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from functools import partial, wraps
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace, missing, pass_environment, pass_eval_context

MAX_CHARS = 16_000_000
"""The most that a template may write: several times the largest body that a server takes by default."""

MAX_COUNT = 1_000_000
"""How many numbers `range` may give in one rendering, and the largest number that a function is called with."""

MAX_BITS = 4096
"""Of a product of whole numbers."""

MAX_DIGITS = 64
"""That a number is rounded to."""

MAX_INDENT = 16
"""Of JSON."""

MAX_DATE_CHARS = 256
"""Of a date's format."""

_WIDE = re.compile(r"\*|[0-9]{4}")
"""What in a format may pad without bound."""

_USELESS = ("batch", "center", "pprint", "slice", "urlencode", "urlize", "wordwrap", "xmlattr")
"""Filters that repeat something, or make texts, in ways of their own, and that no prompt needs."""

_OF_TEXTS = (
    *("attr", "capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "striptags", "title", "trim"),
    *("upper", "wordcount"),
)
"""Filters that make a text of whatever they are given."""

_FORBIDDEN = ("encode", "escape", "expandtabs", "to_bytes", "translate")
"""Methods of texts and numbers that repeat something, or give bytes, which have such methods too."""

_SIZED = (str, list, tuple)


class Rejected(Exception):
    """The template itself refuses the messages."""


class _Compiler(CodeGenerator):
    """`~` as a call."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """See the module.

    Args:
        max_chars: the most characters of a text, and items of a list.
    """

    code_generator_class = _Compiler
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, *, max_chars: int) -> None:
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, undefined=_Undefined)
        self.max_chars = max_chars
        self.finalize = self.shown
        del self.globals["lipsum"]
        self.globals["raise_exception"] = self._reject
        for name in _USELESS:
            del self.filters[name]
        self.filters["format"] = self._formatted
        self.filters["indent"] = partial(self._indented, self.filters["indent"])
        self.filters["join"] = self._join
        self.filters["replace"] = self._replaced
        self.filters["round"] = partial(_rounded, self.filters["round"])
        self.filters["sum"] = _summed
        self.filters["tojson"] = self._json
        for name, filter in self.filters.items():
            self.filters[name] = self._bounded(filter, of_texts=name in _OF_TEXTS)

    # --- bounds -----------------------------------------------------------------------------------------------------

    def check(self, size: int) -> None:
        """SecurityError for a text or list of that size."""
        if size > self.max_chars:
            raise SecurityError(f"it builds more than {self.max_chars} characters")

    def weight(self, value: Any, indent: int = 0) -> int:
        """About how long `str(value)` is, and JSON that is indented so. SecurityError if that is too long."""
        size, level, each = 0, [value], 2
        while level:
            size += each * len(level)
            below: list[Any] = []
            for one in level:
                if isinstance(one, str):
                    size += len(one)
                elif isinstance(one, int):
                    size += one.bit_length() // 3
                elif isinstance(one, Collection):
                    below += one
                    if isinstance(one, Mapping):
                        below += one.values()
                    self.check(size + len(below))
                elif isinstance(one, Namespace):
                    raise SecurityError("a namespace is no text")
            self.check(size)
            level, each = below, each + indent
        return size

    def text(self, value: Any) -> str:
        """`str(value)`."""
        if not isinstance(value, str):
            self.weight(value)
        return str(value)

    def joined(self, values: Iterable[Any], between: str = "") -> str:
        """The texts of `values`, put together."""
        texts: list[str] = []
        size = 0
        for value in values:
            texts.append(text := self.text(value))
            size += len(text) + len(between)
            self.check(size)
        return between.join(texts)

    def shown(self, value: Any) -> Any:
        """`value`, whose text is within bounds."""
        if not isinstance(value, str):
            self.weight(value)
        return value

    def _checked(self, result: Any) -> Any:
        if isinstance(result, _SIZED):
            self.check(len(result))
        return result

    # --- what jinja2 calls ------------------------------------------------------------------------------------------

    def concat(self, values: Iterable[Any]) -> str:
        return self.joined(values)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            if _WIDE.search(left):
                raise SecurityError("a format is too wide")
            padding = sum(map(int, re.findall("[0-9]+", left)))
            times = left.count("%") if isinstance(right, Mapping) else 1
            self.check(len(left) + padding + times * self.weight(right))
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                if left.bit_length() + right.bit_length() > MAX_BITS:
                    raise SecurityError("a product is too large")
            else:
                for one, other in ((left, right), (right, left)):
                    if isinstance(one, Collection) and isinstance(other, int):
                        self.check(len(one) * other)
        elif operator == "**" and not (abs(left) <= MAX_COUNT and abs(right) <= 64):
            raise SecurityError("a power is too large")
        return self._checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_COUNT:
                raise SecurityError("a function is called with too large a number")
        return self._checked(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, BuiltinMethodType | MethodType) or not isinstance(value.__self__, str):
            return None
        text = value.__self__
        match value.__name__:
            case "format":
                return lambda *args, **kwargs: _Formatter(self).vformat(text, args, kwargs)
            case "format_map":
                return lambda mapping: _Formatter(self).vformat(text, (), mapping)
            case "join":
                return lambda values: self.joined(_texts(values), text)
            case "replace":
                return partial(self._replaced, text)
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (attr in _FORBIDDEN and isinstance(obj, str | int)) and super().is_safe_attribute(obj, attr, value)

    # --- filters ----------------------------------------------------------------------------------------------------

    def _bounded(self, filter: Callable[..., Any], of_texts: bool) -> Callable[..., Any]:
        @wraps(filter)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if of_texts:
                for value in args:
                    self.shown(value)
            return self._checked(filter(*args, **kwargs))

        return bounded

    def _formatted(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_binop(None, "%", self.text(value), kwargs or args)

    @pass_eval_context
    def _join(self, context: EvalContext, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        return self.joined(value, self.text(d))

    def _replaced(self, s: Any, old: Any, new: Any, count: int | None = -1) -> str:
        text, old, new = self.text(s), self.text(old), self.text(new)
        count = -1 if count is None else count
        if len(new) > len(old):
            times = text.count(old)
            self.check(len(text) + (times if count < 0 else min(times, count)) * (len(new) - len(old)))
        return text.replace(old, new, count)

    def _indented(self, filter: Callable[..., str], s: Any, width: int | str = 4, *args: Any, **kwargs: Any) -> str:
        text = self.text(s)
        self.check(len(text) + (len(text.splitlines()) + 1) * (width if isinstance(width, int) else len(width)))
        return filter(text, width, *args, **kwargs)

    def _json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if (indent or 0) > MAX_INDENT or len("".join(separators or ())) > MAX_INDENT:
            raise SecurityError(f"tojson indents by at most {MAX_INDENT}")
        self.weight(value, indent or 0)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _reject(self, message: Any) -> NoReturn:
        raise Rejected(self.text(message))


def strftime_at(now: datetime) -> Callable[[str], str]:
    """`now.strftime`, bounded: it pads."""

    def told(form: str) -> str:
        if len(form) > MAX_DATE_CHARS:
            raise SecurityError("a date's format is too long")
        return now.strftime(form)

    return told


def range_within(total: int) -> Callable[..., range]:
    """`range`, which jinja2 bounds by itself, bounded also in sum: loops within loops."""
    left = total

    def counted(*args: int) -> range:
        nonlocal left
        numbers = safe_range(*args)
        left -= len(numbers)
        if left < 0:
            raise SecurityError(f"it counts to more than {total}")
        return numbers

    return counted


def _texts(values: Iterable[Any]) -> Iterable[str]:
    """As they are: unlike the filter, `str.join` takes nothing else."""
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"join takes strings, and not {type(value).__name__}")
        yield value


def _rounded(filter: Callable[..., float], value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > MAX_DIGITS:
        raise SecurityError("a precision is too large")
    return filter(value, precision, method)


@pass_environment
def _summed(environment: Any, iterable: Any, attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("sum is of numbers")  # it would put lists together too
    return FILTERS["sum"](environment, iterable, attribute, start)


class _Undefined(jinja2.Undefined):
    """Told in few words: its name may be a whole value."""

    __slots__ = ()

    def __init__(
        self, hint: Any = None, obj: Any = missing, name: Any = None, exc: Any = jinja2.UndefinedError
    ) -> None:
        if not isinstance(name, str | int | None):
            name = type(name).__name__
        super().__init__(hint, obj, name, exc)


class _Formatter(SandboxedFormatter):
    """One text of `str.format`."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._sandbox = sandbox
        self._size = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._sandbox.shown(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDE.search(format_spec):
            raise SecurityError("a format is too wide")
        self._sandbox.shown(value)
        text = super().format_field(value, format_spec)
        self._size += len(text)
        self._sandbox.check(self._size)
        return text


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: its body."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
