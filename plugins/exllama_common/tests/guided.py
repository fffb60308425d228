"""Sequences with a grammar: parked, released and failing, step by step. Both plugins' tests run it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from plugins.exllama_common.tests.faults import fail_once
from plugins.exllama_common.tests.table import Played, Table
from tokenflow.api import Grammar, Grammars, InvalidRequest, Sampling

GRAMMAR = Grammar(kind="regex", source="([a-c]{3}, ){20}done")
Seat = Callable[[], Awaitable[Played]]


class Guided:
    """A subclass is made in each plugin's tests, which have a `make_table`."""

    @pytest.fixture
    async def grammars(self, table: Table) -> AsyncIterator[Grammars]:
        async with table.stepper.vocabulary.grammars() as grammars:
            yield grammars

    @pytest.fixture
    def seat(self, table: Table, grammars: Grammars) -> Seat:
        """A sequence with a grammar, in the batch."""

        async def seat() -> Played:
            request = table.request(table.prompt(200), 240, grammar=GRAMMAR, sampling=Sampling(seed=3))
            played = Played(request)
            played.seq.matcher = await grammars.matcher(GRAMMAR)
            assert table.try_seat(played)
            return played

        return seat

    async def test_parked_and_released_in_the_middle_it_says_the_same(self, table: Table, seat: Seat) -> None:
        straight = await seat()
        table.play(straight)
        assert re.fullmatch(GRAMMAR.source, straight.data.decode())
        assert straight.ended is not None
        assert straight.ended.finish == "stop"  # though its end was to be ignored: nothing can follow
        table.forget()
        one, other = await seat(), table.seat(table.prompt(100, seed=1), 100)
        table.play(one, tokens=20)
        table.play(other, tokens=30)
        table.release(one)
        table.play(other, tokens=60)
        assert table.try_seat(one)
        table.play(one, other)
        assert one.data == straight.data

    async def test_a_step_that_fails_as_a_whole_moves_no_grammar(self, table: Table, seat: Seat) -> None:
        straight = await seat()
        table.play(straight)
        table.forget()
        one, other = await seat(), table.seat(table.prompt(100, seed=1), 100)
        table.play(one, other, tokens=20)
        failures = fail_once(table)
        table.play(one, other)
        assert failures == [2]
        assert one.data == straight.data

    async def test_a_mask_that_fails_ends_its_sequence_alone(
        self, table: Table, seat: Seat, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, other = await seat(), table.seat(table.prompt(100, seed=1))
        table.play(one, other, tokens=5)
        monkeypatch.setattr("tokenflow.api.grammar.MAX_STEP_S", 0.0)
        table.play(one, other)
        assert one.ended is not None
        assert isinstance(one.ended.error, InvalidRequest)
        assert other.tokens == 40
        assert table.batch.used_tokens == 0

    async def test_not_with_banned_strings(self, table: Table, grammars: Grammars) -> None:
        played = Played(table.request(table.prompt(10), grammar=GRAMMAR, sampling=Sampling(banned_strings=("a",))))
        played.seq.matcher = await grammars.matcher(GRAMMAR)
        with pytest.raises(InvalidRequest) as caught:
            table.try_seat(played)
        assert caught.value.param == "banned_strings"
