"""How tokens are drawn, with the real model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tokenflow_llamacpp.sampling import _seed
from tokenflow_llamacpp.vocabulary import LlamaVocabulary

from tokenflow.api import Grammar, InvalidRequest, Mirostat, Sampling, Xtc

from .conftest import GREEDY, Played, Table

pytestmark = pytest.mark.model

PROMPT = "<|im_start|>user\nTell me something.<|im_end|>\n<|im_start|>assistant\n"


def text(table: Table, tokens: int = 12, prompt: str = PROMPT, **sampling: Any) -> str:
    return play(table, tokens, prompt, sampling=Sampling(**sampling)).text


def play(table: Table, tokens: int = 12, prompt: str = PROMPT, **fields: Any) -> Played:
    table.fresh()
    played = table.start(prompt, **fields)
    table.play(played, tokens=tokens)
    return played


def test_the_same_seed_the_same_text(table: Table) -> None:
    assert text(table, seed=7) == text(table, seed=7)
    assert len({text(table, seed=seed) for seed in range(4)}) > 1


def test_without_a_seed_by_chance(table: Table) -> None:
    assert len({text(table) for _ in range(4)}) > 1


def test_seeds_beside_each_other_do_not_mix(table: Table) -> None:
    pair = [table.start(PROMPT, sampling=Sampling(seed=7)) for _ in range(2)]
    table.play(*pair, tokens=12)
    assert pair[0].text == pair[1].text


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 0xFFFFFFFF])
def test_any_seed_is_one(seed: int) -> None:
    assert 0 <= _seed(seed) < 0xFFFFFFFF


def test_seeds_are_told_apart() -> None:
    kept = [0, 1, 1 << 31, 0xFFFFFFFE]
    assert [_seed(seed) for seed in kept] == kept
    spread = [-(1 << 63), *range(-100, 100), *range(0xFFFFFFFF, 0xFFFFFFFF + 100), 1 << 32, 1 << 62, (1 << 63) - 1]
    assert len({_seed(seed) for seed in spread}) == len(set(spread))


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 1},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"temperature": 1e-9},
        {"temperature": 0.001},
        {"mirostat": Mirostat(tau=1e-6, eta=0.0)},
    ],
    ids=str,
)
def test_what_leaves_one_choice_is_greedy(table: Table, sampling: dict[str, Any]) -> None:
    assert text(table, seed=1, **sampling) == text(table, temperature=0)


def test_what_leaves_one_typical_choice_leaves_nothing_to_chance(table: Table) -> None:
    assert len({text(table, seed=seed, typical_p=1e-6) for seed in range(3)}) == 1


@pytest.mark.parametrize("banned", ["ends", "token", "by grammar"])
def test_typical_p_picks_the_same_beside_what_is_banned(table: Table, vocabulary: LlamaVocabulary, banned: str) -> None:
    """What cannot be drawn has no part in what is typical: it made everything typical."""
    (token,) = vocabulary.tokenize(" cheese")
    regex = Grammar(kind="regex", source="[ a-zA-Z]{2,200}", param="x")
    fields: dict[str, Any] = {
        "ends": {"ignore_eos": True},
        "token": {},
        "by grammar": {"grammar": regex},
    }[banned]
    bias = {token: -100.0} if banned == "token" else None
    drawn = {
        play(table, 1, **fields, sampling=Sampling(seed=seed, typical_p=0.05, logit_bias=bias)).text
        for seed in range(12)
    }
    assert len(drawn) < 6, drawn


def test_xtc_excludes_the_top_choice(table: Table) -> None:
    """Of the two likeliest, both above the threshold, the less likely one is left."""
    xtc = Xtc(probability=1.0, threshold=1e-6)
    played = play(table, 6, sampling=Sampling(top_k=2, seed=1, xtc=xtc), logprobs=2)
    for step in played.steps:
        (drawn,) = step.logprobs
        assert drawn.bytes == drawn.top[1].bytes


def test_a_banned_token_is_not_drawn(table: Table, vocabulary: LlamaVocabulary) -> None:
    first = text(table, tokens=1, temperature=0)
    (token,) = vocabulary.tokenize(first)
    assert text(table, tokens=1, temperature=0, logit_bias={token: -100}) != first


def test_a_bias_forces_a_token(table: Table, vocabulary: LlamaVocabulary) -> None:
    (token,) = vocabulary.tokenize(" cheese")
    assert text(table, tokens=3, seed=1, logit_bias={token: 100}) == " cheese" * 3


@pytest.mark.parametrize(("token", "bias"), [(49_152, 1.0), (-1, 1.0), (5, math.nan), (5, math.inf)])
def test_a_wrong_bias_is_refused(table: Table, token: int, bias: float) -> None:
    with pytest.raises(InvalidRequest) as info:
        table.start(PROMPT, sampling=Sampling(logit_bias={token: bias}))
    assert info.value.param == "logit_bias"


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_penalties_see_prompt_and_completion(table: Table, name: str) -> None:
    """Where a word repeats for ever, a high penalty stops it at once: the prompt's own counts."""
    prompt = "cheese cheese cheese cheese cheese cheese cheese cheese"
    assert text(table, tokens=1, prompt=prompt, temperature=0) == " cheese"
    value = 10.0 if name == "repetition_penalty" else 2.0 if name == "frequency_penalty" else 20.0
    assert text(table, tokens=1, prompt=prompt, temperature=0, **{name: value}) != " cheese"


