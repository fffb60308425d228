"""Banned strings are never in the text, and what is said and what is counted are the same thing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenflow_exllamav3.config import PAGE

from plugins.exllama_common.tests.table import GREEDY, Played, Table
from tokenflow.api import Sampling


def banning(*strings: str, seed: int | None = None) -> Sampling:
    return Sampling(seed=seed, temperature=0 if seed is None else None, banned_strings=strings)


def text_of(played: Played) -> str:
    return played.data.decode(errors="replace")


def parts(text: str, size: int, every: int) -> list[str]:
    """Some of its whole characters, here and there."""
    found = [text[at : at + size] for at in range(12, len(text) - size, every)]
    return [part for part in found if "\ufffd" not in part]


@pytest.mark.parametrize("options", [{}, {"draft_model": "rig"}], ids=["plain", "guessing"])
@pytest.mark.parametrize("seed", range(2))
def test_never_in_the_text(make_table: Callable[..., Table], seed: int, options: dict[str, str]) -> None:
    table = make_table(**options)
    prompt = table.prompt(50, seed)
    plain = text_of(table.alone(prompt, 60))
    banned = parts(plain, 6, 25)
    played = table.alone(prompt, 60, logprobs=1, sampling=banning(*[part.upper() for part in banned]))
    text = text_of(played)
    assert not [part for part in banned if part.lower() in text.lower()]
    assert played.tokens == 60
    heard = [entry.bytes for step in played.steps for entry in step.logprobs]
    assert b"".join(piece for piece in heard if not piece.startswith(b"<|")) == played.data, "tokens and text agree"


def test_letters_of_several_bytes_in_any_case(table: Table) -> None:
    """Spelled by the model in bytes, by the client in another case."""
    forced = Sampling(temperature=0, logit_bias={token: 30.0 for token in table.stepper.vocabulary.tokenize("Ü")})
    assert "Ü" in text_of(table.alone(table.prompt(20), 30, sampling=forced))
    banned = Sampling(temperature=0, logit_bias=forced.logit_bias, banned_strings=("ü",))
    assert "Ü" not in text_of(table.alone(table.prompt(20), 30, sampling=banned))


@pytest.mark.parametrize("length", range(10, 20, 2))
def test_nor_with_the_last_token(table: Table, length: int) -> None:
    """The library ends a sequence before it looks for banned strings."""
    plain = text_of(table.alone(table.prompt(50), length))
    played = table.alone(table.prompt(50), length, sampling=banning(plain[-5:]))
    assert plain[-5:] not in text_of(played)
    assert played.tokens == length


def test_what_is_held_at_the_end_is_said(table: Table) -> None:
    """It might have become a banned string, and did not: by max_tokens, or by a token that ends the text."""
    for fields in ({"max_tokens": 30}, {"max_tokens": 60, "ignore_eos": False}):
        plain = table.alone(table.prompt(50, 3), sampling=Sampling(seed=5), **fields)
        again = table.alone(table.prompt(50, 3), sampling=banning(text_of(plain)[-4:] + "\u0001", seed=5), **fields)
        assert (again.data, again.tokens) == (plain.data, plain.tokens)
        assert again.steps[-1].finish == plain.steps[-1].finish


def test_going_back_disturbs_nobody(table: Table) -> None:
    """Over the end of a page, which is shared with one who says the same without a ban."""
    for length in range(PAGE - 12, PAGE, 4):
        prompt = table.prompt(length)
        plain = table.alone(prompt, 40)
        ban = banning(*parts(text_of(plain), 9, 12))
        wanted = table.alone(prompt, 40, sampling=ban)
        played = [table.seat(prompt, 40, sampling=sampling) for sampling in (ban, ban, GREEDY)]
        table.play(*played)
        assert [one.data for one in played] == [wanted.data, wanted.data, plain.data]
        assert table.batch.used_tokens == 0


@pytest.mark.parametrize("seed", range(2))
def test_released_while_text_is_held(table: Table, seed: int) -> None:
    """What is held is drawn again, and what was ruled out stays so: whenever it happens, the same is said."""
    prompt = table.prompt(PAGE - 20, seed)
    ban = banning(*parts(text_of(table.alone(prompt, 40, sampling=Sampling(seed=3))), 9, 11), seed=3)
    wanted = table.alone(prompt, 40, sampling=ban)
    played = table.seat(prompt, 40, sampling=ban)
    rng = random.Random(seed)
    held = 0
    while not played.ended:
        table.step(played)
        if not played.ended and rng.random() < 0.3:
            held += bool(played.seq.data.checkpoint)
            table.release(played)
            assert table.try_seat(played)
    assert held
    assert (played.data, played.tokens) == (wanted.data, wanted.tokens)
