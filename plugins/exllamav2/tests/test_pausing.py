"""Pausing, and what is shared meanwhile."""

from __future__ import annotations

import pytest
from tokenflow_exllamav2.config import PAGE

from plugins.exllama_common.tests.pausing import Pausing
from plugins.exllama_common.tests.table import GREEDY, Table
from tokenflow.api import Dry, Mirostat, Sampling

SAMPLINGS = {
    "greedy": GREEDY,
    "with a state": Sampling(seed=7, mirostat=Mirostat(tau=2.0), dry=Dry(multiplier=2.0, allowed_length=1)),
}


class TestPausing(Pausing):
    tidied_after = 1

    @pytest.fixture(params=SAMPLINGS)
    def sampling(self, request: pytest.FixtureRequest) -> Sampling:
        return SAMPLINGS[request.param]


def test_choices_share_the_prompt(table: Table) -> None:
    """It is evaluated once; each has a page of its own for what it says."""
    prompt = table.prompt(3 * PAGE + 40)
    wanted = [table.alone(prompt, 30, sampling=Sampling(seed=seed)).data for seed in range(3)]
    before = table.stepper.prompt_tokens
    choices = [table.seat(prompt, 30, sampling=Sampling(seed=seed)) for seed in range(3)]
    assert table.batch.used_tokens == (3 + 3) * PAGE
    assert [choice.seq.cached_tokens for choice in choices] == [0, 3 * PAGE, 3 * PAGE]
    table.play(*choices)
    assert [choice.data for choice in choices] == wanted
    assert table.stepper.prompt_tokens - before == len(prompt) + 2  # the last token of each is its own
    assert table.batch.used_tokens == 0


def test_one_prompt_at_a_time(table: Table) -> None:
    """A step holds one chunk of one prompt, so that whoever leaves waits no longer; decoding goes on beside it."""
    decoding = table.seat(table.prompt(20))
    table.play(decoding, tokens=1)
    long = [table.seat(table.prompt(1100, seed)) for seed in (1, 2)]
    table.model.prefilled.clear()
    for steps in range(1, 7):
        table.step(decoding, *long)
        assert decoding.tokens == 1 + steps
        assert len(table.model.prefilled) == steps
    assert all(played.steps for played in long)
    assert max(table.model.prefilled) == 512
