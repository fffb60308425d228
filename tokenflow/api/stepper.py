"""What a batched engine supplies, and `StepLoop` drives. Never compiled: a plugin may inherit from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenflow.api.loop import Sequence, Step


class Stepper(Protocol):
    """What a batched engine supplies. Called by the owner alone (but for `interrupt`), never two calls at once.

        add -> step ... -> remove
        add -> step ... -> release, add -> step ... -> remove

    A sequence that has a slot at its end, since `add` returned True and no `release` followed, is `remove`d, once. One
    that has none, for it was refused, or cancelled while it waited or had been released, is heard of no more: what
    `seq.data` has then is freed with it, as Python's objects are.
    """

    can_release: bool = False
    """`release` may be called: a sequence can give its slot to others, and go on later."""

    def open(self) -> None:
        """Load. In the owner's thread, since CUDA's state is per thread. Raises StartupError with a line for people."""

    def close(self) -> None:
        """Free everything. Called once, after `open` succeeded."""

    def add(self, seq: Sequence) -> bool:
        """Take a slot and its KV cache for `seq`, be it new or released. False: not now, ask again later; it may be
        cancelled meanwhile. Raise: refuse this one, which ends with this error.
        """

    def release(self, seq: Sequence) -> None:
        """`seq` has given its slot and KV cache to others when this returns. Must not raise.

        If it is `add`ed again, it goes on exactly where it was: keep in `seq.data` what that takes (its tokens, its
        sampler). It may not be, and then nothing more is called for it. Only steppers that set `can_release` are asked.
        """

    def remove(self, seq: Sequence) -> None:
        """`seq` leaves: its slot and KV cache are free when this returns. Must not raise."""

    def step(self, run: list[Sequence]) -> Iterable[tuple[Sequence, Step]]:
        """Take one step of the batch; one Step a sequence (none while it prefills).

        `run` is who may take part. One that holds a slot and is not in it is paused: keep its state, give it nothing.
        Where several tokens are certain, a sequence may get a Step for each, in order, at most `seq.room` of them;
        what comes after its end is dropped.
        Raising fails every sequence that holds a slot.
        """

    def interrupt(self, seq: Sequence | None) -> None:
        """From any thread, at any time: end a long step early, with every sequence as it was before it.

        `seq` is the one that is leaving; None: everybody is. Doing nothing is allowed. It is asked at once where `seq`
        prefills in this step, otherwise only once the step has shown to be long; and, where somebody in the step stays,
        never twice without a whole step between. What it raises is logged once, and changes nothing.
        """
