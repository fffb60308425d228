"""Where a model thinks before it speaks: `<think>…</think>`, and the same under other names."""

from __future__ import annotations

from dataclasses import dataclass

from tokenflow.chat.marking import Segment
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

    def begins(self, content: str) -> bool:
        """An assistant's content begins with the block, as the model writes it."""
        return content.lstrip().startswith(self.open)

    def begun(self, opened: list[Segment], content: str) -> list[Segment]:
        """A prompt that goes on from an assistant's content that begins with the block.

        Args:
            opened: the prompt without it, up to the opening of the assistant's turn.
        """
        blanks, written = content.split(self.open, 1)
        thought, closed, said = written.partition(self.close)
        rest = [Segment(thought, False), Segment(closed, True), Segment(said, False)]
        text, special = opened[-1] if opened else Segment("", True)
        # The template may have opened the block itself, and closed it where there is to be no reasoning.
        head = text.rstrip().removesuffix(self.close).rstrip()
        if head.endswith(self.open):
            return [*opened[:-1], Segment(head, special), *rest]
        return [*opened, Segment(blanks + self.open, True), *rest]

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
