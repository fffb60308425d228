"""One model for all: it is loaded once, and driven step by step, so that a test decides the shape of each batch.

Texts are compared only between runs whose batches had the same shape: llama.cpp's sums are not bit-stable otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from tokenflow_llamacpp import SMOLLM2, LlamaConfig
from tokenflow_llamacpp.stepper import LlamaStepper

from tokenflow.api import Grammar, Grammars, Matcher, Sampling, Send, Sequence, SequenceRequest, Step

GREEDY = Sampling(temperature=0)
CONFIG = LlamaConfig(slots=4, context_length=512, cache_tokens=1024, batch=64, prefill_chunk=16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the model, and say how to get it."""
    if SMOLLM2.path.is_file():
        return
    reason = f"{SMOLLM2.path} is not there: run `tokenflow pull {SMOLLM2.name}`"
    for item in items:
        if item.get_closest_marker("model") and "plugins/llamacpp" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))


class Played:
    """A sequence in the stepper's hands and what came of it, without a loop."""

    def __init__(self, request: SequenceRequest, matcher: Matcher | None = None) -> None:
        self.seq = Sequence(request, Send(lambda event: None, window=1), matcher)
        self.seq.limit = 1_000_000
        self.steps: list[Step] = []
        self.gone = False

    def take(self, step: Step) -> None:
        self.steps.append(step)
        self.seq.generated += step.tokens

    @property
    def text(self) -> str:
        return b"".join(step.piece for step in self.steps).decode(errors="replace")

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def cached(self) -> int:
        return self.seq.cached_tokens


class Table:
    """Who sits in the batch: `start` gives a slot, `step` takes one step with those named, `leave` frees the slot."""

    def __init__(self, stepper: LlamaStepper, grammars: Grammars | None = None) -> None:
        self.stepper = stepper
        self.grammars = grammars
        self.held: list[Played] = []

    def matcher(self, grammar: Grammar | None) -> Matcher | None:
        if grammar is None:
            return None
        assert self.grammars is not None
        return trio.run(self._matcher, self.grammars, grammar)

    async def _matcher(self, grammars: Grammars, grammar: Grammar) -> Matcher:
        async with grammars:
            return await grammars.matcher(grammar)

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.stepper.vocabulary.tokenize(text, special=True))

    def start(self, prompt: str | tuple[int, ...], max_tokens: int = 64, **fields: Any) -> Played:
        played = self.try_start(prompt, max_tokens, **fields)
        assert played is not None, "no room"
        return played

    def try_start(self, prompt: str | tuple[int, ...], max_tokens: int = 64, **fields: Any) -> Played | None:
        tokens = self.tokens(prompt) if isinstance(prompt, str) else prompt
        fields.setdefault("sampling", GREEDY)
        request = SequenceRequest(prompt=tokens, max_tokens=max_tokens, **fields)
        played = Played(request, self.matcher(request.grammar))
        if not self.stepper.add(played.seq):
            return None
        self.held.append(played)
        return played

    def step(self, *who: Played, interrupt: Played | None = None) -> None:
        """One step; `interrupt` strikes after it has begun, before the batch is decoded."""
        who = who or tuple(self.held)
        for seq, step in self.stepper.step(_Run([played.seq for played in who], self.stepper, interrupt)):
            next(played for played in self.held if played.seq is seq).take(step)

    def play(self, *who: Played, tokens: int) -> None:
        """Steps with `who`, until each of them has `tokens` or has ended."""
        while left := [p for p in who if p.tokens < tokens and not (p.steps and p.steps[-1].finish)]:
            self.step(*left)

    def leave(self, *who: Played) -> None:
        for played in who or tuple(self.held):
            self.held.remove(played)
            self.stepper.remove(played.seq)

    def fresh(self) -> None:
        """Nobody, and nothing kept."""
        self.leave()
        self.stepper.slots.wipe_all()


class _Run(list[Sequence]):
    """A run in whose reading an interrupt comes in from outside, as from another thread."""

    def __init__(self, run: list[Sequence], stepper: LlamaStepper, interrupt: Played | None) -> None:
        super().__init__(run)
        self._stepper = stepper
        self._interrupt = interrupt

    def __iter__(self) -> Iterator[Sequence]:
        if self._interrupt is not None:
            self._stepper.interrupt(self._interrupt.seq)
        return super().__iter__()


@pytest.fixture(scope="session")
def stepper() -> Iterator[LlamaStepper]:
    stepper = LlamaStepper(CONFIG)
    stepper.open()
    yield stepper
    stepper.close()


@pytest.fixture(scope="session")
def grammars(stepper: LlamaStepper) -> Grammars:
    return stepper.vocabulary.grammars()


@pytest.fixture
def table(stepper: LlamaStepper, grammars: Grammars) -> Iterator[Table]:
    table = Table(stepper, grammars)
    table.fresh()
    yield table
    table.leave()


@pytest.fixture
def vocabulary(stepper: LlamaStepper) -> Any:
    return stepper.vocabulary
