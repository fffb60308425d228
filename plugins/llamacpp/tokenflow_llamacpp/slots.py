"""Who holds which part of the KV cache. Pure bookkeeping over the few calls of a `Memory`.

There is one cache for all (`kv_unified`), counted in tokens, and `slots` sequence ids in it. A slot is active (a
sequence holds it, and with it a reservation for its prompt and all its max_tokens, so that a step never runs out of
cache) or idle (it keeps what it had, for the next prompt that begins the same way).

    take     the longest common prefix with any slot, active ones too, is reused. If that slot is idle and little would
             be lost, the newcomer moves in and cuts the rest off; else it gets the slot that was idle longest and a
             copy of the prefix, which costs no cache (llama.cpp marks the cells as shared).
    release  the slot keeps its tokens and goes idle.
    room     reservations + what idle slots keep <= capacity; idle ones give way, the longest idle first.

A shared prefix is counted once for each slot that has it: on the safe side, and still exact when its sharer goes.
"""

from __future__ import annotations

from typing import Protocol


class Memory(Protocol):
    """cyllama's `LlamaContext`, as far as it is needed here."""

    def memory_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool: ...

    def memory_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None: ...


class Slot:
    """One sequence id and the tokens that the KV cache has for it, position by position."""

    __slots__ = ("id", "ids", "last_used", "reserved", "tokens")

    def __init__(self, id: int) -> None:
        self.id = id
        self.ids = [id]
        """What a batch wants to have, made once."""
        self.tokens: list[int] = []
        self.reserved = 0
        """Tokens that its sequence may come to hold; 0: idle."""
        self.last_used = 0


class Slots:
    """All slots of one context.

    Args:
        memory: the context.
        slots: how many sequence ids it has.
        capacity: tokens in its cache.
        keep: reuse prefixes.
    """

    def __init__(self, memory: Memory, *, slots: int, capacity: int, keep: bool) -> None:
        self._memory = memory
        self._slots = [Slot(id) for id in range(slots)]
        self._keep = keep
        self._clock = 0
        self.capacity = capacity
        self.reserved = 0
        self.evicted = 0
        """Counter: kept tokens that were thrown out to make room."""

    @property
    def used(self) -> int:
        """Tokens in the cache, of sequences and kept."""
        return sum(len(slot.tokens) for slot in self._slots)

    def has_room(self, reserve: int) -> bool:
        """`take` would succeed; quick, since whoever waits asks at every step."""
        return self.reserved + reserve <= self.capacity and not all(slot.reserved for slot in self._slots)

    def take(self, prompt: tuple[int, ...], reserve: int) -> Slot | None:
        """A slot with `reserve` tokens for a sequence, its `tokens` being what of `prompt` is there already.

        At least one token of the prompt is left to evaluate, since the next one is drawn from it. None: no room now.
        """
        if not self.has_room(reserve):
            return None
        idle = [slot for slot in self._slots if not slot.reserved]
        source, common = self._longest_prefix(prompt)
        oldest = min(idle, key=lambda slot: (bool(slot.tokens), slot.last_used))
        target = oldest
        if source is not None and not source.reserved and len(source.tokens) - common <= len(oldest.tokens):
            target = source
        if source is target:
            self._cut(target, common)
        else:
            self._cut(target, 0)
            if source is not None:
                self._memory.memory_seq_cp(source.id, target.id, 0, common)
                target.tokens = source.tokens[:common]
        target.reserved = reserve
        self.reserved += reserve
        self._make_room()
        return target

    def release(self, slot: Slot) -> None:
        """Its sequence has left."""
        self.reserved -= slot.reserved
        slot.reserved = 0
        self._clock += 1
        slot.last_used = self._clock
        if not self._keep:
            self.wipe(slot)

    def set_back(self, slot: Slot) -> bool:
        """Forget what a step that was cut short left beyond `slot.tokens`. False: this memory cannot."""
        return self._memory.memory_seq_rm(slot.id, len(slot.tokens), -1)

    def wipe(self, slot: Slot) -> None:
        self._memory.memory_seq_rm(slot.id, -1, -1)
        slot.tokens = []

    def wipe_all(self) -> None:
        for slot in self._slots:
            self.wipe(slot)

    def drop_kept(self) -> int:
        """Give up everything that is only kept; how many tokens that was."""
        kept = [slot for slot in self._slots if not slot.reserved]
        before = self.evicted
        for slot in kept:
            self._cut(slot, 0)
        return self.evicted - before

    def _longest_prefix(self, prompt: tuple[int, ...]) -> tuple[Slot | None, int]:
        """The slot that has most of `prompt`; of several, an idle one that would lose least."""
        if not self._keep:
            return None, 0
        most = len(prompt) - 1
        common, _, _, source = max(
            (
                (common_prefix(slot.tokens, prompt, most), not slot.reserved, -len(slot.tokens), slot)
                for slot in self._slots
            ),
            key=lambda choice: choice[:3],
        )
        return (source, common) if common else (None, 0)

    def _cut(self, slot: Slot, at: int) -> None:
        lost = len(slot.tokens) - at
        if not lost:
            return
        self.evicted += lost
        self._memory.memory_seq_rm(slot.id, at or -1, -1)
        del slot.tokens[at:]

    def _make_room(self) -> None:
        kept = [slot for slot in self._slots if not slot.reserved and slot.tokens]
        total = self.reserved + sum(len(slot.tokens) for slot in kept)
        for slot in sorted(kept, key=lambda slot: slot.last_used):
            if total <= self.capacity:
                return
            total -= len(slot.tokens)
            self._cut(slot, 0)


def common_prefix(kept: list[int], prompt: tuple[int, ...], most: int) -> int:
    """How many of the first `most` tokens are the same."""
    most = min(most, len(kept))
    if tuple(kept[:most]) == prompt[:most]:  # the usual cases, a conversation that goes on and a strange one, are quick
        return most
    return next(n for n in range(most) if kept[n] != prompt[n])
