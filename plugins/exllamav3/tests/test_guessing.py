"""Tokens that are guessed ahead change nothing but the number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plugins.exllama_common.tests.table import GREEDY, Table
from tokenflow.api import Sampling

WAYS = {"draft": {"draft_model": "rig", "draft_tokens": 3}, "ngram": {"ngram_match": 1, "draft_tokens": 3}}
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": Sampling(seed=3),
    "looking back": Sampling(seed=4, repetition_penalty=1.3),
    "repeating": Sampling(seed=5, logit_bias={300: 7.0}),
}


@pytest.fixture(params=WAYS)
def guessing(request: pytest.FixtureRequest, make_table: Callable[..., Table]) -> Table:
    return make_table(**WAYS[request.param])


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_same_is_said(table: Table, guessing: Table, name: str) -> None:
    sampling = SAMPLINGS[name]
    wanted = table.alone(table.prompt(250), 40, sampling=sampling)
    played = guessing.alone(guessing.prompt(250), 40, sampling=sampling)
    assert played.data == wanted.data
    assert played.tokens == 40
    if sampling.logit_bias or guessing.batch.draft_model:  # n-grams need something that repeats
        assert len(played.steps) < 40


@pytest.mark.parametrize("most", (1, 2, 3, 4, 7))
def test_max_tokens_is_exact(table: Table, guessing: Table, most: int) -> None:
    """Wherever in what was guessed it falls."""
    played = guessing.alone(guessing.prompt(50), most)
    assert (played.tokens, played.steps[-1].finish) == (most, "length")
    assert played.data == table.alone(table.prompt(50), most).data


def test_an_end_within_what_was_guessed(table: Table, guessing: Table) -> None:
    for seed in range(2):
        fields: dict[str, Any] = {"sampling": Sampling(seed=seed, logit_bias={401: 4.0}), "ignore_eos": False}
        wanted = table.alone(table.prompt(50, seed), 60, **fields)
        played = guessing.alone(guessing.prompt(50, seed), 60, **fields)
        assert (played.data, played.tokens) == (wanted.data, wanted.tokens)
        assert played.steps[-1].finish == wanted.steps[-1].finish


def test_each_token_has_its_log_probability(table: Table, guessing: Table) -> None:
    def heard(table: Table) -> list[tuple[str, float]]:
        played = table.alone(table.prompt(50), 40, logprobs=2)
        assert all(len(step.logprobs) == step.tokens for step in played.steps)
        return [(entry.token, round(entry.logprob, 4)) for step in played.steps for entry in step.logprobs]

    assert heard(guessing) == heard(table)
