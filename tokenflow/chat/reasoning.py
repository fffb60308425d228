"""Where a model thinks before it speaks: `<think>…</think>`, and the same under other names."""

from __future__ import annotations

from dataclasses import dataclass

from tokenflow.chat.message import MessageBuilder
from tokenflow.chat.source import Marks, Read, Source


@dataclass(frozen=True, slots=True)
class Think:
    """A block of reasoning at the beginning of a message. The template may have opened it, in the prompt."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """The prompt ends within the block."""
        return prompt.rstrip().endswith(self.open)

    def read(self, source: Source, message: MessageBuilder, opened: bool) -> Read[None]:
        """The block, if there is one. What follows it is not read, but for newlines, which belong to the block."""
        yield from source.skip("\n")
        if (yield from source.take(self.open)) or opened:
            yield from source.until(Marks(self.close), message.reasoning)
        message.content_begins()


THINK = {
    "think": Think("<think>", "</think>"),
    "mistral": Think("[THINK]", "[/THINK]"),
    "seed": Think("<seed:think>", "</seed:think>"),
}
"""By the name that a configuration has for it."""
