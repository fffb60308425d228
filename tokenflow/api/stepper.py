"""What a batched engine supplies, and `StepLoop` drives. Never compiled: a plugin may inherit from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenflow.api.loop import Sequence, Step


class Stepper(Protocol):
    """What a batched engine supplies. Called by the owner alone (but for `interrupt`), never two calls at once."""

    def open(self) -> None:
        """Load. In the owner's thread, since CUDA's state is per thread. Raises StartupError with a line for people."""

    def close(self) -> None:
        """Free everything. Called once, after `open` succeeded."""

    def add(self, seq: Sequence) -> bool:
        """Take a slot and its KV cache for `seq`. False: not now, ask again later. Raise: refuse this one."""

    def release(self, seq: Sequence) -> None:
        """`seq` gives its slot and KV cache to others, and will be `add`ed again to go on exactly where it was.

        Keep in `seq.data` what that takes (its tokens, its sampler). Only steppers that set `can_release` are asked.
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
        never twice without a whole step between.
        """
