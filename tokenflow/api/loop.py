"""StepLoop: one owner of one batch, for every engine that decodes token by token.

The owner calls `tick` again and again. One tick applies commands that came from Trio (add, cancel, wake), hands out
acknowledgements, takes one step of the batch, and hands out all its events in one callback on Trio's side.

    Trio's side                         the owner's side (a thread; in tests a Trio task)
    generate() -- _post(add) ---------> _apply: stepper.add, or it stays waiting
    credit     -- sequence.limit -----> tick: who has credit takes part in the step; absence is pause
    cancel     -- _post(cancel) ------> _apply: stepper.remove, acknowledged before the next step
    _drain  <---- run_sync_soon ------- _flush: events and acknowledgements, in order, one callback for all

Rules that hold it together:

* Only the owner touches the stepper, the sequences' state and the batch. Trio writes `limit` and `cancelled` alone.
* Credit is one integer, written by Trio and read by the owner before each step. After parking a sequence, or taking its
  slot, the owner reads it once more: Trio, which wakes only parked ones and those without a slot, may have written
  between the two (a lost wake-up otherwise).
* Acknowledgements go out before the step, so that a cancel never waits for the step after the one it interrupted.
* From the moment of its cancel nothing of a sequence reaches its `Send`; tokens are counted as dropped.
* A stepper that raises in `remove` leaves a slot that nobody knows the owner of: the loop ends, every caller is let go
  with an error, and the engine's host opens it anew.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

import trio

from tokenflow.api.grammar import Matcher
from tokenflow.api.send import GIVE_UP_SLOT, Send
from tokenflow.api.stepper import Stepper
from tokenflow.core.states import SEQUENCE_MOVES, SequenceState, move
from tokenflow.core.stopping import TextAssembler
from tokenflow.core.types import (
    Delta,
    Finished,
    FinishReason,
    Released,
    Resumed,
    SequenceRequest,
    Started,
    TokenLogprob,
)
from tokenflow.errors import EngineClosed, EngineError, EngineStuck


@dataclass(slots=True, init=False)  # its own __init__: most engines make one for every token
class Step:
    """What one step made for one sequence. It does not change: a stepper may give the same one again.

    Its parts are of just the types that they are said to be: compiled, it refuses a bytearray or NumPy's integers.

    Attributes:
        tokens: how many tokens were sampled (an end-of-sequence token counts), usually 1.
        piece: their text as bytes; any split of a character is fine.
        finish: the model ended by itself. Stop strings and max_tokens are the loop's affair.
        logprobs: one per token, where asked for. Their bytes make up the piece, but for tokens that are not shown.
        error: this sequence failed; it ends alone. The rest is ignored.
    """

    tokens: int
    piece: bytes
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...]
    error: Exception | None

    def __init__(
        self,
        tokens: int = 1,
        piece: bytes = b"",
        finish: FinishReason | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        error: Exception | None = None,
    ) -> None:
        self.tokens = tokens
        self.piece = piece
        self.finish = finish
        self.logprobs = logprobs
        self.error = error


class Sequence:
    """One sequence as a stepper sees it: `request` is what to do, `data` is the stepper's own.

    `matcher` is there if the request has a grammar: the stepper draws only what it allows, and tells it what was drawn.
    """

    __slots__ = (
        "_assembler",
        "_logprobs",
        "_loop",
        "_told_chars",
        "away",
        "cached_tokens",
        "cancelled",
        "data",
        "emitted",
        "error",
        "generated",
        "limit",
        "lost_step",
        "matcher",
        "released",
        "request",
        "send",
        "started",
        "state",
        "trace",
    )

    def __init__(
        self, request: SequenceRequest, send: Send, matcher: Matcher | None = None, loop: StepLoop | None = None
    ) -> None:
        self.request = request
        self.matcher = matcher
        self.data: Any = None
        self.cached_tokens = 0
        """Set by the stepper in `add`: prompt tokens that a prefix cache had."""
        self.generated = 0
        """Tokens sampled so far."""
        self.state = SequenceState.WAITING
        # The loop's own. `limit` and `cancelled` are written on Trio's side, the rest by the owner.
        self.send = send
        self.limit = 0
        self.emitted = 0
        self.away = False
        """It gave up its slot, or its place in the queue, and has not asked for another yet."""
        self.started = False
        """It has had a slot."""
        self.cancelled = False
        self.lost_step = _NONE
        """Number of the last step that it lost because somebody else left; Trio's side."""
        self.released = trio.Event()
        self.error: Exception | None = None
        self.trace: TracebackType | None = None
        """Where the error came from. Others may be told of the same one, and where they stood is added to it then."""
        self._loop = loop
        self._assembler = TextAssembler(request.stop)
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # not told yet, with where in the text each begins
        self._told_chars = 0

    @property
    def room(self) -> int:
        """How many tokens it may get in one step, if more than one is certain: by its credit and by max_tokens.

        At least 1: credit may have been withdrawn since the step began.
        """
        return max(1, min(self.limit - self.emitted, self.request.max_tokens - self.generated))

    @property
    def parked(self) -> bool:
        """It has a slot and no credit: it takes part in no step now. As of the last tick; the owner's side."""
        return self.state is SequenceState.PARKED

    def take(self, step: Step) -> tuple[Delta | None, Finished | None]:
        """Turn a step into events: text that is certain now, and the end if this was it."""
        self.generated += step.tokens
        scored = self.request.logprobs is not None
        text = self._push_scored(step) if scored else self._assembler.push(step.piece)
        reason: FinishReason | None = "stop" if self._assembler.stopped else step.finish
        if reason is None and self.generated >= self.request.max_tokens:
            reason = "length"
        if reason is not None and not self._assembler.stopped:
            text += self._assembler.flush()
            if self._assembler.stopped:
                reason = "stop"
        logprobs = self._tell(text, reason) if scored else ()
        delta = Delta(text, step.tokens, logprobs) if step.tokens or text else None
        return delta, None if reason is None else Finished(reason)

    def _push_scored(self, step: Step) -> str:
        """The text that is certain now. Pushed token by token, to know where each one's text begins."""
        text, at, left = "", 0, len(step.logprobs)
        for token in step.logprobs:
            left -= 1
            own = len(token.bytes) if step.piece.startswith(token.bytes, at) else 0
            end = at + own if left else len(step.piece)
            self._logprobs.append((self._told_chars + len(text) + self._assembler.held_chars, token))
            text += self._assembler.push(step.piece[at:end])
            at = end
        return text if step.logprobs else self._assembler.push(step.piece)

    def _tell(self, text: str, reason: FinishReason | None) -> tuple[TokenLogprob, ...]:
        """The log-probabilities that go with `text`: those of tokens of which it has the beginning.

        What is held keeps its log-probabilities with it, and a stop string's own tokens are never sent.
        """
        self._told_chars += len(text)
        if not text and reason is None:
            return ()
        count = len(self._logprobs)
        if reason is None or self._assembler.stopped:
            while count and self._logprobs[count - 1][0] >= self._told_chars:
                count -= 1
        told = tuple([token for _, token in self._logprobs[:count]])
        del self._logprobs[:count]
        return told

    def _credited(self, limit: int) -> None:
        """Its reader has moved, on Trio's side."""
        self.limit = limit
        assert self._loop is not None
        if limit == GIVE_UP_SLOT:
            self._loop._post("release", self)
        elif self.emitted < limit and (self.away or self.state is SequenceState.PARKED):
            self._loop._post("wake", self)

    def _failed(self, error: Exception) -> None:
        self.error, self.trace = error, error.__traceback__

    def _move(self, to: SequenceState) -> None:
        self.state = move(SEQUENCE_MOVES, self.state, to)


