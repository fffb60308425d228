"""A model's own chat template: messages to the text it was trained on, in pieces that are safe to tokenize.

Templates come with model files and are programs, so they run in jinja2's sandbox with no way to change anything, and
within bounds on what they may write and how far they may count. The bounds stop accidents and the plainest attacks; a
template whose author means harm can still waste time, so a model file is something that an operator trusts.

The dialect of jinja2 is the one that templates are written for: blocks trimmed, `break` and `continue`,
`raise_exception`, `strftime_now`, a `tojson` that does not escape for HTML, and `{% generation %}`, which marks text
for training and does nothing here.

Pure: the clock is an argument. How user text is kept from spelling control tokens is `chat.marking`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from tokenflow.chat.expectations import Expectations, expectations
from tokenflow.chat.marking import Marker, Marks, Segment, SpecialTokens, marks_beside
from tokenflow.errors import InvalidRequest

MAX_CHARS = 16_000_000
"""The most that a template may write: several times the largest body that a server takes by default."""

MAX_COUNT = 1_000_000
"""How many numbers `range` may give in one rendering, and the largest number that a function is called with."""


class TemplateError(ValueError):
    """The model's template is no template. The operator must give another, or another model file."""


class _Rejected(Exception):
    """The template itself refuses the messages."""


class ChatTemplate:
    """One model's template, compiled.

    Args:
        source: jinja2, as in a model file's metadata.
        bos_token: what the template finds under that name.
        eos_token: likewise.
        special_tokens: the texts of the model's control tokens.
        max_chars: the most that it may write.

    Raises:
        TemplateError: the source does not compile.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: frozenset[str] = frozenset(),
        *,
        max_chars: int = MAX_CHARS,
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.max_chars = max_chars
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise TemplateError(f"chat template, line {exc.lineno}: {exc.message}") from exc
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, TypeError) as exc:
            raise TemplateError(f"chat template: {exc}") from exc
        self.source = source
        self._max_chars = max_chars
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._specials = SpecialTokens(special_tokens)
        # A mark must not be a character that the template writes, or looks for.
        self._used = frozenset(source) | frozenset(bos_token + eos_token) | frozenset("".join(special_tokens))
        self._marks = marks_beside(self._used)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Render, and say of each piece whether control tokens are to be read out of it.

        Args:
            messages: as in a `ChatPrompt`. What they say is not trusted.
            add_generation_prompt: end with the opening of the assistant's turn.
            now: what `strftime_now` tells; None: the template finds no such function, and does without a date.
            variables: more that the template may look for, such as `tools`. What they say is not trusted either.

        Returns:
            Pieces that joined are what the template wrote; nearly always one.

        Raises:
            InvalidRequest: the template refuses these messages, or cannot render them.
        """
        given = {"tools": None, "documents": None, **(variables or {}), "messages": self._as_expected(messages)}
        try:
            marker = Marker(self._specials, self._marks_beside(_characters(given)))
            context = {name: marker.mark(value, name) for name, value in given.items()}
        except RecursionError:
            raise InvalidRequest("The messages are nested too deeply.", param="messages") from None
        rendered = self._render(self._surroundings(context, add_generation_prompt, now))
        return marker.split(rendered) if marker.marked else [Segment(rendered, True)] * bool(rendered)

    def _marks_beside(self, used: frozenset[str]) -> Marks:
        """Nearly always the same ones."""
        return self._marks if used.isdisjoint(self._marks[:3]) else marks_beside(self._used | used)

    def _as_expected(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages in the form that this template takes them in."""
        if not any("tool_calls" in message or "reasoning_content" in message for message in messages):
            return list(messages)
        return [self._expectations.applied(message) for message in messages]

    @cached_property
    def _expectations(self) -> Expectations:
        def render(messages: list[Mapping[str, Any]], tools: list[Mapping[str, Any]]) -> str | None:
            given = {"messages": messages, "tools": tools, "documents": None}
            try:
                return self._render(self._surroundings(given, False, datetime(2000, 1, 1)))
            except InvalidRequest:
                return None

        return expectations(render)

    def _surroundings(self, given: dict[str, Any], opening: bool, now: datetime | None) -> dict[str, Any]:
        """What is given, and what every template finds."""
        context = given | self._tokens
        context |= {"add_generation_prompt": opening, "range": _range_within(MAX_COUNT)}
        context["raise_exception"] = _raise_exception
        if now is not None:
            context["strftime_now"] = now.strftime
        return context

    def _render(self, context: dict[str, Any]) -> str:
        pieces, left = [], self._max_chars
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    raise InvalidRequest(
                        f"Rendered, the messages exceed {self._max_chars} characters.", param="messages"
                    )
        except InvalidRequest:
            raise
        except _Rejected as exc:
            raise InvalidRequest(f"The model's chat template refuses these messages: {exc}", param="messages") from exc
        except Exception as exc:
            # Templates assume much about messages and fail in any way when it does not hold.
            raise InvalidRequest(
                f"The model's chat template cannot render these messages: {type(exc).__name__}: {exc}", param="messages"
            ) from exc
        return "".join(pieces)


def _characters(value: Any) -> frozenset[str]:
    """Every character outside ASCII in any string of a JSON value."""
    used: set[str] = set()
    for text in _strings(value):
        if not text.isascii():  # a mark never is
            used.update(text)
    return frozenset(used)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


# --- what templates find --------------------------------------------------------------------------------------------


def _raise_exception(message: str) -> NoReturn:
    raise _Rejected(message)


def _range_within(total: int) -> Callable[..., range]:
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


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and indent > 16:
        raise SecurityError("tojson indents by at most 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: its body."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which keeps a template from touching anything, and bounds on what makes much out of little."""

    max_chars = MAX_CHARS
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _tojson
        for name in ("center", "batch", "slice"):  # widths and counts without bound, and of no use for a prompt
            del self.filters[name]
        del self.globals["lipsum"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            # Exact types: templates add strings all the time, and this is the quickest that can be asked.
            if (type(left) is str or type(left) is list) and len(left) > self.max_chars // 2:
                self._check(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            if re.search(r"\*|[0-9]{4}", left):
                raise SecurityError("a format is too wide")
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Iterable) and isinstance(other, int):
                    self._check(len(one) * other)  # type: ignore[arg-type]  # what can be multiplied has a length
        elif operator == "**" and not (abs(left) <= MAX_COUNT and abs(right) <= 64):
            raise SecurityError("a power is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_COUNT:
                raise SecurityError("a function is called with too large a number")
        return super().call(context, obj, *args, **kwargs)

    def _check(self, size: int) -> None:
        if size > self.max_chars:
            raise SecurityError(f"it builds more than {self.max_chars} characters")
