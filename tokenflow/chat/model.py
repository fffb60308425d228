"""How one model is talked with: which of its templates a request is rendered with, and how its answer is read.

Both follow from the template unless the operator says otherwise: a template that teaches a model to write
`<tool_call>` is one whose answers have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from tokenflow.chat import harmony
from tokenflow.chat.calls import CALLS, taught_by
from tokenflow.chat.forced import forced_format, is_forced
from tokenflow.chat.marking import Segment
from tokenflow.chat.reader import MessageReader
from tokenflow.chat.reasoning import THINK
from tokenflow.chat.template import ChatTemplate
from tokenflow.core.types import ChatPrompt, Tools
from tokenflow.errors import InvalidRequest

AUTO, NONE, HARMONY = "auto", "none", "harmony"
DEFAULT, TOOL_USE = "default", "tool_use"

_TAIL_CHARS = 200


class ChatModel:
    """One model's templates and formats.

    Args:
        templates: by name; `default`, and `tool_use` where requests with tools have their own.
        bos_token: what templates find under that name.
        eos_token: likewise.
        special_tokens: the texts of the model's control tokens.
        tool_calls: a key of `CALLS`, `harmony`, `none`, or `auto`: what the template teaches.
        reasoning: a key of `THINK`, `harmony`, `none` or `auto`, likewise.
        variables: what clients may set for the template.

    Raises:
        TemplateError: a template does not compile.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: frozenset[str] = frozenset(),
        *,
        tool_calls: str = AUTO,
        reasoning: str = AUTO,
        variables: Iterable[str] = (),
    ) -> None:
        self._templates = {
            name: ChatTemplate(source, bos_token, eos_token, special_tokens) for name, source in templates.items()
        }
        self._variables = frozenset(variables)
        source = "\n".join(templates.values())
        if tool_calls == AUTO:
            tool_calls = HARMONY if harmony.SIGN in source else next(taught_by(source), NONE)
        if reasoning == AUTO:
            reasoning = next((name for name, think in THINK.items() if think.close in source), NONE)
        self._is_harmony = HARMONY in (tool_calls, reasoning)
        self._calls = CALLS.get(tool_calls)
        self._think = THINK.get(reasoning)
        self._shown = self._marks() & special_tokens

    def _marks(self) -> frozenset[str]:
        if self._is_harmony:
            return harmony.MARKS
        marks = frozenset() if self._calls is None else self._calls.marks
        return marks if self._think is None else marks | {self._think.open, self._think.close}

    def render(self, prompt: ChatPrompt, *, now: datetime | None = None) -> list[Segment]:
        """The prompt as text, in pieces that are safe to tokenize.

        Raises:
            InvalidRequest: the model knows no tools, a variable may not be set, or the template refuses.
        """
        self._check(prompt)
        tools = offered(prompt.tools)
        template = self._templates[TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT]
        variables = dict(prompt.variables)
        if prompt.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", prompt.reasoning_effort)
        if tools is not None:
            variables["tools"] = list(tools.functions)
        if prompt.ending == "continued" and self._think is not None:
            last = prompt.messages[-1]
            if self._think.begins(last["content"]) and "reasoning_content" not in last:
                # Templates take the block out of what was said, or put one of their own before it.
                opened = template.render(prompt.messages[:-1], now=now, variables=variables)
                return self._think.begun(opened, last["content"])
        return template.render(prompt.messages, ending=prompt.ending, now=now, variables=variables)

    def _check(self, prompt: ChatPrompt) -> None:
        for name in prompt.variables:
            if name not in self._variables:
                allowed = ", ".join(sorted(self._variables)) or "none"
                raise InvalidRequest(
                    f"The template's variable {name[:40]!r} is not a client's to set; those that are: {allowed}.",
                    param=f"chat_template_kwargs.{name[:40]}",
                )
        if offered(prompt.tools) is not None and not self._knows_tools:
            raise InvalidRequest(
                "This model's chat template knows no tools; leave them out, or choose another model.",
                param="tools",
                code="unsupported_parameter",
            )

    def reader(self, prompt: ChatPrompt, rendered: list[Segment], seed: str) -> MessageReader | None:
        """Who reads an answer; None: there is nothing in it but content.

        Args:
            prompt: what was asked.
            rendered: as `render` gave it.
            seed: the sequence's own.
        """
        tools = offered(prompt.tools)
        if is_forced(tools):
            chars = None if self._calls is None else self._calls.id_chars
            return MessageReader(calls=forced_format(chars), tools=tools, seed=seed)
        if self._is_harmony:
            return MessageReader(tools=tools, is_harmony=True, continued=prompt.ending == "continued", seed=seed)
        think, opened = self._think, False
        if think is not None and prompt.ending == "continued":
            content = prompt.messages[-1]["content"]
            opened = think.begins(content) and think.close not in content
            think = think if opened else None
        if think is None and tools is None:
            return None
        tail = "".join(text for text, _ in rendered[-3:])[-_TAIL_CHARS:]
        opened = opened or (think is not None and think.opened_by(tail))
        return MessageReader(think=think, opened=opened, calls=self._calls, tools=tools, seed=seed)

    @property
    def _knows_tools(self) -> bool:
        return self._is_harmony or self._calls is not None

    @property
    def capabilities(self) -> frozenset[str]:
        """`chat`, and what its answers may have in them: `tools`, `reasoning`."""
        tools = {"tools"} if self._knows_tools else set()
        reasoning = {"reasoning"} if self._is_harmony or self._think is not None else set()
        return frozenset({"chat"} | tools | reasoning)

    @property
    def shown(self) -> frozenset[str]:
        """Control tokens that a reader needs to see."""
        return self._shown


def offered(tools: Tools | None) -> Tools | None:
    """The tools that the model is told of: none where it may not call any."""
    return None if tools is None or tools.choice == NONE else tools
