"""Sequences with a grammar, with the real model, step by step."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from tokenflow_llamacpp.vocabulary import LlamaVocabulary

from tokenflow.api import Grammar, InvalidRequest, Sampling

from .conftest import Played, Table

pytestmark = pytest.mark.model

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPT = CHAT.format("Tell me something.")
PERSON = Grammar(
    kind="json_schema",
    source=json.dumps(
        {
            "type": "object",
            "properties": {
                "name_of_the_person": {"type": "string", "maxLength": 6},
                "age": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["name_of_the_person", "age"],
            "additionalProperties": False,
        }
    ),
)
CODE = Grammar(kind="regex", source=r"[A-Z]{2}-[0-9]{4}")


def play(table: Table, grammar: Grammar | None, tokens: int = 64, prompt: str = PROMPT, **fields: Any) -> Played:
    table.fresh()
    played = table.start(prompt, grammar=grammar, **fields)
    table.play(played, tokens=tokens)
    return played


@pytest.mark.parametrize("seed", range(2))
def test_the_text_is_of_the_grammar_whatever_is_drawn(table: Table, seed: int) -> None:
    played = play(table, CODE, sampling=Sampling(seed=seed, temperature=1.5))
    assert re.fullmatch(CODE.source, played.text)
    assert played.steps[-1].finish == "stop"  # nothing can follow, so nothing is drawn for it
    assert played.steps[-1].piece


def test_an_end_is_drawn_where_more_could_follow(table: Table) -> None:
    played = play(table, Grammar(kind="regex", source="[a-z]+"), sampling=Sampling(temperature=0, logit_bias={2: 100}))
    assert len(played.text) >= 1
    assert (played.steps[-1].finish, played.steps[-1].piece) == ("stop", b"")


def test_what_is_certain_comes_at_once(table: Table) -> None:
    """`name`, `_of`, `_the` are certain after the quote; together they cost one step, and each is a token."""
    played = table.start(PROMPT, grammar=PERSON)
    sizes = []
    while not (played.steps and played.steps[-1].finish):
        before = played.tokens
        table.step()
        sizes.append(played.tokens - before)
    assert max(sizes) >= 4
    assert sum(sizes) == len(played.steps)
    assert all(step.tokens == 1 for step in played.steps)
    assert list(json.loads(played.text)) == ["name_of_the_person", "age"]


def test_what_is_certain_keeps_to_the_credit(table: Table) -> None:
    whole = play(table, PERSON)
    table.fresh()
    played = table.start(PROMPT, grammar=PERSON)
    while not (played.steps and played.steps[-1].finish):
        played.seq.emitted = played.seq.limit - 1  # a reader that takes one at a time
        before = played.tokens
        table.step()
        assert played.tokens - before <= 1
    assert json.loads(played.text).keys() == json.loads(whole.text).keys()


def test_a_step_that_has_begun_gives_what_comes_next(table: Table) -> None:
    """Credit may be withdrawn while it runs, also where a certain token is still to be handed out."""
    played = table.start(PROMPT, grammar=PERSON)
    for _ in range(8):
        played.seq.limit = -1
        table.step()
    assert played.tokens == 8


def test_what_is_certain_keeps_to_max_tokens(table: Table) -> None:
    for most in (2, 5):
        table.fresh()
        played = table.start(PROMPT, most, grammar=PERSON)
        while played.tokens < most:
            table.step()
        assert played.tokens == most


def test_the_same_seed_the_same_text(table: Table) -> None:
    first, second, other = (play(table, PERSON, sampling=Sampling(seed=seed)).text for seed in (7, 7, 8))
    assert first == second != other


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3, "frequency_penalty": 1.5}], ids=str)
def test_a_pause_changes_nothing(table: Table, sampling: dict[str, Any]) -> None:
    straight = play(table, PERSON, sampling=Sampling(**sampling))
    table.fresh()
    played, other = table.start(PROMPT, grammar=PERSON, sampling=Sampling(**sampling)), None
    for pause in range(4):
        table.play(played, tokens=played.tokens + 3)
        if pause == 1:
            other = table.start(CHAT.format("Hello"))
            table.play(other, tokens=3)
    table.play(played, tokens=64)
    assert played.text == straight.text


def test_giving_up_the_slot_changes_nothing(table: Table) -> None:
    straight = play(table, PERSON, sampling=Sampling(seed=5))
    table.fresh()
    played = table.start(PROMPT, grammar=PERSON, sampling=Sampling(seed=5))
    table.play(played, tokens=9)
    evaluated = table.stepper.prompt_tokens
    table.stepper.release(played.seq)
    assert table.stepper.add(played.seq)
    table.play(played, tokens=64)
    assert played.text == straight.text
    assert table.stepper.prompt_tokens == evaluated  # all of it was still there


def test_what_another_has_evaluated_is_not_taken_off_what_was_counted(table: Table) -> None:
    """It gave up its slot with tokens drawn and not evaluated, and finds them in the other's."""
    certain = Grammar(kind="regex", source="Sir [a-z]{1,3}: the quick brown fox jumps over the lazy dog[.!]")
    table.fresh()
    ahead, played = (table.start("Say: ", 40, grammar=certain) for _ in range(2))
    while played.seq.data is None or played.seq.data.drawn <= 2:
        table.step(played)
    while len(ahead.seq.data.slot.tokens) <= len(played.seq.data.slot.tokens) + played.seq.data.drawn:
        table.step(ahead)
    evaluated = table.stepper.prompt_tokens
    table.held.remove(played)
    table.stepper.release(played.seq)
    assert table.stepper.add(played.seq)
    table.held.append(played)
    table.step(played)
    assert table.stepper.prompt_tokens == evaluated


