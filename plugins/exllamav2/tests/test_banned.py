"""Banned strings are never in the text, and what is said and what is counted are the same thing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenflow_exllamav2.config import PAGE

from plugins.exllama_common.tests.table import GREEDY, Played, Table
from tokenflow.api import Dry, Sampling


def spoken(table: Table, prompt: tuple[int, ...], length: int = 60, **sampling: Any) -> str:
    return table.alone(prompt, length, sampling=Sampling(temperature=0, **sampling)).data.decode(errors="replace")


def phrase(text: str, at: int, size: int = 7) -> str:
    """A part of the text that is whole characters, at or near that place."""
    places = sorted(range(len(text) - size + 1), key=lambda start: abs(start - at))
    return next(part for start in places if "\ufffd" not in (part := text[start : start + size]))


@pytest.mark.parametrize("seed", range(3))
def test_never_in_the_text(table: Table, seed: int) -> None:
    prompt = table.prompt(50, seed)
    plain = spoken(table, prompt)
    banned = (phrase(plain, 20), phrase(plain, 60).upper(), "é")
    played = table.seat(prompt, 60, logprobs=2, sampling=Sampling(temperature=0, banned_strings=banned))
    table.play(played)
    text = played.data.decode(errors="replace")
    assert not [string for string in banned if string.lower() in text.lower()]
    assert text[:12] == plain[:12]
    assert played.tokens == 60
    heard = [logprob.bytes for step in played.steps for logprob in step.logprobs]
    controls = {text.encode() for text in table.stepper.vocabulary.specials}
    assert b"".join(piece for piece in heard if piece not in controls) == played.data, "tokens and text agree"


@pytest.mark.parametrize("length", range(10, 24, 2))
def test_nor_with_the_last_token(table: Table, length: int) -> None:
    """The library ends a sequence before it looks for banned strings."""
    prompt = table.prompt(50)
    plain = spoken(table, prompt, length)
    banned = phrase(plain, len(plain) - 5, 5)
    text = spoken(table, prompt, length, banned_strings=(banned,))
    assert banned not in text


def test_a_stop_token_within_what_is_held(table: Table) -> None:
    """What might have become a banned string, and did not, is said to the last token."""
    prompt = table.prompt(50)
    plain = table.alone(prompt, 60, sampling=Sampling(seed=5), ignore_eos=False)
    text = plain.data.decode(errors="replace")
    again = table.alone(prompt, 60, sampling=Sampling(seed=5, banned_strings=(text[-4:] + "\u0001",)))
    assert again.data == plain.data
    assert again.tokens == plain.tokens


@pytest.mark.parametrize("before", [0, 1, 2])
def test_going_back_over_the_end_of_a_page(table: Table, before: int) -> None:
    """A banned string lies across it. Two companions say the same, one of them without a ban; all share their pages,
    and one with a ban is released at every step at which it holds text back.
    """
    prompt = table.prompt(PAGE - 8)
    plain = table.alone(prompt, 40)
    text = plain.data.decode(errors="replace")
    at = len(b"".join(step.piece for step in plain.steps[: 8 - before]).decode(errors="replace"))
    sampling = Sampling(temperature=0, banned_strings=(text[at : at + 12],))
    alone = table.alone(prompt, 40, sampling=sampling)
    assert alone.data != plain.data
    plainly, released, beside = (table.seat(prompt, 40, sampling=each) for each in (GREEDY, sampling, sampling))
    table.play(plainly, tokens=10)  # its page is full, and has its name
    while not released.ended:
        table.step(released, beside)
        if not released.ended and released.seq.data._held_back:
            table.release(released)
            assert table.try_seat(released)
    table.play(plainly, released, beside)
    assert [plainly.data, released.data, beside.data] == [plain.data, alone.data, alone.data]
    assert table.batch.used_tokens == 0


def test_released_while_text_is_held(table: Table) -> None:
    """At every step of its life."""
    prompt = table.prompt(PAGE - 20)
    plain = spoken(table, prompt, 40)
    banned = (phrase(plain, 12, 12), phrase(plain, 40, 12))
    sampling = Sampling(seed=3, banned_strings=banned)
    wanted = table.alone(prompt, 40, sampling=sampling)
    played: Played = table.seat(prompt, 40, sampling=sampling)
    while not played.ended:
        table.step(played)
        if not played.ended and random.Random(played.tokens).random() < 0.7:
            table.release(played)
            assert table.try_seat(played)
    assert played.data == wanted.data
    assert played.tokens == wanted.tokens


def test_dry_counts_nothing_that_was_taken_back(table: Table) -> None:
    prompt = table.prompt(50)
    plain = spoken(table, prompt)
    banned = (phrase(plain, 20, 12), phrase(plain, 60, 12))
    sampling = Sampling(temperature=0, banned_strings=banned, dry=Dry(multiplier=0.01))
    played = table.seat(prompt, 60, sampling=sampling)
    job, lengths = played.seq.data, [len(prompt)]
    while not played.ended:
        table.step(played)
        lengths.append(len(job.sequence.sequence_ids))
        assert job.gen_settings.ngram_index <= lengths[-1]
    assert lengths != sorted(lengths), "it never went back"


def test_what_was_said_is_found_again(table: Table) -> None:
    """While bans may take tokens out of a page nobody finds it; once its sequence has ended, the next turn does."""
    prompt = table.prompt(PAGE - 8)
    played = table.seat(prompt, 40, sampling=Sampling(temperature=0, banned_strings=("never said",)))
    tokens = played.seq.data.sequence.sequence_ids
    table.play(played, tokens=20)
    said = tuple(tokens.torch()[0].tolist())
    curious = table.seat(said)
    assert curious.seq.cached_tokens == 0
    table.leave(curious)
    table.play(played)
    assert table.seat(said).seq.cached_tokens == PAGE
