"""A sequence's grammar as one of the library's filters.

The library asks for the mask in a thread of its own, while the GPU is busy with the logits, and awaits it before it
draws; what the mask raises ends the job alone.
"""

from __future__ import annotations

from math import inf

import torch
from exllamav3.generator.filter import Filter

from tokenflow.api import Matcher


class Guide(Filter):  # type: ignore[misc]  # the library has no types that mypy could read
    """Keeps a job to what its matcher allows, and ends it where nothing can follow.

    Args:
        matcher: at the beginning of its grammar.
        ends: tokens that end a text.
    """

    def __init__(self, matcher: Matcher, ends: frozenset[int]) -> None:
        super().__init__(tokenizer=None, trigger_token=None, prefix_str=None, eos_after_completed=True)
        self._matcher = matcher
        self._ends = ends

    def reset(self) -> None:
        """The library asks for it once, at the beginning."""

    def accept_token(self, token: int) -> None:
        if token not in self._ends:
            self._matcher.accept(token)

    def get_next_logit_mask(self) -> torch.Tensor:
        """Of shape (1, vocabulary, padded): 0 is allowed, -inf is not."""
        allowed = torch.frombuffer(bytearray(self._matcher.mask()), dtype=torch.uint8)[: self.vocab_size] != 0
        if self._matcher.ended:  # only the mask has shown that nothing can follow
            allowed[sorted(self._ends)] = True
        mask = torch.full((1, self.vocab_size), -inf, dtype=self.logits_dtype)
        mask[0, : len(allowed)].masked_fill_(allowed, 0)
        return mask

    def is_completed(self) -> bool:
        return self._matcher.ended
