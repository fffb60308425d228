"""The tables of states: every move that is not in them raises, and every state can be reached."""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Any

import pytest

from tokenflow.core.states import PHASE_MOVES, SEQUENCE_MOVES, Phase, SequenceState, move


def states(one: Enum) -> list[Enum]:
    """All states of the machine that `one` belongs to."""
    return list(type(one))


TABLES: list[tuple[Any, Any, Any]] = [
    (SEQUENCE_MOVES, SequenceState.WAITING, SequenceState.GONE),
    (PHASE_MOVES, Phase.QUEUE, Phase.DONE),
]
MOVES = [(table, a, b) for table, first, _ in TABLES for a, b in product(states(first), repeat=2)]


@pytest.mark.parametrize(("table", "state", "to"), MOVES, ids=lambda v: getattr(v, "name", ""))
def test_a_move_is_in_the_table_or_raises(table: Any, state: Any, to: Any) -> None:
    if to in table[state]:
        assert move(table, state, to) is to
    else:
        with pytest.raises(RuntimeError, match=f"no move from {state.name} to {to.name}"):
            move(table, state, to)


@pytest.mark.parametrize(("table", "first", "last"), TABLES)
def test_every_state_is_listed_reachable_and_can_end(table: Any, first: Any, last: Any) -> None:
    assert set(table) == set(states(first))
    reached, todo = {first}, [first]
    while todo:
        new = table[todo.pop()] - reached
        reached |= new
        todo += new
    assert reached == set(states(first))
    assert table[last] == frozenset()
    assert all(last in table[state] for state in reached - {last})


def test_a_parked_sequence_can_go_on_and_a_phase_never_goes_back() -> None:
    assert move(SEQUENCE_MOVES, SequenceState.PARKED, SequenceState.ACTIVE) is SequenceState.ACTIVE
    order = list(Phase)
    assert all(order.index(to) > order.index(phase) for phase in Phase for to in PHASE_MOVES[phase])
