"""How a sequence with a grammar gets its tokens.

A token that is certain is not drawn: all that are certain at once are given at once, and evaluated together. For the
others the grammar's mask is the first link of the chain of samplers, so that all the rest of it (penalties, top_p, a
draw) sees the allowed tokens and no other. Making a chain takes about half a millisecond, and a mask often stays as it
is (within a JSON string, say), so a chain is kept until the mask changes; each has its seed from the sequence's.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from tokenflow.api import Matcher, SequenceRequest
from tokenflow_llamacpp.sampling import Samplers


class Guide:
    """A `Sampler` that keeps to a grammar.

    Args:
        samplers: of the model.
        request: InvalidRequest if its biases are wrong.
        matcher: its grammar.
        ends: tokens that end a text.
    """

    def __init__(self, samplers: Samplers, request: SequenceRequest, matcher: Matcher, ends: frozenset[int]) -> None:
        self._samplers = samplers
        self._request = request
        self._biases = samplers.biases(request)
        self._matcher = matcher
        self._ends = ends
        self._random = random.Random(request.sampling.seed)
        self._mask = b""
        self._chain: Any = None
        self._forced = deque(self._force())

    @property
    def ended(self) -> bool:
        return not self._forced and self._matcher.ended

    def draw(self, llama: Any, index: int, context: Sequence[int], most: int) -> list[int]:
        drawn: list[int] = []
        if not self._forced:
            token = self._sample(llama, index, context)
            drawn.append(token)
            if token in self._ends:
                return drawn
            self._matcher.accept(token)
            self._forced.extend(self._force())
        while self._forced and len(drawn) < most:
            drawn.append(self._forced.popleft())
        return drawn

    def close(self) -> None:
        if self._chain is not None:
            self._chain.close()
            self._chain = None

    def _sample(self, llama: Any, index: int, context: Sequence[int]) -> int:
        mask = self._matcher.mask()
        if self._matcher.ended:  # only the mask has shown that nothing can follow
            return min(self._ends)
        if self._chain is None or mask != self._mask:
            self.close()
            self._mask = mask
            seed = self._random.getrandbits(31)
            self._chain = self._samplers.make_masked(self._request, self._biases, mask, context, seed)
        token: int = self._chain.sample(llama, index)
        return token

    def _force(self) -> list[int]:
        """What is certain now; the grammar is beyond it from here on."""
        if self._matcher.ended:
            return []
        forced = self._matcher.forced()
        if forced:
            self._matcher.accept(*forced)
            self.close()  # the chain has not seen them, and its penalties should
        return forced
