"""A paused sequence goes on exactly where it was: from its pages, from the cache, or from nothing."""

from __future__ import annotations

from collections.abc import Callable

from tokenflow_exllamav3.config import PAGE

from plugins.exllama_common.tests.table import Played, Table
from tokenflow.api import Dry, Sampling

SAMPLING = Sampling(seed=7, min_p=0.05, repetition_penalty=1.2, dry=Dry(multiplier=2.0, allowed_length=1))
PROMPT, LENGTH = 470, 60
"""So that a page is filled while it says something."""


def paused(table: Table, pause: Callable[[Played, Played], None]) -> int:
    """One sequence pauses in the middle, another one goes on; both say what they say alone.

    Returns:
        How many tokens were evaluated for the paused one from its pause on.
    """
    asked = [(table.prompt(PROMPT), LENGTH), (table.prompt(20, seed=1), 235)]
    wanted = [table.alone(*ask, sampling=SAMPLING).data for ask in asked]
    one, other = [table.seat(*ask, sampling=SAMPLING) for ask in asked]
    table.play(one, other, tokens=30)
    before = table.stepper.prompt_tokens, table.model.evaluated
    pause(one, other)
    table.play(one, other)
    assert [one.data, other.data] == wanted
    assert table.batch.used_tokens == 0
    evaluated = table.model.evaluated - before[1]
    assert table.stepper.prompt_tokens - before[0] == evaluated, "it is counted as it was"
    return evaluated


def test_parked_for_200_steps(table: Table) -> None:
    """Nothing is evaluated again."""

    def pause(one: Played, other: Played) -> None:
        for _ in range(200):
            table.step(other)

    assert paused(table, pause) == 0


def test_released_while_its_pages_are_kept(table: Table) -> None:
    """No more than a page is evaluated again."""

    def pause(one: Played, other: Played) -> None:
        table.release(one)
        for _ in range(200):
            table.step(other)
        assert table.try_seat(one)
        assert one.seq.cached_tokens == PAGE

    assert paused(table, pause) <= PAGE


def test_released_and_its_pages_are_taken(make_table: Callable[..., Table]) -> None:
    """All of it is evaluated again."""
    table = make_table(cache_tokens=8 * PAGE)

    def pause(one: Played, other: Played) -> None:
        table.release(one)
        hog = table.seat(table.prompt(6 * PAGE, seed=9), PAGE - 10)  # all pages but those of the other one
        evaluated = table.model.evaluated
        table.play(hog, tokens=2)
        assert table.model.evaluated == evaluated + 6 * PAGE - 1
        table.leave(hog)
        table.model.evaluated, table.stepper.prompt_tokens = evaluated, table.stepper.prompt_tokens - 6 * PAGE
        assert table.try_seat(one)
        assert one.seq.cached_tokens == 0

    assert paused(table, pause) == PROMPT + 30 - 1  # the last token drawn was not evaluated before, either


def test_released_before_its_prompt_is_through(table: Table) -> None:
    wanted = table.alone(table.prompt(1200)).data
    one = table.seat(table.prompt(1200))
    table.step(one)
    assert not one.steps
    table.release(one)
    assert table.batch.used_tokens == 0
    assert table.try_seat(one)
    assert one.seq.cached_tokens == 2 * PAGE
    table.play(one)
    assert one.data == wanted


def test_released_again_and_again(table: Table) -> None:
    wanted = table.alone(table.prompt(PROMPT), LENGTH, sampling=SAMPLING).data
    one = table.seat(table.prompt(PROMPT), LENGTH, sampling=SAMPLING)
    while not one.ended:
        table.step(one)
        table.release(one)
        assert table.try_seat(one)
    assert one.data == wanted


def test_everybody_else_leaves_while_one_is_parked(make_table: Callable[..., Table]) -> None:
    """The library would tidy its page table then, and assert that nobody holds a page."""
    table = make_table(cache_tokens=8 * PAGE)
    wanted = table.alone(table.prompt(PROMPT), LENGTH).data
    parked = table.seat(table.prompt(PROMPT), LENGTH)
    table.play(parked, tokens=10)
    pages = table.batch.pagetable
    for seed in range(1, 40):  # as often as it takes to be due
        table.play(table.seat(table.prompt(PROMPT, seed), 2))
    assert pages.access_serial >= pages.last_defrag_serial + 8 * pages.max_pages
    table.play(parked)
    assert parked.data == wanted
    assert pages.access_serial == pages.last_defrag_serial, "it was tidied when the last one had gone"


