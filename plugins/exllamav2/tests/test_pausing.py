"""A paused sequence goes on exactly where it was: from its slot, from the cache, or from nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from tokenflow_exllamav2.config import PAGE

from plugins.exllama_common.tests.table import GREEDY, Played, Table
from tokenflow.api import Dry, Mirostat, Sampling

SAMPLINGS = {
    "greedy": GREEDY,
    "with a state": Sampling(seed=7, mirostat=Mirostat(tau=2.0), dry=Dry(multiplier=2.0, allowed_length=1)),
}
PROMPT, LENGTH = 480, 60
"""So that a second page is filled while it says something."""


@pytest.fixture(params=SAMPLINGS)
def sampling(request: pytest.FixtureRequest) -> Sampling:
    return SAMPLINGS[request.param]


def _paused(table: Table, sampling: Sampling, pause: Callable[[Played, Played], None]) -> int:
    """One sequence pauses in the middle, another one goes on. Returns how much was evaluated after the pause."""
    wanted = table.alone(table.prompt(PROMPT), LENGTH, sampling=sampling).data
    paused = table.seat(table.prompt(PROMPT), LENGTH, sampling=sampling)
    other = table.seat(table.prompt(100, seed=1), 300)
    table.play(paused, other, tokens=10)
    before = table.stepper.prompt_tokens
    pause(paused, other)
    table.play(paused)
    assert paused.data == wanted
    return table.stepper.prompt_tokens - before


def test_parked_for_200_steps(table: Table, sampling: Sampling) -> None:
    """Nothing is evaluated again; and the other one says what it says alone."""

    def pause(paused: Played, other: Played) -> None:
        for _ in range(200):
            table.step(other)
        table.play(other)
        others.append(other)

    others: list[Played] = []
    assert _paused(table, sampling, pause) == 0
    assert others[0].data == table.alone(table.prompt(100, seed=1), 300).data


def test_released_while_its_pages_are_kept(table: Table, sampling: Sampling) -> None:
    """No more than a page is evaluated again."""

    def pause(paused: Played, other: Played) -> None:
        table.release(paused)
        table.play(other, tokens=210)
        assert table.try_seat(paused)
        assert paused.seq.cached_tokens == PAGE

    assert _paused(table, sampling, pause) <= PAGE


def test_released_and_its_pages_are_lost(table: Table, sampling: Sampling) -> None:
    """All of it is evaluated again."""

    def pause(paused: Played, other: Played) -> None:
        table.release(paused)
        table.play(other)
        table.batch.reset_page_table()
        assert table.try_seat(paused)
        assert paused.seq.cached_tokens == 0

    assert _paused(table, sampling, pause) == PROMPT + 10 - 1  # the last token had not been evaluated before, either


def test_released_before_its_prompt_is_through(table: Table) -> None:
    wanted = table.alone(table.prompt(1200)).data
    paused = table.seat(table.prompt(1200))
    table.step(paused)
    assert not paused.steps
    table.release(paused)
    assert table.batch.used_tokens == 0
    assert table.try_seat(paused)
    assert paused.seq.cached_tokens == 2 * PAGE
    table.play(paused)
    assert paused.data == wanted


def test_released_again_and_again(table: Table, sampling: Sampling) -> None:
    wanted = table.alone(table.prompt(PROMPT), LENGTH, sampling=sampling).data
    paused = table.seat(table.prompt(PROMPT), LENGTH, sampling=sampling)
    while not paused.ended:
        table.step(paused)
        table.release(paused)
        assert table.try_seat(paused)
    assert paused.data == wanted


def test_everybody_else_leaves_while_one_is_parked(table: Table) -> None:
    """The library would tidy its cache then, and assert that nobody holds a page."""
    wanted = table.alone(table.prompt(PROMPT), LENGTH).data
    parked = table.seat(table.prompt(PROMPT), LENGTH)
    table.play(parked, tokens=10)
    for seed in range(1, 10):  # as often as it takes to touch every page
        table.play(table.seat(table.prompt(PROMPT, seed), 3))
    assert table.batch.access_serial >= table.batch.last_defrag_serial + table.batch.max_pages
    table.play(parked)
    assert parked.data == wanted
    assert table.batch.access_serial < table.batch.last_defrag_serial + table.batch.max_pages, (
        "it was tidied at the end"
    )


def test_the_cache_is_tidied_and_still_right(table: Table) -> None:
    """Pages are moved about, and a prompt that was kept is still found."""
    kept = table.prompt(PROMPT)
    wanted = table.alone(kept).data
    places = []
    for seed in range(1, 8):
        odd, even = table.seat(table.prompt(600, seed), 3), table.seat(table.prompt(300, seed + 50), 9)
        table.play(odd, even)
        table.play(table.seat(kept, 2))
        places.append([page.page_index for page in table.batch.all_pages])
    assert any(now != before for before, now in pairwise(places))
    again = table.seat(kept)
    assert again.seq.cached_tokens == PAGE
    table.play(again)
    assert again.data == wanted


def test_the_parked_count_as_seated(table: Table) -> None:
    """Were they not counted, the batch would be too large when they come back."""
    seated = [table.seat(table.prompt(20, seed)) for seed in range(table.stepper.info.slots)]
    table.step(*seated)
    table.step(seated[0])
    late = Played(seated[0].seq.request)
    assert not table.try_seat(late)
    table.leave(seated[1])
    assert table.try_seat(late)
    table.play(*seated, late)
    assert late.data == seated[0].data


# --- pages ----------------------------------------------------------------------------------------------------------


def test_who_finds_no_pages_gets_those_of_the_longest_parked(table: Table) -> None:
    """They come back, with the same output, before anybody new."""
    big = 6 * PAGE  # of 16 pages
    wanted = [table.alone(table.prompt(big - 100, seed), 100).data for seed in range(4)]
    first, second = (table.seat(table.prompt(big - 100, seed), 100) for seed in range(2))
    table.play(first, second, tokens=5)
    table.step(first)  # the second one is parked from here on, the first one after it
    table.step()
    third = table.seat(table.prompt(big - 100, 2), 100)
    assert second.seq.data in table.batch.shelved
    assert first.seq.data in table.batch.jobs
    table.play(first, third, tokens=20)
    late = Played(table.request(table.prompt(big - 100, 3), 100))
    table.step(first, second, third)  # there is nothing for the second one yet
    assert not table.try_seat(late), "it overtook who wants to come back"
    table.leave(third)
    table.play(first, second)
    assert [first.data, second.data] == wanted[:2]
    assert table.try_seat(late)
    table.play(late)
    assert late.data == wanted[3]
    assert table.batch.used_tokens == 0


def test_nobody_is_put_aside_in_vain(table: Table) -> None:
    *active, parked = (table.seat(table.prompt(4 * PAGE, seed), PAGE) for seed in range(3))  # 5 of 16 pages each
    table.play(*active, parked, tokens=1)
    table.step(*active)
    too_large = Played(table.request(table.prompt(6 * PAGE, 5), PAGE))
    assert not table.try_seat(too_large)
    assert parked.seq.data in table.batch.jobs


def test_who_waits_for_pages_and_is_paused_stops_nobody(table: Table) -> None:
    """Nobody takes a step any more that would tell; only the loop knows."""
    big = 6 * PAGE
    first, second = (table.seat(table.prompt(big - 100, seed), 100) for seed in range(2))
    table.play(first, second, tokens=1)
    table.step(first)
    third = table.seat(table.prompt(big - 100, 2), 100)
    table.step(first, second, third)
    assert second.seq.data in table.batch.shelved
    for played in (first, second, third):
        table.park(played)
    table.seat(table.prompt(20, 3))


def test_pages_taken_are_counted(table: Table) -> None:
    assert table.batch.evicted_tokens == 0
    for seed in range(8):
        table.play(table.seat(table.prompt(4 * PAGE, seed), 4))
    assert 8 * 4 * PAGE - 16 * PAGE <= table.batch.evicted_tokens <= 8 * 5 * PAGE


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
