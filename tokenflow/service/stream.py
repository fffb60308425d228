"""A stream: one request's generation, from its admission to its last record, under one cancel scope.

    admitted -> [waiting room] -> slots -> generate x n -> sealed log -> readers gone -> usage record

The stream runs in the service's nursery, not in the handler's: whoever reads may leave at any moment, before the first
byte too, and the stream decides what that means. The scope's deadline moves with the phase (`core.deadlines`). The
log alone numbers; readers are cursors on it; the engine's credit is the window ahead of the fastest reader.

Events arrive outside the stream's own task (the step loop hands them out), so what runs on them never waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import trio

from tokenflow.api import Delta, Engine, Event, Finished, FinishReason, Released, SequenceRequest, Started
from tokenflow.chat.reader import MessageReader
from tokenflow.core.admission import Admission
from tokenflow.core.credit import Grant, share_out
from tokenflow.core.deadlines import Deadline
from tokenflow.core.logstore import LogStore
from tokenflow.core.replay import Record, ReplayLog
from tokenflow.core.states import Phase
from tokenflow.core.types import Attendance, GenerationRequest, TextPrompt, Timeouts
from tokenflow.dialects.streams import StreamState
from tokenflow.engines.host import EngineHost
from tokenflow.errors import (
    Draining,
    EngineError,
    EngineStuck,
    IdleTimeout,
    PrefillTimeout,
    QueueTimeout,
    TokenflowError,
    TotalTimeout,
    described,
    first_error,
)
from tokenflow.service.account import Account, By, Emit, Outcome, StreamIdentity
from tokenflow.service.choice import Choice
from tokenflow.service.coalesce import Coalescer
from tokenflow.service.reader import StreamReader
from tokenflow.service.records import Ended, Failed, StreamEvent
from tokenflow.service.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How this stream is run: the configuration with the request's own wishes in it."""

    timeouts: Timeouts
    window: int
    """Records that the engine may be ahead of the fastest reader, over all choices."""
    coalesce_s: float
    attendance: Attendance
    """With its defaults filled in."""
    kept: bool
    """Its log holds what has been delivered, and can be replayed after the end."""


TAIL_S = 30.0
"""How long the usage record waits for readers of what is left, after the end; and the log for one that reads on."""
_WORD = {True: "it is paused", False: "it runs on"}

log = logging.getLogger("tokenflow.streams")


