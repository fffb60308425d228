"""What goes wrong in the library's step costs nobody a token but who is to blame. Both plugins' tests run it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from plugins.exllama_common.tests.table import GREEDY, Played, Table
from tokenflow.api import EngineError, Sampling

Make = Callable[..., Table]
SAMPLINGS = (GREEDY, Sampling(seed=3), Sampling(seed=4, top_p=0.9, repetition_penalty=1.2))


def three(table: Table, *, prompt: int = 250, max_tokens: int = 24) -> tuple[list[bytes], list[Played]]:
    """Three sequences, a few tokens on their way, and what each says alone; `prompt` is the shortest one's length."""
    prompts = [table.prompt(prompt + 30 * n, seed=n) for n in range(3)]
    asked = [(prompt, sampling) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]
    wanted = [table.alone(prompt, max_tokens, sampling=sampling).data for prompt, sampling in asked]
    played = [table.seat(prompt, max_tokens, sampling=sampling) for prompt, sampling in asked]
    table.play(*played, tokens=8)
    return wanted, played


def fail(*args: Any, **options: Any) -> None:
    raise ZeroDivisionError("a fault of the test's")


def fail_once(table: Table) -> list[int]:
    """The next decoding pass fails. Returns where it says how many sequences were in it."""
    failures: list[int] = []

    def before(what: str, ids: Any) -> None:
        if what == "decode" and not failures:
            failures.append(len(ids))
            fail()

    table.model.before, table.steps_may_fail = before, True
    return failures


def breaks(culprit: Played, ids: Any) -> bool:
    """Its next token is about to be evaluated, in whatever company."""
    job = culprit.seq.data
    return (
        job is not None
        and job.is_prefill_done()
        and int(job.sequence.sequence_ids.torch()[0, -1]) in ids[:, 0].tolist()
    )


class FailingSteps:
    """From now on a step of several fails as a whole now and then, and nobody is to blame.

    Args:
        stepper: open.
        drawn: says when.
    """

    def __init__(self, stepper: Any, drawn: Random) -> None:
        self.count = 0
        self.started_over = 0
        """As many, unless steps fail for other reasons."""
        self._stepper = stepper
        self._drawn = drawn
        self._start_over = stepper._start_over
        stepper._start_over = self._counted
        stepper.batch.model.before = self._before

    def _before(self, what: str, ids: Any) -> None:
        if what == "decode" and len(ids) > 1 and not self._stepper._suspects and self._drawn.random() < 0.01:
            self.count += 1
            fail()

    def _counted(self, loaded: Any) -> None:
        self.started_over += 1
        self._start_over(loaded)


