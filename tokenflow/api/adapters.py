"""Ways to an engine that are shorter than the whole contract.

`LoopEngine` is the base of an engine whose sequences a `StepLoop` runs: it brings `generate` and the loop's numbers.
`tokenflow.api.vocabulary` has one that tokenizes as well.

The two functions make an engine of a plain generator, for models without a batch: one sequence is one run of it in one
of `info.slots` slots, and one item is one token. Stop strings, UTF-8 and `max_tokens` are `Sequence.take`'s, as in the
loop; pace is `Send.send`'s, which waits for the reader; so the generator needs to know nothing of either. It is always
closed in the task that ran it. Tokens are UTF-8 bytes, so any text is a prompt.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Self, TypeVar

import trio

from tokenflow.api.engine import Engine
from tokenflow.api.grammar import BUDGET_S, Grammars
from tokenflow.api.loop import Pace, Sequence, Step, StepLoop
from tokenflow.api.send import Send
from tokenflow.core.types import EngineInfo, EngineStats, Grammar, SequenceRequest, Started
from tokenflow.errors import EngineStuck, InvalidRequest

T = TypeVar("T")
Piece = str | bytes
GeneratorFn = Callable[[str, SequenceRequest], AsyncIterator[Piece]]
BlockingFn = Callable[[str, SequenceRequest], Iterator[Piece]]

log = logging.getLogger("tokenflow.engines")

_ALWAYS = frozenset({"stop", "pause"})
"""What the loop and the adapters bring to every engine."""


class LoopEngine(ABC):
    """An engine on a StepLoop, but for its tokenizer.

    Args:
        loop: being served, for as long as this engine is used.
        info: what it is; the capabilities `stop` and `pause`, which the loop brings, are added.
        grammars: for its vocabulary, entered, where its stepper heeds `Sequence.matcher`: the capability `grammar`.
    """

    def __init__(self, loop: StepLoop, info: EngineInfo, grammars: Grammars | None = None) -> None:
        self.loop = loop
        self._grammars = grammars
        extra = _ALWAYS | {"release"} if loop.can_release else _ALWAYS
        extra |= {"grammar"} if grammars is not None else set()
        self.info = replace(info, capabilities=info.capabilities | extra)

    async def generate(self, request: SequenceRequest, send: Send) -> None:
        matcher = None if request.grammar is None else await self._of(request.grammar).matcher(request.grammar)
        await self.loop.generate(request, send, matcher)

    async def compile(self, grammar: Grammar, *, budget_s: float = BUDGET_S) -> None:
        """As in `StructuredEngine`."""
        await self._of(grammar).compile(grammar, budget_s=budget_s)

    def _of(self, grammar: Grammar) -> Grammars:
        if self._grammars is None:
            raise InvalidRequest("This engine cannot hold a text to a grammar.", param=grammar.param)
        return self._grammars

    async def stats(self) -> EngineStats:
        """The loop's numbers. A subclass adds its own: `replace(await super().stats(), kv_tokens_used=...)`."""
        loop = self.loop
        return EngineStats(
            slots=self.info.slots,
            slots_used=loop.held,
            waiting=loop.waiting,
            paused=loop.parked,
            generated_tokens=loop.generated,
            steps=loop.steps,
            step_age_s=loop.step_age_s,
        )

    @abstractmethod
    async def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...

    @abstractmethod
    async def detokenize(self, tokens: list[int]) -> str: ...


@asynccontextmanager
async def serving(loop: StepLoop, *, pace: Pace | None = None) -> AsyncGenerator[None, None]:
    """Serve `loop` for as long as the context lasts, in a thread, or with `pace` in a task: an engine's `open`.

    What `stepper.open` raises comes out as it is. If the loop ends later by itself, the body is cancelled and the
    loop's error raised.
    """
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(*((loop.serve,) if pace is None else (loop.serve_in_task, pace)))
            yield
            nursery.cancel_scope.cancel(reason="the engine is closed")
    except BaseExceptionGroup as group:
        error = _only(group)
        try:
            raise error from error.__cause__
        finally:
            del error  # its frames are held by it, and hold the engine