def test_the_cache_is_tidied_and_still_right(make_table: Callable[..., Table]) -> None:
    """Pages are moved about, and a prompt that was kept is still found."""
    table = make_table(cache_tokens=8 * PAGE)
    kept = table.prompt(PROMPT)
    wanted = table.alone(kept).data
    for seed in range(1, 14):
        table.play(*[table.seat(table.prompt(PROMPT, seed + 100 * n), 2 + n) for n in range(3)])
    table.play(table.seat(kept))
    again = table.seat(kept)
    assert again.seq.cached_tokens == PAGE
    table.play(again)
    assert again.data == wanted
    moved = [page.page_index for page in table.batch.pagetable.all_pages]
    assert moved != sorted(moved)


def test_the_parked_count_as_seated(table: Table) -> None:
    """Were they not counted, the batch would be too large when they come back."""
    seated = [table.seat(table.prompt(20, seed)) for seed in range(4)]
    table.play(*seated, tokens=1)
    table.step(seated[0])
    late = Played(seated[0].seq.request)
    assert not table.try_seat(late)
    table.leave(seated[1])
    assert table.try_seat(late)
    table.play(seated[0], seated[2], seated[3], late)
    assert late.data == seated[0].data
    assert max(table.model.decoded) == 4


# --- pages ------------------------------------------------------------------------------------------------------------

BIG = 6 * PAGE
"""Of 16 pages: two fit."""


def big(table: Table, seed: int) -> Played:
    return Played(table.request(table.prompt(BIG - 110, seed), 100))


def test_who_finds_no_pages_gets_those_of_the_longest_parked(table: Table) -> None:
    """They come back, with the same output, before anybody new."""
    wanted = [table.alone(table.prompt(BIG - 110, seed), 100).data for seed in range(4)]
    first, second, third, late = (big(table, seed) for seed in range(4))
    assert table.try_seat(first)
    assert table.try_seat(second)
    table.play(first, second, tokens=5)
    table.step(first)  # the second one is parked from here on, the first one after it
    table.park(first)
    assert table.try_seat(third)
    assert second.seq.data in table.batch.shelved
    assert first.seq.data in table.batch.parked
    table.play(first, third, tokens=20)
    table.step(first, second, third)  # there is nothing for the second one yet
    assert not table.try_seat(late), "it overtook who wants to come back"
    table.leave(third)
    table.play(first, second)
    assert [first.data, second.data] == wanted[:2]
    assert table.try_seat(late)
    table.play(late)
    assert late.data == wanted[3]
    assert table.batch.used_tokens == 0


def test_nobody_is_shelved_in_vain(table: Table) -> None:
    active, parked = (big(table, seed) for seed in range(2))
    hog = Played(table.request(table.prompt(2 * PAGE, 6), PAGE - 10))
    for one in (active, parked, hog):
        assert table.try_seat(one)
    table.play(active, parked, hog, tokens=1)
    table.step(active, hog)
    too_large = Played(table.request(table.prompt(7 * PAGE, 5), PAGE - 10))
    assert not table.try_seat(too_large)
    assert parked.seq.data in table.batch.parked


def test_who_waits_for_pages_and_is_paused_stops_nobody(table: Table) -> None:
    """Nobody takes a step any more that would tell; only the loop knows."""
    first, second, third = (big(table, seed) for seed in range(3))
    assert table.try_seat(first)
    assert table.try_seat(second)
    table.play(first, second, tokens=1)
    table.step(first)
    assert table.try_seat(third)
    table.step(first, second, third)
    table.park(first, second, third)
    table.seat(table.prompt(20, 3))


def test_a_page_at_a_time(make_table: Callable[..., Table]) -> None:
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


def test_pages_taken_are_counted(table: Table) -> None:
    assert table.batch.evicted_tokens == 0
    for seed in range(8):
        table.play(table.seat(table.prompt(4 * PAGE + 1, seed), 4))
    assert 8 * 4 * PAGE - 16 * PAGE <= table.batch.evicted_tokens <= 8 * 5 * PAGE