_NONE = -1
"""`lost_step` of a sequence that has lost none: low enough that `step - lost_step > 1` at step 1 too."""
Pace = Callable[["StepLoop"], Awaitable[None]]

DRAIN_EVENTS = 256
"""Events that are handed out at a time: some milliseconds."""

SHORT_STEP_S = 0.05
"""Who leaves waits this long for the end of a step that it does not prefill in; then the step is interrupted."""

log = logging.getLogger("tokenflow.engines")


class StepLoop:
    """Runs a Stepper's batch for any number of `generate` calls.

    Args:
        stepper: the engine's part.
        grace_s: how long a cancelled sequence may take to be let go before `EngineStuck`.
    """

    def __init__(self, stepper: Stepper, *, grace_s: float = 5.0) -> None:
        self.stepper = stepper
        self.grace_s = grace_s
        self.steps = 0
        """Counter: batch steps taken."""
        self.generated = 0
        """Counter: tokens sampled, delivered or not."""
        self.busy = False
        """Trio's side: there may be work that is not finished."""
        self.on_busy: Callable[[bool], None] = lambda busy: None
        """Called on Trio's side when `busy` changes; a test pins its mock clock with it."""
        self._commands: deque[tuple[str, Sequence]] = deque()
        self._waiting: deque[Sequence] = deque()
        self._away: dict[Sequence, None] = {}  # whoever has no slot and is not to have one
        self._held: dict[Sequence, None] = {}  # whoever has a slot, in order of arrival
        self._running: list[Sequence] = []
        self._out: deque[tuple[Sequence | None, Any]] = deque()
        self._drain_is_due = False
        self._posted = self._applied = 0  # commands: written by Trio alone, by the owner alone
        self._parked_anew = False
        self._hint_failed = False
        self._step_began: float | None = None
        self._broken: Exception | None = None
        self._stop = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake: Callable[[], None] = lambda: None

    # --- Trio's side ------------------------------------------------------------------------------------------------

    async def generate(self, request: SequenceRequest, send: Send, matcher: Matcher | None = None) -> None:
        """One sequence, from here to its free slot: the whole of `Engine.generate`."""
        if self._stop or self._token is None:
            raise EngineClosed("The engine is not open.")
        await trio.lowlevel.checkpoint_if_cancelled()  # a fast owner would be done before a parked task learns of it
        seq = Sequence(request, send, matcher, self)
        seq.limit = send.limit
        self._post("add", seq)
        send.listen(seq._credited)  # after it: what is posted here finds the sequence in its place
        try:
            await seq.released.wait()
        except BaseException:
            seq.cancelled = True
            self._post("cancel", seq)
            if not seq.generated and seq in self._running:
                self._interrupt(seq)
            with trio.move_on_after(self.grace_s, shield=True):
                await self._wait_released(seq)
            if not seq.released.is_set():
                raise EngineStuck(
                    f"The engine did not let a cancelled sequence go within {self.grace_s:g} s; its step has taken "
                    f"{self.step_age_s:.1f} s."
                ) from None
            raise
        finally:
            send.listen(None)
            error, trace = seq.error, seq.trace
            seq.error = seq.trace = None  # their frames have the sequence
        if error is not None:
            try:
                raise error.with_traceback(trace)
            finally:
                error = trace = None  # and this one

    @property
    def can_release(self) -> bool:
        """Its stepper can let a sequence give up its slot and go on later."""
        return bool(getattr(self.stepper, "can_release", False))  # one that does not inherit need not have it

    @property
    def step_age_s(self) -> float:
        """Seconds that the step in progress has taken (wall time); 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else perf_counter() - began

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Sequences that hold a slot."""
        return len(self._held)

    @property
    def parked(self) -> int:
        """Sequences that hold a slot and take no steps."""
        return sum(seq.state is SequenceState.PARKED for seq in list(self._held))

    async def _wait_released(self, seq: Sequence) -> None:
        """Wait for the slot of a cancelled sequence.

        It may be one that has no part in the step, or not even a slot: commands are applied between steps, and the
        step may be the prefill of somebody else's long prompt.
        """
        with trio.move_on_after(SHORT_STEP_S):
            await seq.released.wait()
        if not seq.released.is_set():
            self._interrupt(seq)
            await seq.released.wait()

    def _interrupt(self, seq: Sequence) -> None:
        """End the step in progress for `seq`, unless somebody who stays has lost it already, or the one before it."""
        running, step = self._running, self.steps
        stay = [other for other in running if not other.cancelled]
        # Between steps there is nothing to end: who leaves is let go before the next.
        if not running or any(step - other.lost_step <= 1 for other in stay):
            return
        for other in stay:
            other.lost_step = step
        self._ask_to_end(seq)

    def _ask_to_end(self, seq: Sequence | None) -> None:
        """A hint. A faulty one changes nothing but how long it takes; its author wants the place, once."""
        try:
            self.stepper.interrupt(seq)
        except Exception:
            if not self._hint_failed:
                self._hint_failed = True
                log.exception("The engine failed to end a step early; a cancel waits for the step")

    def _post(self, command: str, seq: Sequence) -> None:
        self._posted += 1
        self._commands.append((command, seq))
        self._set_busy(True)
        self._wake()

    def _set_busy(self, busy: bool) -> None:
        if busy is not self.busy:
            self.busy = busy
            self.on_busy(busy)

    def _drain(self) -> None:
        """Hand out what the owner made. Runs outside any stream's task, so nothing of theirs may escape.

        Not without end, though the owner goes on meanwhile: others want to be served too.
        """
        self._drain_is_due = False  # before emptying: what comes after this line rings again
        told: list[Sequence] = []
        for _ in range(min(len(self._out), DRAIN_EVENTS)):
            seq, event = self._out.popleft()
            if seq is None:  # the owner is idle, if it had seen every command when it said so
                self._set_busy(event < self._posted or self._stop)
            elif event is None:
                seq.released.set()
            elif not seq.cancelled:
                try:
                    seq.send.put(event)
                    told.append(seq)
                except Exception as exc:
                    self._broke(seq, exc)
            elif type(event) is Delta:
                seq.send.dropped += event.tokens
        for seq in told:
            if not seq.cancelled:
                try:
                    seq.send.settle()
                except Exception as exc:
                    self._broke(seq, exc)
        self._flush()

    def _broke(self, seq: Sequence, error: Exception) -> None:
        """The stream's fault, and its alone."""
        seq.cancelled = True
        seq._failed(error)
        self._post("cancel", seq)

    # --- the owner's side -------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Commands, acknowledgements, one step, events. True: call again at once. Never raises for one sequence."""
        self._apply()
        self._flush()
        self._parked_anew = False
        run = self._runnable()
        if run:
            self._step(run)
        # A stepper may take from who has just been parked what it had not for who waits.
        more = bool(run or self._commands or (self._parked_anew and self._waiting))
        if not more:
            self._out.append((None, self._applied))
        self._flush()
        if self._broken is not None:
            raise self._broken
        return more

    def _apply(self) -> None:
        while self._commands:
            command, seq = self._commands.popleft()
            self._applied += 1
            if command == "add":
                self._waiting.append(seq)
            elif command == "cancel":
                self._release(seq)
            elif command == "release":
                self._give_up(seq)
            else:
                self._call_back(seq)
        while self._waiting and self._admit(self._waiting[0]):
            self._waiting.popleft()

    def _admit(self, seq: Sequence) -> bool:
        """Give `seq` its slot. False: no room now."""
        try:
            if not self.stepper.add(seq):
                return False
        except Exception as exc:
            seq._failed(exc)
            seq._move(SequenceState.GONE)
            self._out.append((seq, None))
            return True
        seq._move(SequenceState.ACTIVE)
        self._held[seq] = None
        cached = seq.cached_tokens
        self._out.append((seq, Resumed(cached) if seq.started else Started(len(seq.request.prompt), cached)))
        seq.started = True
        return True

    def _give_up(self, seq: Sequence) -> None:
        """Free the slot of one that has been asked to, unless it has been called back since.

        One that has none just now, for it waits for one or gave it up before, answers all the same: somebody waits for
        the answer.
        """
        if seq.limit != GIVE_UP_SLOT or seq.state is SequenceState.GONE or not self.can_release:
            return
        if seq in self._held:
            del self._held[seq]
            try:
                self.stepper.release(seq)
            except Exception as exc:
                self._lose_slot(seq, exc)
                seq._move(SequenceState.GONE)
                self._out.append((seq, None))
                return
            seq._move(SequenceState.WAITING)
        elif not seq.away:
            self._waiting.remove(seq)
        seq.away = True
        self._away[seq] = None
        self._out.append((seq, Released()))
        self._call_back(seq)  # credit may have come before it was away: see the rules above

    def _call_back(self, seq: Sequence) -> None:
        """Let one that is away wait for a slot, if it could go on."""
        if seq.away and seq.emitted < seq.limit:
            seq.away = False
            del self._away[seq]
            self._waiting.append(seq)

    def _runnable(self) -> list[Sequence]:
        run = []
        for seq in self._held:
            if seq.emitted < seq.limit:
                if seq.state is SequenceState.PARKED:
                    seq._move(SequenceState.ACTIVE)
                run.append(seq)
            elif seq.state is SequenceState.ACTIVE:
                seq._move(SequenceState.PARKED)
                if seq.emitted < seq.limit:  # written between the two: see the rules above
                    seq._move(SequenceState.ACTIVE)
                    run.append(seq)
                else:
                    self._parked_anew = True
        return run

    def _step(self, run: list[Sequence]) -> None:
        self.steps += 1
        self._running = run
        self._step_began = perf_counter()
        try:
            for seq, step in self.stepper.step(run):
                self._take(seq, step)
        except Exception as exc:
            for seq in list(self._held):
                self._fail(seq, exc)
        finally:
            self._running = []
            self._step_began = None

    def _take(self, seq: Sequence, step: Step) -> None:
        if seq.state is SequenceState.GONE:
            return
        if step.error is not None:
            self._fail(seq, step.error)
            return
        self.generated += step.tokens
        delta, finished = seq.take(step)
        if delta is not None:
            self._out.append((seq, delta))
            seq.emitted += delta.has_content
        if finished is not None:
            self._out.append((seq, finished))
            self._release(seq)

    def _fail(self, seq: Sequence, error: Exception) -> None:
        seq._failed(error)
        self._release(seq)

    def _lose_slot(self, seq: Sequence, cause: Exception) -> None:
        """Nobody knows whose its slot is: the end of the loop."""
        message = f"The engine failed to free a slot: {cause!r}"
        error, self._broken = EngineError(message), EngineError(message)  # each is raised in a task of its own
        error.__cause__ = self._broken.__cause__ = cause
        seq._failed(error)

    def _release(self, seq: Sequence) -> None:
        """Take `seq` out, whatever it was, and acknowledge it. Repeatable."""
        if seq.state is SequenceState.GONE:
            return
        if seq.state is SequenceState.WAITING:
            seq.away = False  # a slot that comes free for it just now finds nobody
            self._away.pop(seq, None)
            if seq in self._waiting:  # not so for one whose `add` has not been applied
                self._waiting.remove(seq)
        else:
            del self._held[seq]
            try:
                self.stepper.remove(seq)
            except Exception as exc:
                self._lose_slot(seq, exc)
        seq._move(SequenceState.GONE)
        self._out.append((seq, None))

    def _flush(self) -> None:
        if self._out and not self._drain_is_due:
            self._drain_is_due = True
            assert self._token is not None
            try:
                self._token.run_sync_soon(self._drain)
            except trio.RunFinishedError:
                self._stop = True

    def _let_go(self) -> None:
        """The owner's last act: free every slot, let every caller go."""
        self._stop = True
        for seq in {**self._held, **self._away, **dict.fromkeys(self._waiting)}:
            seq.error = seq.error or EngineClosed("The engine ended.")
            self._release(seq)
        self._flush()

    def _dismiss(self) -> None:
        """Trio's last act, once the owner has ended (or was given up): answer whoever is left, stepper untouched."""
        self._stop = True
        left = [*self._held, *self._away, *self._waiting, *(seq for command, seq in self._commands if command == "add")]
        self._held.clear()
        self._away.clear()
        self._waiting.clear()
        self._commands.clear()
        for seq in left:
            if seq.state is not SequenceState.GONE:
                seq.error = seq.error or EngineClosed("The engine ended.")
                seq._move(SequenceState.GONE)
                self._out.append((seq, None))
        while self._out:
            self._drain()
        self._set_busy(False)

    # --- drivers ----------------------------------------------------------------------------------------------------

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run in a thread of its own until cancelled. Started once `stepper.open` has returned.

        Raises:
            StartupError: from `stepper.open`.
            EngineError: the stepper could not free a slot; the loop has ended.
        """
        bell = threading.Lock()  # held while it has not rung: an Event takes ten times as long to wait for
        bell.acquire()
        token = self._token = trio.lowlevel.current_trio_token()

        def ring() -> None:  # on Trio's side alone
            if bell.locked():
                bell.release()

        self._wake = ring
        self._set_busy(True)  # until it has opened and looked for commands
        opened = trio.Event()

        def own() -> None:
            self.stepper.open()
            token.run_sync_soon(opened.set)
            try:
                while not self._stop:
                    idle = not self.tick() and not self._stop
                    bell.acquire(blocking=idle)
            finally:
                self._let_go()
                self.stepper.close()

        async def start() -> None:
            await opened.wait()
            task_status.started()

        patience = trio.CancelScope(shield=True)

        async def halt() -> None:
            try:
                await trio.sleep_forever()
            finally:
                self._stop = True
                self._set_busy(True)  # until the thread has closed the stepper
                patience.deadline = trio.current_time() + self.grace_s
                ring()
                if not ended:
                    self._ask_to_end(None)

        ended = False
        failure: Exception | None = None  # kept out of the nursery, which would wrap it in a group
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(start)
                nursery.start_soon(halt)
                with patience:  # a step that never ends is left behind: trio's worker threads are daemons
                    try:
                        await trio.to_thread.run_sync(
                            own, thread_name="engine", limiter=trio.CapacityLimiter(1), abandon_on_cancel=True
                        )
                    except Exception as exc:
                        failure = exc
                    ended = True
                nursery.cancel_scope.cancel()
        finally:
            self._dismiss()
            if failure is not None:
                raise failure

    async def serve_in_task(self, pace: Pace, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The same ticks in a Trio task, for tests: `await pace(loop)` is how long a step takes, in Trio's own time."""
        self.stepper.open()
        self._token = trio.lowlevel.current_trio_token()
        bell = trio.Event()
        self._wake = lambda: bell.set()
        task_status.started()
        try:
            while True:
                if self.tick():
                    await pace(self)
                else:
                    await bell.wait()
                    bell = trio.Event()
        finally:
            self._let_go()
            self.stepper.close()
            self._dismiss()