class Stream:
    """One generation and its log.

    Args:
        identity: who and what.
        asked: what the client asked for.
        host: where its engine is.
        sequences: one per choice.
        readers: who reads each one's text as a message; None: it is all content.
        admission: where its slots come from.
        settings: deadlines, window, coalescing, what a reader's leaving does.
        logs: where its log is made.
        watch: what looks after its deadline.
        emit: takes the records of its life, for the sinks.

    Raises:
        QueueFull: there is no place to wait. Nothing has happened then.
    """

    __slots__ = (
        "_account",
        "_accounted",
        "_admission",
        "_admitted_at",
        "_called_off",
        "_cancel",
        "_cancel_error",
        "_choices",
        "_clock",
        "_coalescer",
        "_deadline",
        "_ended_as",
        "_ended_in",
        "_failure",
        "_fault_logged",
        "_forgotten",
        "_held_by_client",
        "_host",
        "_log",
        "_logged",
        "_logs",
        "_readers",
        "_released_at",
        "_scope",
        "_sequences",
        "_slots_held",
        "_ticket",
        "_unread",
        "_watch",
        "asked",
        "attendance",
        "created",
        "identity",
        "idle_since",
        "known",
    )

    def __init__(
        self,
        identity: StreamIdentity,
        asked: GenerationRequest,
        host: EngineHost,
        sequences: tuple[SequenceRequest, ...],
        readers: tuple[MessageReader | None, ...],
        admission: Admission,
        settings: StreamSettings,
        logs: LogStore,
        watch: Watch,
        emit: Emit,
    ) -> None:
        self.identity = identity
        self.asked = asked
        self.created = int(time.time())
        """Unix seconds."""
        self._host = host
        self._sequences = sequences
        self._slots_held = trio.Event()
        self._admission = admission
        self._ticket = admission.enter(len(sequences), self._slots_held.set)
        self.idle_since: float | None = None
        """Since when it holds slots and takes no steps; None: it does, or holds none."""
        self._clock = trio.lowlevel.current_clock()  # asked by every token: `trio.current_time` is the long way to it
        now = self._clock.current_time()
        share = max(1, settings.window // len(sequences))
        self._choices = [Choice(i, self, share, message) for i, message in enumerate(readers)]
        self._account = Account(identity, [choice.gaps for choice in self._choices], now, emit)
        self._deadline = Deadline(settings.timeouts, now)
        self._scope = trio.CancelScope()
        self._called_off = False  # what the scope's own property says, which asks the clock
        self.known = inf  # the watch's
        self._watch = watch
        watch.look_at(self)
        self.attendance = settings.attendance
        self._logs = logs
        self._log: ReplayLog[StreamEvent] = logs.new(self._accept, on_read=self._account.read, keep=settings.kept)
        span_s = settings.coalesce_s
        self._coalescer = Coalescer(self._append_read, span_s) if span_s else None
        self._logged = 0  # of the deltas sent, those that are in the log: the rest is in the coalescer
        self._readers: set[StreamReader] = set()
        self._unread = trio.Event()  # set while nobody reads
        self._forgotten = trio.Event()  # its log had to make room
        self._held_by_client = False  # paused through the API
        self._ended_as = Outcome("stop", "engine")  # until it has ended
        self._ended_in = Phase.QUEUE
        self._released_at = self._admitted_at = now
        self._accounted = False
        self._failure: Exception | None = None  # of its engine, before it was called off
        self._fault_logged = False  # each of its sequences may hear of the same one
        self._cancel: Outcome | None = None
        self._cancel_error: TokenflowError | None = None

    @property
    def phase(self) -> Phase:
        return self._deadline.phase

    @property
    def well(self) -> bool:
        """It is alive, or ended as it should."""
        return self._finished or not (self.phase is Phase.DONE or self._called_off)

    @property
    def repeatable(self) -> bool:
        """To attach to it is as good as to generate again: it lives, or ended as it should and all of it is held."""
        return self.well and (self.phase is not Phase.DONE or self._log.oldest == 1)

    @property
    def state(self) -> StreamState:
        """What it is doing, for who asks."""
        done = self.phase is Phase.DONE
        return StreamState(
            id=self.identity.id,
            model=self.identity.model,
            created=self.created,
            phase=self.phase.value,
            paused=self.paused and not done,
            readers=len(self._readers),
            first_n=self._log.oldest,
            last_n=self._log.head,
            on_disconnect=self.attendance.on_disconnect,
            finish_reasons=self._said_reasons
            if self._ended_as.code is None and done
            else tuple([choice.reason for choice in self._choices]),
            reason=self._ended_as.reason if done else None,
            error=self._ended_as.code,
            usage=self._account.usage,
            age_s=trio.current_time() - self._admitted_at,
        )

    @property
    def holds_slots(self) -> bool:
        return self._ticket.held

    @property
    def generated_tokens(self) -> int:
        """Tokens that its engine has made so far, delivered or not."""
        return self._account.usage.completion + sum([choice.dropped for choice in self._choices])

    # --- readers ----------------------------------------------------------------------------------------------------

    def attach(self, after: int = 0, *, credit: int | None = None) -> StreamReader:
        """A reader that has everything up to `after`. It must be closed: then the stream may be without readers.

        Args:
            credit: bind it at once; see `StreamReader.allow`.

        Raises:
            ResumeWindowLost: what comes after `after` is not held any more.
            InvalidRequest: `after` lies ahead of the log.
        """
        reader = StreamReader(self, self._log, after, credit)
        self._readers.add(reader)
        self._logs.being_read(self._log)
        if self._unread.is_set():
            self._unread = trio.Event()
        self._move_deadline(lambda now: self._deadline.returned(), trio.current_time())
        self._regulate()
        return reader

    def left(self, reader: StreamReader) -> None:
        """`reader` has gone; with the last one, what the request chose happens."""
        self._readers.discard(reader)
        if not self._readers:
            self._unread.set()
            if self.attendance.resumable:
                assert self.attendance.grace_s is not None
                grace_s = self.attendance.grace_s
                self._move_deadline(partial(self._deadline.left, grace_s=grace_s), trio.current_time())
                if self.phase is not Phase.DONE:
                    log.info("%s: its reader left; %s for %g s", self.identity.id, _WORD[self.paused], grace_s)
            else:
                self._stop(Outcome("disconnected", "client"))
        self._regulate()

    def cancel(self, by: By, error: TokenflowError | None = None) -> None:
        """End it now. `error` is what its readers get; without one, finish_reason `cancelled`. Repeatable.

        Where it has ended already, a reader that would wait for credit is given the rest, and with it the end.
        """
        for reader in tuple(self._readers):
            reader.let_go()
        self._stop(Outcome("cancelled", by) if error is None else Outcome("error", by, error.code), error)

    def pause(self) -> None:
        """Take no further step until `resume`. Repeatable."""
        self._held_by_client = True
        self._regulate()

    def resume(self) -> None:
        """Go on. Repeatable."""
        self._held_by_client = False
        self._regulate()

    def _stop(self, outcome: Outcome, error: TokenflowError | None = None) -> None:
        if self._cancel is not None or self._called_off or self.phase is Phase.DONE:
            return
        self._cancel, self._cancel_error = outcome, error
        self._account.cancelled(trio.current_time())
        self._call_off()

    def _call_off(self) -> None:
        self._called_off = True
        self._scope.cancel()
        self._log.wake()  # what was to follow a record may not come any more

    @property
    def paused(self) -> bool:
        """It takes no steps: held through the API, or nobody reads it and that is what its request chose."""
        alone = not self._readers and self.attendance.on_disconnect == "pause"
        return self._held_by_client or alone

    def _regulate(self) -> None:
        """Credit, by who reads and where they are. A pause freezes the limit, and nothing more."""
        if self.phase is Phase.DONE:
            return
        self._log.run_on = self.attendance.on_disconnect == "continue"
        self._grant()
        # One that comes back far behind paces the engine again only once it has caught up.
        frozen = self.paused or self._log.behind
        for choice in self._choices:
            if frozen:
                choice.pause()
            else:
                choice.resume()
        starved = self._choices[0].most is not None and self._stalled  # also before the first token
        now = trio.current_time()
        hold = partial(self._deadline.hold, stalled=self._stalled, paused=frozen or starved or self.slotless)
        self._move_deadline(hold, now)
        if self.slotless:
            self._want_slots()
        self._note_idleness(now)

    # --- giving slots up for others -------------------------------------------------------------------------------

    @property
    def slotless(self) -> bool:
        """It has been asked to give up its slots, and has none again."""
        return self._choices[0].slotless

    @property
    def paused_or_left(self) -> bool:
        """Its silence is somebody's will, and not only a slow reader's."""
        return self._choices[0].paused

    def give_up_slots(self) -> None:
        """Let others have them; it goes on by itself once it has credit and slots again."""
        self.idle_since = None
        for choice in self._choices:
            choice.give_up_slot()
        self._regulate()

    def _note_idleness(self, now: float) -> None:
        """Idle: it holds slots, has begun, and can do nothing with them."""
        idle = self._ticket.held and self.phase is not Phase.QUEUE and not self.slotless and self._stalled
        if not idle:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
            self._admission.notify()

    def _released(self, choice: Choice) -> None:
        """A sequence's slot is free; the last one gives them all back."""
        choice.away = True
        if self.slotless and all([each.away or each.closed for each in self._choices]):
            self._ticket.leave()
            self._want_slots()

    def _want_slots(self) -> None:
        """Ask for slots again, if it could go on with them."""
        if not any([choice.has_credit for choice in self._choices]):
            return
        if self._ticket.held:  # it is called back before it was gone
            self._take_slots()
        elif self._ticket.gone:
            count = sum([not choice.closed for choice in self._choices])
            self._ticket = self._admission.enter(count, self._take_slots, back=True)

    def _take_slots(self) -> None:
        for choice in self._choices:
            choice.take_slot()
        self._regulate()
        self._admission.notify()

    def allowed(self) -> None:
        """A reader has given credit."""
        self._regulate()

    def _grant(self) -> None:
        """Where every reader counts what it allows, the one that allows most binds the engine."""
        if None in (allowed := {reader.allowed for reader in self._readers}) or not allowed:
            if self._choices[0].most is not None:
                for choice in self._choices:
                    choice.allow(None)
            return
        # A delta that waits in the coalescer is at most one record.
        sends = self._choices
        unlogged = sum([send.sent for send in sends]) - self._logged
        budget = max(0, max(n for n in allowed if n is not None) - self._log.head - unlogged)
        grants = [Grant(send.sent, send.most or 0, not send.closed) for send in sends]
        for send, most in zip(sends, share_out(budget, grants), strict=True):
            send.allow(most)

    # --- the stream's task ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From the waiting room to the usage record. Raises nothing but Cancelled, and then all is written too."""
        failure: Exception | None = Draining("The server has shut down.", retry_after_s=1.0)  # unless it gets further
        try:
            with self._scope:
                await self._generate()
            failure = None
        except Exception as exc:
            failure = exc
            self._log_fault("it failed", exc)
        finally:
            self._conclude(failure)
            try:
                with trio.move_on_after(TAIL_S):
                    await self._unread.wait()  # the tail may still be being read
            finally:
                self._close_account()

    def give_up(self) -> None:
        """Tell its end, and account for it, though its engine has not let go of it: the server does not wait longer."""
        if self.phase is not Phase.DONE:
            self._conclude(None)
            self._close_account()

    def _conclude(self, failure: Exception | None) -> None:
        """Tell its end, the first time."""
        if self._log.sealed:
            return
        self._released_at = trio.current_time()
        try:
            self._ticket.leave()
            self._ended_as, end = self._end(failure)
        except Exception as exc:  # ours, and this stream's alone: it must not end the others
            log.error("%s: its end failed", self.identity.id, exc_info=exc)
            self._ended_as, end = self._end_by_fault()
        self._ended_in = self._deadline.done()
        self._watch.forget(self)
        self._log.seal(end, at=self._released_at)
        until = self.attendance.retention_s or 0.0
        self._logs.ended(self._log, self._released_at + until, self._forgotten.set)
        self._forget_what_was_asked()

    def _close_account(self) -> None:
        """Write the usage record, the first time."""
        if not self._accounted:
            self._accounted = True
            dropped = sum([choice.dropped for choice in self._choices])
            self._account.close(self._ended_as, self._ended_in, self._released_at, dropped)

    async def keep(self) -> None:
        """Wait for as long as its log can be replayed, and then while somebody reads on; then forget it."""
        try:
            if self._log.keep:
                await self._retain()
            elif self._readers:
                await self._unread.wait()
        finally:
            self._logs.forget(self._log)
            for choice in self._choices:
                choice.let_go()

    async def _retain(self) -> None:
        """Until its time is up and nobody has read on for `TAIL_S`; or until others need the room."""
        assert self.attendance.retention_s is not None
        places = self._places()
        wait_s = max(self.attendance.retention_s, TAIL_S if places else 0.0)
        while not self._forgotten.is_set():
            with trio.move_on_after(wait_s):
                await self._forgotten.wait()
            before, places = places, self._places()
            if not [reader for reader, n in places.items() if n > before.get(reader, -1)]:
                return
            wait_s = TAIL_S

    def _places(self) -> dict[StreamReader, int]:
        return {reader: reader.n for reader in self._readers}

    def _forget_what_was_asked(self) -> None:
        """An ended stream is kept for what it said: prompts may be a hundred times that."""
        self._sequences = ()
        for choice in self._choices:
            choice.message = None
        prompts = tuple(TextPrompt(text="") for _ in self.asked.prompts)
        self.asked = replace(self.asked, prompts=prompts, stop=())

    async def _generate(self) -> None:
        if not self._slots_held.is_set():
            await self._slots_held.wait()
        engine = self._host.engine
        if len(self._sequences) == 1 and self._coalescer is None:
            await self._sequence(engine, self._sequences[0], self._choices[0])
            return
        async with trio.open_nursery() as nursery:
            if self._coalescer is not None:
                nursery.start_soon(self._coalescer.run)
            async with trio.open_nursery() as generations:
                for request, choice in zip(self._sequences, self._choices, strict=True):
                    generations.start_soon(self._sequence, engine, request, choice)
            nursery.cancel_scope.cancel()

    async def _sequence(self, engine: Engine, request: SequenceRequest, choice: Choice) -> None:
        try:
            await engine.generate(request, choice)
        except Exception as exc:
            self._log_fault("the engine failed", exc)
            if isinstance(stuck := first_error(exc), EngineStuck):
                self._host.fail(engine, stuck.message)
            if not self._called_off and self._failure is None:
                self._failure = exc  # whatever comes while the others are cancelled does not rename it
            raise

    def _log_fault(self, what: str, failure: Exception) -> None:
        """A fault in somebody's code: its author wants the place."""
        cause = first_error(failure)
        if not isinstance(cause, TokenflowError) and not self._fault_logged:
            self._fault_logged = True
            log.error("%s: %s", self.identity.id, what, exc_info=cause)

    def _end(self, failure: Exception | None) -> tuple[Outcome, StreamEvent]:
        """How it ended, and the record that says so."""
        if self._coalescer is not None:
            self._coalescer.flush()
            self._coalescer = None
        self._finish_messages()
        reasons = self._said_reasons
        ended = Ended(reasons, self._account.usage, sum([choice.untold for choice in self._choices]))
        error = None if failure is None else _as_ours(failure)
        if self._finished:
            return Outcome(reasons[0], "engine"), ended
        own, self._failure = self._failure, None
        if own is not None:
            error = _as_ours(own)
            return Outcome("error", "engine", error.code), Failed(error)
        if error is not None and not self._called_off:
            return Outcome("error", "server" if isinstance(error, Draining) else "engine", error.code), Failed(error)
        # However its engine took being called off, it ended for what it was called off for.
        if isinstance(error, EngineError):
            log.warning("%s: its engine failed while it was called off: %s", self.identity.id, error.message)
        if self._cancel is not None:
            return self._cancel, ended if self._cancel_error is None else Failed(self._cancel_error)
        if self._called_off:
            if self._deadline.code == "grace":
                return Outcome("disconnected", "client"), ended
            timeout = self._timeout()
            return Outcome("error", "server", timeout.code), Failed(timeout)
        error = EngineError("The engine ended this sequence without a reason.")
        return Outcome("error", "engine", error.code), Failed(error)

    def _end_by_fault(self) -> tuple[Outcome, StreamEvent]:
        """What was left of it could not be told: so it has not ended as it should, whatever its sequences have."""
        self._coalescer = self._failure = None  # whose frames hold the request
        for choice in self._choices:
            choice.reason = None
        error = TokenflowError("The server failed at the end of this stream; its log says why.")
        return Outcome("error", "server", error.code), Failed(error)

    @property
    def _reasons(self) -> tuple[FinishReason | None, ...]:
        return tuple([choice.reason for choice in self._choices])

    @property
    def _finished(self) -> bool:
        """Every sequence has ended as it should."""
        return None not in self._reasons

    @property
    def _said_reasons(self) -> tuple[FinishReason, ...]:
        """Of a stream that has ended without an error, as its readers are told."""
        return tuple([reason or "cancelled" for reason in self._reasons])

    def _timeout(self) -> TokenflowError:
        spans = self._deadline.timeouts
        match self._deadline.code:
            case "queue_timeout":
                return QueueTimeout(
                    f"No slot came free within {spans.queue_s:g} s (queue_timeout_s). Try again later.",
                    retry_after_s=1.0,
                )
            case "prefill_timeout":
                return PrefillTimeout(f"The first token did not come within {spans.prefill_s:g} s (prefill_timeout_s).")
            case "idle_timeout":
                return IdleTimeout(f"The engine was silent for {spans.idle_s:g} s between tokens (idle_timeout_s).")
            case _:
                return TotalTimeout(f"The stream did not end within {spans.total_s:g} s (total_timeout_s).")

    # --- what the engine sends, and what the readers take -----------------------------------------------------------

    def take(self, choice: Choice, event: Event) -> None:
        """Called with each event of each sequence."""
        now = self._clock.current_time()
        if isinstance(event, Delta):
            self._on_delta(choice, event, now)
        elif isinstance(event, Started):
            choice.away = False
            self._account.slot_taken(event, now, again=choice.index % self.asked.n != 0)
            if self.phase is Phase.QUEUE:
                self._move_deadline(self._deadline.slot_taken, now)
            self._note_idleness(now)  # it may have been paused, or left, while it waited
        elif isinstance(event, Finished):
            choice.reason = event.reason
            if not self._finished:  # what it did not use is the others', or they are all that is stalled now
                self._regulate()
        elif isinstance(event, Released):
            self._released(choice)
        else:
            choice.away = False
            self._regrant()

    def _on_delta(self, choice: Choice, delta: Delta, now: float) -> None:
        self._account.token(choice.gaps, delta, now)
        if not delta.has_content:
            choice.untold += delta.tokens
        elif self._coalescer is not None:
            self._coalescer.add(choice, choice.told(delta))
        else:
            self._append_read(choice, choice.told(delta), 1, now, hold=True)
        stalled = choice.stalled and self._stalled
        if self._in_time(now) and self._deadline.token(now, stalled=stalled) and self._deadline.at < self.known:
            self._watch.look_at(self)
        if stalled:
            self._note_idleness(now)
            if self._coalescer is not None:  # nothing more can come to it
                self._coalescer.flush()

    def settle(self) -> None:
        """Called when all is taken that came at once: a system call costs more than a record."""
        self._log.wake()

    def _append_read(self, choice: Choice, delta: Delta, events: int, now: float, *, hold: bool = False) -> None:
        """Append what is certain of the message: it is read before it gets a number, so that it replays as it was."""
        if choice.message is None:
            self._append(choice, delta, events, now, hold=hold)
        elif (message := choice.message.take(delta)) is not None:
            self._append(choice, message, events, now, hold=hold)
        else:
            self._logged += events
            choice.untold += delta.tokens
            choice.accept(1)  # no record, no credit
            self._regrant()

    def _append(self, choice: Choice, delta: Delta, events: int, now: float, *, hold: bool = False) -> None:
        """Append `delta`, which is what `events` of the engine's have come to."""
        self._logged += events
        self._log.append(choice.placed(delta), choice.index, at=now, size=delta.memory_bytes, hold=hold)
        if events > 1:
            self._regrant()

    def _finish_messages(self) -> None:
        """Append what was held of each."""
        for choice in self._choices:
            if (tail := choice.finish_message()) is not None:
                self._append(choice, tail, 0, self._clock.current_time())

    def _regrant(self) -> None:
        """Credit has come free: a sequence ended without using all of it, or several deltas became one record."""
        if self._choices[0].most is not None:
            self._regulate()

    def _accept(self, record: Record[StreamEvent]) -> None:
        """The fastest reader has `record`: its credit goes back to where it came from."""
        if record.source < 0:
            return  # the end is nobody's alone, and took no credit
        choice = self._choices[record.source]
        choice.accept(1)
        if choice.slotless or (self._deadline.suspended and not self._stalled):
            self._regulate()

    def moved(self) -> None:
        """A reader has taken something: one that came back far behind may have caught up."""
        if self._choices[0].paused:
            self._regulate()

    @property
    def _stalled(self) -> bool:
        """Every sequence that could go on is out of credit: silence is the reader's doing."""
        for choice in self._choices:  # noqa: SIM110  # asked for every token: a generator takes four times as long
            if not (choice.closed or choice.stalled):
                return False
        return True

    def _move_deadline(self, change: Callable[[float], None], now: float) -> None:
        if self._in_time(now):
            change(now)
            if self._deadline.at < self.known:
                self._watch.look_at(self)

    def _in_time(self, now: float) -> bool:
        """No deadline has passed: an event beside one that has must not rename it."""
        if now >= self.known and now >= self._deadline.at:  # what is known is never later
            self._call_off()
        return not self._called_off

    @property
    def due(self) -> float:
        """As `Watch` asks it."""
        return self._deadline.at

    def pass_due(self) -> None:
        """As `Watch` tells it."""
        self._call_off()


def _as_ours(failure: Exception) -> TokenflowError:
    """The error behind a failure, as one that a client may be told.

    It is kept for as long as the log is: so without the frames that it came through, which hold the whole request.
    """
    cause = first_error(failure)
    if not isinstance(cause, TokenflowError):
        return EngineError(f"The engine failed: {described(cause)}")
    cause.__traceback__ = cause.__cause__ = cause.__context__ = None
    return cause
