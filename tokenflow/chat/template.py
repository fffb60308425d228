"""A model's own chat template: messages to the text it was trained on, in pieces that are safe to tokenize.

Templates come with model files and are programs, so they run in a sandbox with no way to change anything, and within
bounds on what they may write and how far they may count: `chat.sandbox`. The bounds stop accidents and the plainest
attacks; a template whose author means harm can still waste time, so a model file is something that an operator trusts.

The dialect of jinja2 is the one that templates are written for: blocks trimmed, `break` and `continue`,
`raise_exception`, `strftime_now`, a `tojson` that does not escape for HTML, and `{% generation %}`, which marks text
for training and does nothing here.

Pure: the clock is an argument. How user text is kept from spelling control tokens is `chat.marking`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2

from tokenflow.chat.expectations import Expectations, expectations
from tokenflow.chat.marking import Marker, Marks, Segment, SpecialTokens, marks_beside
from tokenflow.chat.sandbox import MAX_CHARS, MAX_COUNT, Rejected, Sandbox, range_within, strftime_at
from tokenflow.core.types import Ending
from tokenflow.errors import InvalidRequest, described


class TemplateError(ValueError):
    """The model's template is no template. The operator must give another, or another model file."""


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
        try:
            self._template = Sandbox(max_chars=max_chars).from_string(source)
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
        ending: Ending = "opening",
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Render, and say of each piece whether control tokens are to be read out of it.

        Args:
            messages: as in a `ChatPrompt`. What they say is not trusted.
            ending: whether an assistant's turn is opened, or the last message gone on from.
            now: what `strftime_now` tells; None: the template finds no such function, and does without a date.
            variables: more that the template may look for, such as `tools`. What they say is not trusted either.

        Returns:
            Pieces that joined are what the template wrote; nearly always one.

        Raises:
            InvalidRequest: the template refuses these messages, or cannot render them.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, **(variables or {})}
        given["messages"] = self._as_expected(messages)
        try:
            marks = self._marks_beside(_characters(given))
            marker = Marker(self._specials, marks)
            if ending == "continued":
                given["messages"][-1] = _with_end(given["messages"][-1], marks.end)
            context = {name: marker.mark(value, name) for name, value in given.items()}
        except RecursionError:
            raise InvalidRequest("The messages are nested too deeply.", param="messages") from None
        rendered = self._render(self._surroundings(context, ending == "opening", now))
        if ending == "continued":
            rendered = _until_end(rendered, messages[-1]["content"], marks)
        return marker.split(rendered) if marker.marked else [Segment(rendered, True)] * bool(rendered)

    def _marks_beside(self, used: frozenset[str]) -> Marks:
        """Nearly always the same ones."""
        return self._marks if used.isdisjoint(self._marks[:4]) else marks_beside(self._used | used)

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
        context |= {"add_generation_prompt": opening, "range": range_within(MAX_COUNT)}
        if now is not None:
            context["strftime_now"] = strftime_at(now)
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
        except Rejected as exc:
            raise InvalidRequest(f"The model's chat template refuses these messages: {exc}", param="messages") from exc
        except Exception as exc:
            # Templates assume much about messages and fail in any way when it does not hold.
            raise InvalidRequest(
                f"The model's chat template cannot render these messages: {described(exc)}", param="messages"
            ) from exc
        return "".join(pieces)


def _with_end(message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """Mark the end of what it says, before blanks, which a template may trim."""
    said = message["content"].rstrip()
    return {**message, "content": said + mark + message["content"][len(said) :]}


def _until_end(rendered: str, content: str, marks: Marks) -> str:
    """What was rendered up to the end of the last message's content, with its blanks, for the answer follows them."""
    said = content.rstrip()
    text = rendered[: max(0, rendered.rfind(marks.end))].replace(marks.end, "")
    if not marks.any.sub("", text).endswith(said.lstrip()):
        raise InvalidRequest(
            "The model's chat template does not end with what the last message says, so there is no going on from it; "
            "send reasoning as 'reasoning_content'.",
            param="continue_final_message",
        )
    return text + content[len(said) :]


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
