"""Slots against a memory that is only a dict: who gets which prefix, and what has to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenflow_llamacpp.slots import Slot, Slots, common_prefix


class FakeMemory:
    """Sequence id to tokens, as llama.cpp would have them."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def memory_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        assert p1 == -1
        del self.tokens.setdefault(seq_id, [])[max(p0, 0) :]
        return True

    def memory_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
        assert p0 == 0 and not self.tokens.get(seq_id_dst)
        self.tokens[seq_id_dst] = self.tokens[seq_id_src][:p1]


class Desk:
    """Slots over a fake memory, with sequences that evaluate all they reserve."""

    def __init__(self, *, slots: int = 3, capacity: int = 100, keep: bool = True) -> None:
        self.memory = FakeMemory()
        self.slots = Slots(self.memory, slots=slots, capacity=capacity, keep=keep)

    def take(self, prompt: str, reserve: int = 20) -> Slot | None:
        tokens = tuple(map(ord, prompt))
        slot = self.slots.take(tokens, reserve)
        if slot is not None:
            self.cached = len(slot.tokens)
            assert self.cached < len(tokens)
            new = list(tokens[self.cached :])
            slot.tokens += new
            self.memory.tokens.setdefault(slot.id, []).extend(new)
        self.check()
        return slot

    def serve(self, prompt: str, reserve: int = 20) -> Slot:
        slot = self.take(prompt, reserve)
        assert slot is not None
        self.slots.release(slot)
        self.check()
        return slot

    def check(self) -> None:
        """The books are right, and nobody has more than there is."""
        every = self.slots._slots
        assert all(self.memory.tokens.get(slot.id, []) == slot.tokens for slot in every)
        assert self.slots.reserved == sum(slot.reserved for slot in every)
        assert self.slots.used == sum(len(slot.tokens) for slot in every)
        kept = sum(len(slot.tokens) for slot in every if not slot.reserved)
        assert self.slots.reserved + kept <= self.slots.capacity


def test_a_conversation_that_goes_on_stays_in_its_slot() -> None:
    desk = Desk()
    first = desk.serve("hello")
    assert desk.serve("hello, you") is first
    assert desk.cached == 5
    assert desk.slots.evicted == 0


def test_the_same_prompt_again_leaves_one_token_to_evaluate() -> None:
    desk = Desk()
    desk.serve("hello")
    desk.serve("hello")
    assert desk.cached == 4


def test_another_conversation_takes_a_copy_and_leaves_the_first_alone() -> None:
    desk = Desk()
    first = desk.serve("system: a")
    second = desk.serve("system: b")
    assert second is not first
    assert desk.cached == 8
    assert desk.serve("system: a, more") is first
    assert desk.cached == 9


def test_a_prefix_is_copied_from_an_active_slot() -> None:
    desk = Desk()
    first = desk.take("system: a")
    second = desk.take("system: b")
    assert second is not first
    assert desk.cached == 8


def test_a_strange_prompt_takes_the_slot_that_was_idle_longest() -> None:
    desk = Desk(slots=2)
    first = desk.serve("one")
    desk.serve("two")
    assert desk.serve("xyz") is first
    assert desk.cached == 0
    assert desk.slots.evicted == 3


def test_the_smaller_loss_is_taken() -> None:
    desk = Desk(slots=2)
    long = desk.serve("a long conversation")
    short = desk.serve("a lot")
    assert desk.serve("a lo?") is short  # cuts one token there, rather than 19 off the other one
    assert desk.serve("a long conversation?") is long


def test_no_slot_no_room() -> None:
    desk = Desk(slots=1)
    slot = desk.take("a")
    assert slot is not None
    assert desk.take("b") is None
    desk.slots.release(slot)
    assert desk.take("b") is slot


def test_reservations_fill_the_cache_before_the_slots() -> None:
    desk = Desk(slots=3, capacity=50)
    first = desk.take("a", 30)
    assert first is not None
    assert not desk.slots.has_room(21)
    assert desk.take("b", 21) is None
    assert desk.take("b", 20) is not None


def test_kept_prefixes_give_way_the_oldest_first() -> None:
    desk = Desk(slots=3, capacity=50)
    desk.serve("a" * 15)
    desk.serve("b" * 15)
    assert desk.take("c", 30) is not None
    assert desk.slots.evicted == 15
    desk.take("b" * 16, 16)
    assert desk.cached == 15


def test_without_keeping_a_slot_is_wiped() -> None:
    desk = Desk(keep=False)
    desk.serve("hello")
    assert desk.slots.used == 0
    desk.serve("hello")
    assert desk.cached == 0
    assert desk.slots.evicted == 0


def test_dropping_what_is_kept_spares_the_active() -> None:
    desk = Desk()
    desk.take("abc")
    desk.serve("xyz")
    assert desk.slots.drop_kept() == 3
    assert desk.slots.used == 3
    desk.check()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.text("ab", min_size=1, max_size=12), st.integers(12, 30)),
            st.integers(0, 5),
        ),
        max_size=40,
    ),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_books_hold_whatever_comes(todo: list[tuple[str, int] | int], slots: int, keep: bool) -> None:
    desk = Desk(slots=slots, capacity=60, keep=keep)
    active: list[Slot] = []
    for what in todo:
        if isinstance(what, tuple):
            slot = desk.take(*what)
            if slot is not None:
                active.append(slot)
        elif active:
            desk.slots.release(active.pop(what % len(active)))
            desk.check()


@pytest.mark.parametrize(
    ("kept", "prompt", "most", "same"),
    [("abc", "abd", 3, 2), ("abc", "abc", 2, 2), ("", "abc", 3, 0), ("abcdef", "abc", 3, 3), ("xbc", "abc", 2, 0)],
)
def test_common_prefix(kept: str, prompt: str, most: int, same: int) -> None:
    assert common_prefix(list(map(ord, kept)), tuple(map(ord, prompt)), most) == same