@pytest.mark.parametrize(("distance", "seen"), [(63, True), (64, False)])
def test_penalties_look_at_64_tokens(table: Table, vocabulary: LlamaVocabulary, distance: int, seen: bool) -> None:
    (cheese,), (the,) = vocabulary.tokenize(" cheese"), vocabulary.tokenize(" the")
    wanted = Sampling(temperature=0, logit_bias={cheese: 50}, presence_penalty=100.0)
    played = table.start((cheese,) + (the,) * distance, sampling=wanted)
    table.play(played, tokens=1)
    assert (played.text != " cheese") == seen


def test_ignore_eos_goes_on(table: Table) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ended = play(table, 24, prompt, sampling=GREEDY)
    assert ended.steps[-1].finish == "stop"
    assert ended.tokens < 24
    for sampling in (GREEDY, Sampling(seed=1)):
        endless = play(table, 24, prompt, sampling=sampling, ignore_eos=True)
        assert endless.tokens == 24
        assert all(step.finish is None for step in endless.steps)


def test_logprobs(table: Table) -> None:
    played = play(table, 6, sampling=GREEDY, logprobs=5)
    for step in played.steps:
        (drawn,) = step.logprobs
        assert drawn.bytes == step.piece
        assert len(drawn.top) == 5
        assert drawn.top[0][:3] == drawn[:3]  # greedy: the likeliest
        values = [entry.logprob for entry in drawn.top]
        assert values == sorted(values, reverse=True)
        assert 0 < sum(map(math.exp, values)) <= 1 + 1e-6
        assert all(entry.top == () for entry in drawn.top)


def test_logprobs_are_those_of_the_whole_vocabulary(table: Table) -> None:
    played = play(table, 1, sampling=GREEDY, logprobs=20)
    context, size = table.stepper._context, table.stepper.vocabulary.size
    logits = context.get_logits_ith(table.stepper._batch.n_tokens - 1)
    total = math.log(math.fsum(math.exp(logit) for logit in logits))
    assert len(logits) == size
    assert played.steps[0].logprobs[0].logprob == pytest.approx(max(logits) - total, abs=1e-6)


def test_logprobs_do_not_change_with_the_sampling(table: Table) -> None:
    plain = play(table, 1, sampling=GREEDY, logprobs=3)
    biased = play(table, 1, sampling=Sampling(seed=1, temperature=5.0, top_k=3), logprobs=3)
    assert plain.steps[0].logprobs[0].top == biased.steps[0].logprobs[0].top


def test_logprobs_without_alternatives(table: Table) -> None:
    (drawn,) = play(table, 1, sampling=GREEDY, logprobs=0).steps[0].logprobs
    assert drawn.top == ()
    assert drawn.logprob < 0