def test_a_step_cut_short_changes_nothing(table: Table) -> None:
    straight = play(table, PERSON)
    table.fresh()
    played = table.start(PROMPT, grammar=PERSON)
    for _ in range(4):
        table.step()
        table.step(interrupt=played)
    table.play(played, tokens=64)
    assert played.text == straight.text


def test_neighbours_are_undisturbed(table: Table) -> None:
    """Beside one with a grammar whose every token is drawn, others say what they say beside one without."""

    def company(grammar: Grammar | None) -> list[str]:
        table.fresh()
        others = [table.start(CHAT.format(text), 8) for text in ("Tell me a story.", "Write a poem.")]
        table.start(PROMPT, 8, grammar=grammar, ignore_eos=True)
        for _ in range(8):
            table.step()
        return [other.text for other in others]

    assert company(Grammar(kind="regex", source="(?s:.*)")) == company(None)


def test_penalties_see_the_allowed_tokens(table: Table) -> None:
    grammar = Grammar(kind="regex", source="( cat| dog){5}")
    plain, penalized = (
        play(table, grammar, sampling=Sampling(temperature=0, frequency_penalty=penalty)).text for penalty in (0, 100)
    )
    assert re.fullmatch(grammar.source, plain)
    assert re.fullmatch(grammar.source, penalized)
    assert plain != penalized


def test_top_k_is_taken_of_the_allowed_tokens(table: Table) -> None:
    assert play(table, CODE, sampling=Sampling(seed=1, top_k=1)).text == play(table, CODE).text


def test_logprobs_are_the_models_own_one_step_a_token(table: Table) -> None:
    with_logprobs = play(table, PERSON, logprobs=2)
    assert [len(step.logprobs) for step in with_logprobs.steps if step.piece] == [1] * len(with_logprobs.steps)
    for step in with_logprobs.steps:
        assert step.logprobs[0].bytes == step.piece
        assert step.logprobs[0].logprob < 0
        assert math.fsum(math.exp(entry.logprob) for entry in step.logprobs[0].top) <= 1 + 1e-6
    assert list(json.loads(with_logprobs.text)) == ["name_of_the_person", "age"]


def test_a_grammar_ends_what_would_ignore_its_end(table: Table) -> None:
    played = play(table, CODE, ignore_eos=True)
    assert re.fullmatch(CODE.source, played.text)


def test_control_tokens_are_no_text(table: Table, vocabulary: LlamaVocabulary) -> None:
    grammar = Grammar(kind="regex", source=re.escape("<|im_start|>"))
    played = play(table, grammar)
    assert played.text == "<|im_start|>"
    assert played.tokens > 1


def test_a_wrong_bias_is_refused(table: Table) -> None:
    with pytest.raises(InvalidRequest):
        table.start(PROMPT, grammar=CODE, sampling=Sampling(logit_bias={49_152: 1.0}))