def _only(group: BaseException) -> BaseException:
    """The one exception of a group of one, however deep."""
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]
    return group


def engine_from_generator(fn: GeneratorFn, *, info: EngineInfo) -> Engine:
    """An engine of an async generator function.

    Args:
        fn: `fn(prompt, request)` gives the text token by token. Its end is the sequence's (`stop`); what it raises
            fails this sequence alone.
        info: `slots` is how many run at once; the capabilities `stop` and `pause` are added.
    """

    def run(prompt: str, request: SequenceRequest, slot: _Slot) -> AbstractAsyncContextManager[AsyncIterator[Piece]]:
        return _closing(fn(prompt, request))

    return _GeneratorEngine(run, info)


def engine_from_blocking_iterator(fn: BlockingFn, *, info: EngineInfo, grace_s: float = 5.0) -> Engine:
    """An engine of a blocking generator function: each `next` runs in a worker thread, one at a time per sequence.

    Args:
        fn: `fn(prompt, request)`, as in `engine_from_generator`; called in a worker thread too.
        info: as in `engine_from_generator`.
        grace_s: a cancelled sequence waits this long for the `next` in progress; then the thread is left behind and
            `EngineStuck` raised. Closing may take as long; where the sequence had ended, more is only logged. The slot
            stays taken until that thread comes back.
    """

    def run(prompt: str, request: SequenceRequest, slot: _Slot) -> AbstractAsyncContextManager[AsyncIterator[Piece]]:
        return _InThreads(lambda: fn(prompt, request), slot, grace_s, request.id)

    return _GeneratorEngine(run, info)


class _Slot:
    """One sequence's place; `held` counts who must leave before it is free: the sequence, a thread left behind."""

    def __init__(self, limiter: trio.CapacityLimiter) -> None:
        self._limiter = limiter
        self.held = 1

    def leave(self) -> None:
        self.held -= 1
        if not self.held:
            self._limiter.release_on_behalf_of(self)


class _GeneratorEngine:
    def __init__(
        self,
        run: Callable[[str, SequenceRequest, _Slot], AbstractAsyncContextManager[AsyncIterator[Piece]]],
        info: EngineInfo,
    ) -> None:
        self.info = replace(info, capabilities=info.capabilities | _ALWAYS, vocab_size=info.vocab_size or 256)
        self._run = run
        self._slots = trio.CapacityLimiter(info.slots)
        self._active: set[Send] = set()
        self._prompt_tokens = self._generated = 0

    async def generate(self, request: SequenceRequest, send: Send) -> None:
        try:
            prompt = await self.detokenize(list(request.prompt))
        except ValueError as exc:
            raise InvalidRequest(
                f"The prompt has a token that is not in the vocabulary: {exc}.", param="prompt"
            ) from exc
        slot = _Slot(self._slots)
        await self._slots.acquire_on_behalf_of(slot)
        self._active.add(send)
        try:
            await self._play(prompt, request, send, slot)
        finally:
            self._active.discard(send)
            slot.leave()

    async def _play(self, prompt: str, request: SequenceRequest, send: Send, slot: _Slot) -> None:
        await send.send(Started(len(request.prompt)))
        self._prompt_tokens += len(request.prompt)
        seq = Sequence(request, send)
        async with self._run(prompt, request, slot) as items:
            while (item := await self._next(items, send)) is not None:
                self._generated += 1
                if await self._pass_on(seq, Step(1, item.encode() if isinstance(item, str) else item)):
                    return
            await self._pass_on(seq, Step(0, finish="stop"))

    async def _next(self, items: AsyncIterator[Piece], send: Send) -> Piece | None:
        await send.wait_room()  # a stalled sequence makes nothing: it could not be sent
        return await anext(items, None)

    async def _pass_on(self, seq: Sequence, step: Step) -> bool:
        """Send what the step gives. True: that was the end."""
        delta, finished = seq.take(step)
        if delta is not None:
            try:
                await seq.send.send(delta)
            except trio.Cancelled:
                seq.send.dropped += delta.tokens
                raise
        if finished is None:
            return False
        await seq.send.send(finished)
        return True

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode(errors="replace"))

    async def detokenize(self, tokens: list[int]) -> str:
        if wrong := [token for token in tokens if not 0 <= token < 256]:
            raise ValueError(f"{wrong[0]} is not a byte")
        return bytes(tokens).decode(errors="replace")

    async def stats(self) -> EngineStats:
        numbers = self._slots.statistics()
        return EngineStats(
            slots=self.info.slots,
            slots_used=numbers.borrowed_tokens,
            waiting=numbers.tasks_waiting,
            paused=sum(send.stalled for send in self._active),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            steps=self._generated,
        )