class Faults:
    """Of the whole batch. A subclass is made in each plugin's tests, which have a `make_table`."""

    @pytest.fixture(autouse=True)
    def steps_may_fail(self, table: Table) -> None:
        table.steps_may_fail = True

    def test_a_step_that_fails_once(self, table: Table) -> None:
        """Everybody begins again from what they said, and says the same as ever."""
        wanted, played = three(table)
        failures = fail_once(table)
        table.play(*played)
        assert failures == [3]
        assert [one.data for one in played] == wanted
        assert table.batch.used_tokens == 0

    def test_text_that_is_held_when_a_step_fails(self, table: Table) -> None:
        """It may become a banned string, wherever the failure comes."""
        bans = Sampling(seed=7, banned_strings=(" ba", "du ", " ko", "mi"))
        asked = [(table.prompt(20 + n, seed=n), 30) for n in range(3)]
        wanted = [table.alone(*ask, sampling=bans).data for ask in asked]
        for tokens in range(1, 20):
            played = [table.seat(*ask, sampling=bans) for ask in asked]
            table.play(*played, tokens=tokens)
            fail_once(table)
            table.play(*played)
            assert [one.data for one in played] == wanted

    def test_a_failure_after_some_have_taken_their_tokens(self, table: Table) -> None:
        """They are handed out, and not drawn again."""
        wanted, played = three(table)
        last = table.seat(table.prompt(20, seed=7))
        while not last.steps:
            table.step(*played, last)
        before = [one.tokens for one in played]
        job = last.seq.data

        def fail_once(*args: Any, **options: Any) -> None:
            del job.receive_sample
            fail()

        job.receive_sample = fail_once
        table.step(*played, last)
        assert [one.tokens for one in played] == [tokens + 1 for tokens in before]
        table.play(*played, last)
        assert [one.data for one in played] == wanted
        assert last.data == table.alone(table.prompt(20, seed=7)).data

    def test_who_is_parked_or_away_survives_a_failure_too(self, table: Table) -> None:
        wanted, played = three(table)
        away, _, going = played
        table.release(away)
        other = table.seat(table.prompt(20, seed=7))
        evicted, counted = table.batch.evicted_tokens, table.stepper.prompt_tokens
        failures = fail_once(table)
        table.step(going, other)
        assert failures == [2]
        assert table.batch.evicted_tokens >= evicted
        assert table.stepper.prompt_tokens >= counted
        while not table.try_seat(away):
            table.step(going, other)  # who wants to go on is served before
        table.play(*played, other)
        assert [one.data for one in played] == wanted
        assert other.tokens == 40
        assert table.batch.used_tokens == 0

    @pytest.mark.parametrize("prompt", [250, 1200], ids=["short", "of several steps"])
    def test_who_breaks_the_step_is_found(self, table: Table, prompt: int) -> None:
        """The model fails whenever one of them is in its batch: that one ends, the others go on.

        A prompt of several steps: were it let go after the first of them, all would begin again without end.
        """
        wanted, played = three(table, prompt=prompt)
        table.model.before = lambda what, ids: fail() if what == "decode" and breaks(played[1], ids) else None
        table.play(*played)
        assert played[1].ended is not None and isinstance(played[1].ended.error, EngineError)
        assert wanted[1].startswith(played[1].data)
        assert [played[0].data, played[2].data] == [wanted[0], wanted[2]]
        assert table.batch.used_tokens == 0

    def test_a_batch_that_fails_with_nobody_to_blame(self, table: Table) -> None:
        """All is well with each alone, never with all: it is given up, and the next ones are served."""
        _, played = three(table)
        table.model.before = lambda what, ids: fail() if len(ids) > 1 else None
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            table.play(*played)
        table.leave()
        table.model.before = lambda what, ids: None
        assert table.batch.used_tokens == 0
        wanted, played = three(table)
        table.play(*played)
        assert [one.data for one in played] == wanted

    def test_gpus_that_are_gone_end_the_engine(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every caller is let go, and the slot that nobody can free is not trusted: the host opens the engine anew."""
        _, played = three(table)
        monkeypatch.setattr("tokenflow_exllama.stepper.gpus_work", lambda: False)
        fail_once(table)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            table.step(*played)
        with pytest.raises(EngineError, match="for good"):
            table.stepper.remove(played[0].seq)
        table.held.clear()

    def test_gpus_that_are_gone_in_one_prompt_end_the_engine(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be everybody's end, one after the other, with nobody to say so."""
        alone = table.seat(table.prompt(1000))
        monkeypatch.setattr("tokenflow_exllama.stepper.gpus_work", lambda: False)
        table.model.before = lambda what, ids: fail()
        with pytest.raises(EngineError, match="for good: ZeroDivisionError"):
            table.step(alone)
        with pytest.raises(EngineError, match="for good"):
            table.stepper.remove(alone.seq)
        table.held.clear()

    def test_the_end_of_a_broken_engine_is_told_by_what_broke_it(self, table: Table) -> None:
        """And not by the memory that such a GPU does not give back, either."""
        batch, table.stepper.batch.close = table.stepper.batch, fail
        table.stepper.close()
        del batch.close
        batch.close()
