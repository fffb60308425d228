"""A paused sequence goes on exactly where it was: from its pages, from the cache, or from nothing.

Both plugins' tests run it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from plugins.exllama_common.tests.table import Played, Table
from tokenflow.api import Sampling

PAGE = 256
PROMPT, LENGTH = 470, 60
"""So that a page is filled while it says something."""
BIG = 6 * PAGE
"""Of 16 pages: two fit."""


def paused(table: Table, sampling: Sampling, pause: Callable[[Played, Played], None]) -> int:
    """One sequence pauses in the middle, another one goes on; both say what they say alone.

    Returns:
        How many tokens were evaluated after the pause.
    """
    asked = [(table.prompt(PROMPT), LENGTH), (table.prompt(20, seed=1), 235)]
    wanted = [table.alone(*ask, sampling=sampling).data for ask in asked]
    one, other = [table.seat(*ask, sampling=sampling) for ask in asked]
    table.play(one, other, tokens=30)
    pause(one, other)
    before = table.stepper.prompt_tokens, table.model.evaluated
    table.play(one, other)
    assert [one.data, other.data] == wanted
    assert table.batch.used_tokens == 0
    evaluated: int = table.model.evaluated - before[1]
    assert table.stepper.prompt_tokens - before[0] == evaluated, "it is counted as it was"
    return evaluated


def big(table: Table, seed: int) -> Played:
    """Takes six pages."""
    return Played(table.request(table.prompt(BIG - 110, seed), 100))


class Pausing:
    """A subclass is made in each plugin's tests, which have a `make_table`."""

    tidied_after: int
    """How often as many pages as there are must have been taken before the library tidies its page table."""

    @pytest.fixture
    def sampling(self) -> Sampling:
        """One with a state of its own."""
        raise NotImplementedError

    def test_parked_for_200_steps(self, table: Table, sampling: Sampling) -> None:
        """Nothing is evaluated again."""

        def pause(one: Played, other: Played) -> None:
            for _ in range(200):
                table.step(other)

        assert paused(table, sampling, pause) == 0

    def test_released_while_its_pages_are_kept(self, table: Table, sampling: Sampling) -> None:
        """No more than a page is evaluated again."""

        def pause(one: Played, other: Played) -> None:
            table.release(one)
            for _ in range(200):
                table.step(other)
            assert table.try_seat(one)
            assert one.seq.cached_tokens == PAGE

        assert paused(table, sampling, pause) <= PAGE

    def test_released_and_its_pages_are_taken(self, make_table: Callable[..., Table], sampling: Sampling) -> None:
        """All of it is evaluated again."""
        table = make_table(cache_tokens=8 * PAGE)

        def pause(one: Played, other: Played) -> None:
            table.release(one)
            hog = table.seat(table.prompt(6 * PAGE, seed=9), PAGE - 10)  # all pages but those of the other one
            table.play(hog, tokens=2)
            table.leave(hog)
            assert table.try_seat(one)
            assert one.seq.cached_tokens == 0

        assert paused(table, sampling, pause) == PROMPT + 30 - 1  # the last token drawn was not evaluated before

    def test_released_before_its_prompt_is_through(self, table: Table) -> None:
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

    def test_released_again_and_again(self, table: Table, sampling: Sampling) -> None:
        wanted = table.alone(table.prompt(PROMPT), LENGTH, sampling=sampling).data
        one = table.seat(table.prompt(PROMPT), LENGTH, sampling=sampling)
        while not one.ended:
            table.step(one)
            table.release(one)
            assert table.try_seat(one)
        assert one.data == wanted

    def test_everybody_else_leaves_while_one_is_parked(self, make_table: Callable[..., Table]) -> None:
        """The library would tidy its page table then, and assert that nobody holds a page."""
        table = make_table(cache_tokens=8 * PAGE)
        wanted = table.alone(table.prompt(PROMPT), LENGTH).data
        parked = table.seat(table.prompt(PROMPT), LENGTH)
        table.play(parked, tokens=10)
        pages = table.pages
        due = pages.last_defrag_serial + self.tidied_after * pages.max_pages
        for seed in range(1, 40):
            table.play(table.seat(table.prompt(PROMPT, seed), 2))
        assert pages.access_serial >= due > pages.last_defrag_serial
        table.play(parked)
        assert parked.data == wanted
        assert pages.access_serial == pages.last_defrag_serial, "it was tidied when the last one had gone"

    def test_the_cache_is_tidied_and_still_right(self, make_table: Callable[..., Table]) -> None:
        """Pages are moved about, and a prompt that was kept is still found."""
        table = make_table(cache_tokens=8 * PAGE)
        kept = table.prompt(PROMPT)
        wanted = table.alone(kept).data
        places = []
        for seed in range(1, 14):
            odd, even = table.seat(table.prompt(600, seed), 3), table.seat(table.prompt(300, seed + 50), 9)
            table.play(odd, even)
            table.play(table.seat(kept, 2))
            places.append([page.page_index for page in table.pages.all_pages])
        assert any(now != before for before, now in pairwise(places))
        again = table.seat(kept)
        assert again.seq.cached_tokens == PAGE
        table.play(again)
        assert again.data == wanted

    def test_the_parked_count_as_seated(self, table: Table) -> None:
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

    # --- pages --------------------------------------------------------------------------------------------------------

    def test_who_finds_no_pages_gets_those_of_the_longest_parked(self, table: Table) -> None:
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
        assert first.seq.data.pages
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

    def test_nobody_is_shelved_in_vain(self, table: Table) -> None:
        active, parked = (big(table, seed) for seed in range(2))
        hog = Played(table.request(table.prompt(2 * PAGE, 6), PAGE - 10))
        for one in (active, parked, hog):
            assert table.try_seat(one)
        table.play(active, parked, hog, tokens=1)
        table.step(active, hog)
        too_large = Played(table.request(table.prompt(7 * PAGE, 5), PAGE - 10))
        assert not table.try_seat(too_large)
        assert parked.seq.data.pages

    def test_who_waits_for_pages_and_is_paused_stops_nobody(self, table: Table) -> None:
        """Nobody takes a step any more that would tell; only the loop knows."""
        first, second, third = (big(table, seed) for seed in range(3))
        assert table.try_seat(first)
        assert table.try_seat(second)
        table.play(first, second, tokens=1)
        table.step(first)
        assert table.try_seat(third)
        table.step(first, second, third)
        assert second.seq.data in table.batch.shelved or second.seq.data in table.batch.pending_jobs
        table.park(first, second, third)
        table.seat(table.prompt(20, 3))

    def test_pages_taken_are_counted(self, table: Table) -> None:
        assert table.batch.evicted_tokens == 0
        for seed in range(8):
            table.play(table.seat(table.prompt(4 * PAGE + 1, seed), 4))
        assert 8 * 4 * PAGE - 16 * PAGE <= table.batch.evicted_tokens <= 8 * 5 * PAGE