@asynccontextmanager
async def _closing(items: AsyncIterator[Piece]) -> AsyncGenerator[AsyncIterator[Piece], None]:
    """`aclosing` for iterators too, which need not have `aclose`."""
    try:
        yield items
    finally:
        close: Any = getattr(items, "aclose", None)
        if close is not None:
            await close()


class _InThreads:
    """The items of a blocking iterator. It is made, asked and closed in worker threads, for each of these may block.

    Whoever comes back too late is left behind: the thread keeps the slot until it has, and has closed.
    """

    def __init__(self, make: Callable[[], Iterator[Piece]], slot: _Slot, grace_s: float, id: str) -> None:
        self._make = make
        self._slot = slot
        self._grace_s = grace_s
        self._id = id
        self._items: Iterator[Piece] | None = None
        self._one = trio.CapacityLimiter(1)  # never waited for: the slots bound the threads already
        self._left = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._left or self._items is None:
            return
        with trio.move_on_after(self._grace_s, shield=True):
            await self._in_thread(self._close)
        if self._left:
            if isinstance(error, trio.Cancelled):
                raise self._stuck() from None
            log.warning(
                "%s: its iterator has not closed after %g s; its slot stays taken until it has", self._id, self._grace_s
            )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        try:
            item = await self._in_thread(self._take, self._grace_s)
        except trio.Cancelled:
            if self._left:
                raise self._stuck() from None
            raise
        if item is None:
            raise StopAsyncIteration
        return item

    def _take(self) -> Piece | None:
        if self._items is None:
            self._items = iter(self._make())
        return next(self._items, None)

    def _close(self) -> None:
        items, self._items = self._items, None  # never twice
        getattr(items, "close", lambda: None)()

    async def _in_thread(self, work: Callable[[], T], grace_s: float = 0.0) -> T:
        """`work` in a thread, which is left behind where it is still there `grace_s` after a cancel."""
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()

        def tell(fn: Callable[[], object]) -> None:
            with suppress(trio.RunFinishedError):  # nobody is left to tell
                token.run_sync_soon(fn)

        def back() -> None:
            done.set()
            if self._left:
                trio.lowlevel.start_thread_soon(self._close, lambda outcome: tell(self._slot.leave))

        def run() -> T:
            try:
                return work()
            finally:
                tell(back)

        await trio.lowlevel.checkpoint_if_cancelled()  # from here on the thread does start
        try:
            return await trio.to_thread.run_sync(run, limiter=self._one, abandon_on_cancel=True)
        except trio.Cancelled:
            with trio.move_on_after(grace_s, shield=True):
                await done.wait()
            if not done.is_set():
                self._left = True
                self._slot.held += 1
            raise

    def _stuck(self) -> EngineStuck:
        return EngineStuck(f"The engine's iterator did not come back within {self._grace_s:g} s of a cancel.")
