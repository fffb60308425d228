"""Pausing, and sequences that are sent back for more pages."""

from __future__ import annotations

import pytest
from tokenflow_exllamav3.config import PAGE

from plugins.exllama_common.tests.faults import Make
from plugins.exllama_common.tests.pausing import Pausing
from tokenflow.api import Dry, Sampling


class TestPausing(Pausing):
    tidied_after = 8

    @pytest.fixture
    def sampling(self) -> Sampling:
        return Sampling(seed=7, min_p=0.05, repetition_penalty=1.2, dry=Dry(multiplier=2.0, allowed_length=1))


def test_a_page_at_a_time(make_table: Make) -> None:
    """With `reserve_tokens` more fit in than could if all said all they may, and those who find none wait."""
    table = make_table(cache_tokens=5 * PAGE, reserve_tokens=PAGE, context_length=3 * PAGE)
    prompts = [table.prompt(PAGE - 6, seed) for seed in range(2)]
    wanted = [table.alone(prompt, PAGE + 20).data for prompt in prompts]
    played = [table.seat(prompt, PAGE + 20) for prompt in prompts]  # two pages each, and later three
    waited = 0
    while len(table.held) == 2:
        before = [one.tokens for one in played]
        table.step(*played)
        waited += played[1].tokens == before[1]
        if played[0].ended:
            table.leave(played[0])
    table.play(played[1])
    assert waited > 10
    assert [one.data for one in played] == wanted
    assert [one.tokens for one in played] == [PAGE + 20] * 2
    assert table.batch.used_tokens == 0
