"""Each parameter reaches the library's samplers, as what it says; what they cannot do is not promised."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plugins.exllama_common.tests.table import Played, Table
from tokenflow.api import Dry, InvalidRequest, Sampling, Xtc

LENGTH = 24


def play(
    table: Table, length: int = LENGTH, *, prompt: tuple[int, ...] = (), logprobs: int = 0, **fields: Any
) -> Played:
    return table.alone(prompt or table.prompt(30), length, logprobs=logprobs, sampling=Sampling(**fields))


def said(table: Table, length: int = LENGTH, **fields: Any) -> bytes:
    return play(table, length, **fields).data


def tokens_of(table: Table, *syllables: str) -> list[int]:
    return [table.stepper.vocabulary.tokenize(text)[0] for text in syllables]


def test_what_it_cannot_do(table: Table) -> None:
    """The service refuses what is not listed, by name."""
    can = table.stepper.info.capabilities
    assert not {"typical_p", "mirostat"} & can
    assert {"xtc", "dry", "banned_strings", "logit_bias", "seed", "logprobs", "ignore_eos", "prefix_cache"} <= can


def test_seeds(table: Table) -> None:
    assert said(table, seed=7) == said(table, seed=7)
    assert len({said(table, seed=seed) for seed in (0, 1, -1, 1 << 63)}) == 4
    assert len({said(table) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}, {"top_k": 1 << 62, "top_p": 1e-9}],
    ids=str,
)
def test_what_leaves_one_choice_is_greedy(table: Table, fields: dict[str, Any]) -> None:
    assert said(table, seed=1, **fields) == said(table, temperature=0)


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}, {"repetition_penalty": 1.0}, {"logit_bias": {7: 0.0}}],
    ids=str,
)
def test_what_asks_for_nothing_changes_nothing(table: Table, fields: dict[str, Any]) -> None:
    assert said(table, seed=1, **fields) == said(table, seed=1)


def test_xtc_excludes_the_top_choice(table: Table) -> None:
    """Of the two likeliest, both above the threshold, the less likely one is left."""
    played = play(table, top_k=2, seed=1, xtc=Xtc(probability=1.0, threshold=0.01), logprobs=2)
    drawn = [entry for step in played.steps for entry in step.logprobs]
    ranks = [[top.bytes for top in entry.top].index(entry.bytes) for entry in drawn]
    assert ranks.count(1) > 0.8 * LENGTH  # some are below the threshold


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_penalties_see_prompt_and_completion(table: Table, name: str) -> None:
    (token,) = tokens_of(table, "ba")
    bias = {token: 20.0}
    assert said(table, 3, temperature=0, logit_bias=bias) == b"bababa"
    assert said(table, 3, temperature=0, logit_bias=bias, **{name: 30.0}).startswith(b"ba")
    assert b"baba" not in said(table, 3, temperature=0, logit_bias=bias, **{name: 30.0})
    seen = (*table.prompt(30), token)
    assert not said(table, 3, temperature=0, logit_bias=bias, prompt=seen, **{name: 30.0}).startswith(b"ba")


def test_dry_breaks_repetitions(table: Table) -> None:
    """But for those across a breaker."""
    x, y, z = tokens_of(table, "ba", "de", "fi")
    fields: dict[str, Any] = {"temperature": 0, "prompt": (x, y, z) * 5 + (x, y), "logit_bias": {z: 20.0}}
    assert said(table, 1, **fields) == b"fi"
    assert said(table, 1, dry=Dry(multiplier=5.0), **fields) != b"fi"
    assert said(table, 1, dry=Dry(multiplier=5.0, allowed_length=30), **fields) == b"fi"
    assert said(table, 1, dry=Dry(multiplier=5.0, sequence_breakers=("de",)), **fields) == b"fi"


def test_biases(table: Table) -> None:
    (token,) = tokens_of(table, "ba")
    assert said(table, 4, temperature=0, logit_bias={token: 100.0}) == b"babababa"
    plain = play(table, 1, temperature=0, logprobs=1)
    (banned,) = [
        id for id, piece in enumerate(table.stepper.vocabulary.texts) if piece == plain.steps[0].logprobs[0].bytes
    ]
    assert said(table, 1, temperature=0, logit_bias={banned: -100.0}) != plain.data


@pytest.mark.parametrize("bias", [{-1: 1.0}, {410: 1.0}, {5: math.nan}, {5: math.inf}], ids=str)
def test_biases_that_make_no_sense(table: Table, bias: dict[int, float]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        said(table, logit_bias=bias)
    assert caught.value.param == "logit_bias"
    assert table.batch.used_tokens == 0


def test_log_probabilities_are_the_models_own(table: Table) -> None:
    """Before any sampler, and of all that it is asked for."""
    plain = play(table, temperature=0, logprobs=3)
    (forced,) = tokens_of(table, "ba")
    biased = play(table, 1, temperature=0, logprobs=3, logit_bias={forced: 100.0}).steps[0].logprobs[0]
    assert biased.bytes == b"ba"
    assert biased.top == plain.steps[0].logprobs[0].top
    assert biased.logprob < biased.top[-1].logprob
    for step in plain.steps:
        (entry,) = step.logprobs
        assert entry.bytes == entry.top[0].bytes
        assert entry.logprob == entry.top[0].logprob
        assert sum(math.exp(top.logprob) for top in entry.top) <= 1 + 1e-6


def test_ends(table: Table) -> None:
    """A token that ends the text is counted, and has no text; `ignore_eos` rules it out."""
    (end,) = table.stepper.vocabulary.ends
    sampling = Sampling(temperature=0, logit_bias={end: 100.0})
    played = table.alone(table.prompt(30), 8, sampling=sampling, ignore_eos=False, logprobs=0)
    assert [(step.tokens, step.piece, step.finish, step.logprobs) for step in played.steps] == [(1, b"", "stop", ())]
    played = table.alone(table.prompt(30), 8, sampling=sampling, ignore_eos=True)
    assert (played.tokens, played.steps[-1].finish) == (8, "length")
