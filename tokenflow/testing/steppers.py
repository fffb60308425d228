"""The plainest stepper there is, to try a loop with, and one whose steps a test lets through one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tokenflow.api import Sequence, Step, Stepper


class PlainStepper(Stepper):
    """Prefills `chunk` prompt tokens a step, then says `t0 t1 t2 …`, one a step. Replace a method to break it."""

    def __init__(self, *, slots: int = 2, chunk: int = 4) -> None:
        self.slots = slots
        self.chunk = chunk
        self.used: dict[Sequence, int] = {}
        """Who has a slot, and the prompt tokens that are still to be evaluated."""
        self.log: list[str] = []
        """Names of the calls so far, but for steps."""
        self.interrupts: list[Sequence | None] = []

    def open(self) -> None:
        self.log.append("open")

    def close(self) -> None:
        self.log.append("close")

    def add(self, seq: Sequence) -> bool:
        if len(self.used) >= self.slots:
            return False
        self.used[seq] = len(seq.request.prompt)
        self.log.append("add")
        return True

    def remove(self, seq: Sequence) -> None:
        del self.used[seq]
        self.log.append("remove")

    def step(self, run: list[Sequence]) -> Iterable[tuple[Sequence, Step]]:
        for seq in run:
            if self.used[seq] > 0:
                self.used[seq] -= self.chunk
            else:
                yield seq, self.token(seq)

    def token(self, seq: Sequence) -> Step:
        return Step(1, f"t{seq.generated} ".encode())

    def interrupt(self, seq: Sequence | None) -> None:
        self.interrupts.append(seq)


class GatedStepper(PlainStepper):
    """For a thread: each step announces itself in `entered`, and waits until the test releases `gate`."""

    def __init__(self, *, slots: int = 2, chunk: int = 4) -> None:
        super().__init__(slots=slots, chunk=chunk)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def step(self, run: list[Sequence]) -> Iterable[tuple[Sequence, Step]]:
        self.entered.release()
        self.gate.acquire()
        return super().step(run)
