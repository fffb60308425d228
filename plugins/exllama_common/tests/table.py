"""Sequences in a stepper's hands without a loop: a test decides who takes part in each step."""

from __future__ import annotations

import random
from typing import Any

from tokenflow.api import Sampling, Send, Sequence, SequenceRequest, Step
from tokenflow.core.states import SEQUENCE_MOVES, SequenceState, move

GREEDY = Sampling(temperature=0)


class Played:
    """A sequence and what came of it."""

    def __init__(self, request: SequenceRequest) -> None:
        self.seq = Sequence(request, Send(lambda event: None, window=1))
        self.steps: list[Step] = []

    @property
    def data(self) -> bytes:
        return b"".join(step.piece for step in self.steps)

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def ended(self) -> Step | None:
        last = self.steps[-1] if self.steps else None
        return last if last is not None and (last.finish or last.error) else None


class Table:
    """Who sits in the batch.

    Args:
        stepper: open.
    """

    def __init__(self, stepper: Any) -> None:
        self.stepper = stepper
        self.held: list[Played] = []
        self.steps_may_fail = False
        """As a whole; else that is the test's failure, since starting over would mend what it looks for."""
        self._start_over = stepper._start_over
        stepper._start_over = self._start_over_if_it_may

    def _start_over_if_it_may(self, loaded: Any) -> None:
        assert self.steps_may_fail, "a step failed"
        self._start_over(loaded)

    @property
    def batch(self) -> Any:
        """The generator, which is another one after a failure."""
        return self.stepper.batch

    @property
    def pages(self) -> Any:
        """The page table, which in one of the libraries is the generator itself."""
        return getattr(self.batch, "pagetable", self.batch)

    @property
    def model(self) -> Any:
        return self.batch.model

    def prompt(self, tokens: int, seed: int = 0) -> tuple[int, ...]:
        """Some prompt; another one for each seed."""
        return tuple(random.Random(seed).choices(range(256), k=tokens))

    def request(self, prompt: tuple[int, ...], max_tokens: int = 40, **fields: Any) -> SequenceRequest:
        fields = {"sampling": GREEDY, "ignore_eos": True, **fields}
        return SequenceRequest(prompt=prompt, max_tokens=max_tokens, **fields)

    def seat(self, prompt: tuple[int, ...], max_tokens: int = 40, **fields: Any) -> Played:
        """As `try_seat`, where there is room."""
        played = Played(self.request(prompt, max_tokens, **fields))
        assert self.try_seat(played), "no room"
        return played

    def try_seat(self, played: Played) -> bool:
        if not self.stepper.add(played.seq):
            return False
        self.held.append(played)
        self._move(played, SequenceState.ACTIVE)
        return True

    def park(self, *who: Played) -> None:
        """They have no credit any more; nobody takes a step."""
        for played in who:
            self._move(played, SequenceState.PARKED)

    def step(self, *who: Played) -> None:
        """One step, with those named and nobody else."""
        for played in self.held:
            self._move(played, SequenceState.ACTIVE if played in who else SequenceState.PARKED)
        if not who:  # the loop asks for no step that is nobody's
            return
        for seq, step in self.stepper.step([played.seq for played in who]):
            played = next(played for played in who if played.seq is seq)
            played.seq.generated += step.tokens
            played.steps.append(step)

    def play(self, *who: Played, tokens: int | None = None, steps: int = 5000) -> None:
        """Steps until each of them has that many tokens, or has ended and left."""
        for _ in range(steps):
            for played in [played for played in who if played.ended and played in self.held]:
                self.leave(played)
            left = [played for played in who if played in self.held and (tokens is None or played.tokens < tokens)]
            if not left:
                return
            self.step(*left)
        raise AssertionError(f"still going after {steps} steps")

    def release(self, played: Played) -> None:
        self.stepper.release(played.seq)
        self.held.remove(played)
        self._move(played, SequenceState.WAITING)

    def leave(self, *who: Played) -> None:
        for played in who or tuple(self.held):
            self.held.remove(played)
            self.stepper.remove(played.seq)

    def alone(self, prompt: tuple[int, ...], max_tokens: int = 40, **fields: Any) -> Played:
        """The same, to its end, with nobody else there and nothing kept of anybody."""
        assert not self.held
        self.forget()
        played = self.seat(prompt, max_tokens, **fields)
        self.play(played)
        self.forget()
        return played

    def forget(self) -> None:
        """Nothing is in the cache any more; nobody may hold a part of it."""
        assert not self.pages.referenced_pages
        self.pages.reset_page_table()

    def _move(self, played: Played, to: SequenceState) -> None:
        if played.seq.state is not to:
            played.seq.state = move(SEQUENCE_MOVES, played.seq.state, to)
