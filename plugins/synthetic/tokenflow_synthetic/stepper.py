"""The stepper: every sequence has its own due time, and a step hands out what is due.

A step with nothing due waits for the earliest due time, but never longer than a slice: then the loop can apply what
came meanwhile (a new sequence, a cancel, credit), as after the step of a real model. `interrupt` ends the wait at once.
Without waits (`wait=False`) a step only looks at the clock: so it runs in a Trio task, in mock time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import monotonic

from tokenflow.api import EngineError, InvalidRequest, Sequence, Step
from tokenflow_synthetic.config import SyntheticConfig, plan
from tokenflow_synthetic.vocabulary import check, detokenize
from tokenflow_synthetic.words import steps

SLICE_S = 0.005
"""The longest step. Short beside a token of any model, long enough to cost no CPU."""
REMEMBERED = 1024
"""Requests whose counts are kept."""
_END = Step(1, b"", "stop")


@dataclass(slots=True, eq=False)
class Row:
    """A sequence in its slot."""

    plan: SyntheticConfig
    steps: Iterator[Step]
    prompt_tokens: int
    due: float
    interval_s: float
    fault_at: float
    """After this many tokens something is planned; infinite if nothing is."""
    at_a_time: int
    """Tokens in a step."""
    made: int = 0


class SyntheticStepper:
    """See the module.

    Args:
        config: what holds for every sequence whose prompt has no directive.
        clock: seconds; `trio.current_time` in mock time.
        wait: a step with nothing due waits, in the thread that it runs in.
    """

    def __init__(self, config: SyntheticConfig, *, clock: Callable[[], float] = monotonic, wait: bool = True) -> None:
        self.config = config
        self.prompt_tokens = 0
        self._requests: dict[str, list[Row]] = {}
        self.rows: dict[Sequence, Row] = {}
        self.unwedge = threading.Event()
        """Set it to free an engine that `wedge_at` hung."""
        self._clock = clock
        self._wait = wait
        self._run: list[Sequence] = []  # as it was last looked at, and when the first of it was due
        self._first_due = 0.0
        self._interrupt = threading.Lock()  # held until somebody interrupts
        self._interrupt.acquire()

    def open(self) -> None:
        pass

    def close(self) -> None:
        self.rows.clear()

    def add(self, seq: Sequence) -> bool:
        if len(self.rows) >= self.config.slots:
            return False
        if seq.data is not None:  # it gave its slot up, and goes on
            self.rows[seq] = seq.data
            return True
        request = seq.request
        try:
            check(request.prompt)
        except ValueError as exc:
            raise InvalidRequest(f"The prompt does not hold: {exc}.", param="prompt") from exc
        own = plan(self.config, detokenize(request.prompt)) if self.config.directives else self.config
        if own.raise_in_add:
            raise EngineError("A planned fault: raise_in_add.")
        prefill_s = own.prefill_ms / 1000 + len(request.prompt) / (own.prefill_tokens_per_s or math.inf)
        faults = [at for at in (own.raise_at, own.break_at, own.hang_at, own.wedge_at) if at is not None]
        row = Row(
            plan=own,
            steps=steps(own, request),
            prompt_tokens=len(request.prompt),
            due=self._clock() + prefill_s if prefill_s else -math.inf,
            interval_s=1 / own.tokens_per_s if own.tokens_per_s else 0.0,
            fault_at=min(faults, default=math.inf),
            at_a_time=own.tokens_per_step,
        )
        seq.data = self.rows[seq] = row
        self._remember(request.id, row)
        return True

    can_release = True

    def release(self, seq: Sequence) -> None:
        del self.rows[seq]  # `seq.data` has it, with where it is in the text

    def remove(self, seq: Sequence) -> None:
        if (row := self.rows.pop(seq, None)) is not None:
            row.steps = iter(())  # what it made is remembered, and not what it would have made
            self._run = []

    def interrupt(self, seq: Sequence | None) -> None:
        with suppress(RuntimeError):  # it is free already
            self._interrupt.release()

    def step(self, run: list[Sequence]) -> Iterator[tuple[Sequence, Step]]:
        now = self._clock()
        if now >= self._first_due or run != self._run:  # to look at all of them in every slice took more than to step
            self._run, self._first_due = run, min(seq.data.due for seq in run)
        if now < self._first_due:
            if self._wait:
                self._sleep(self._first_due - now)
            return
        interval_s = next_due = 0.0
        for seq in run:
            row: Row = seq.data
            if row.due > now:
                continue
            if row.made >= row.fault_at:
                yield from self._fault(seq, row)
                continue
            if not row.made:
                self.prompt_tokens += row.prompt_tokens
            step = next(row.steps, _END) if row.at_a_time == 1 else self._some(seq, row)
            row.made += step.tokens
            if row.interval_s:  # at the same moments for all sequences, as in a batch; what is late is not caught up
                if row.interval_s != interval_s:
                    interval_s = row.interval_s
                    next_due = (now // interval_s + 1) * interval_s
                row.due = next_due
            yield seq, step

    def _some(self, seq: Sequence, row: Row) -> Step:
        most = min(row.at_a_time, seq.request.max_tokens - row.made, row.fault_at - row.made)
        some = list(islice(row.steps, int(most)))
        if not some:
            return _END
        logprobs = tuple(logprob for step in some for logprob in step.logprobs)
        return Step(len(some), b"".join(step.piece for step in some), None, logprobs)

    def _fault(self, seq: Sequence, row: Row) -> Iterator[tuple[Sequence, Step]]:
        if row.made == row.plan.raise_at:
            yield seq, Step(error=EngineError(f"A planned fault: raise_at {row.made}."))
        elif row.made == row.plan.break_at:
            raise EngineError(f"A planned fault: break_at {row.made}.")
        elif row.made == row.plan.wedge_at:
            self.unwedge.wait()
            row.fault_at = math.inf
        else:
            row.due = math.inf

    def _sleep(self, duration_s: float) -> None:
        self._interrupt.acquire(timeout=min(max(duration_s, 0.0), SLICE_S))

    def _remember(self, request_id: str, row: Row) -> None:
        self._requests.setdefault(request_id, []).append(row)
        while len(self._requests) > REMEMBERED:
            del self._requests[next(iter(self._requests))]

    @property
    def made(self) -> dict[str, int]:
        """Tokens made, by request id; the last thousand requests."""
        return {id: sum(row.made for row in rows) for id, rows in self._requests.items()}

    def forget(self) -> None:
        """Count anew."""
        self._requests.clear()
