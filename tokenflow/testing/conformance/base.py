"""What every test of the kit uses: the attributes that fit it to an engine, and how a test is run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio

from tokenflow.api import Engine, Sampling, SequenceRequest
from tokenflow.testing.fakes import Company, Recorder

OpenEngine = Callable[[], AbstractAsyncContextManager[Engine]]


class Kit:
    """Attributes a subclass may set, and helpers."""

    prompt: str = "Once upon a time"
    """Something to go on from, for `length` tokens and more."""
    length: int = 24
    """Tokens of a usual run."""
    long_prompt_tokens: int = 192
    """A prompt that takes a while to evaluate."""
    timeout_s: float = 30.0
    """For one test."""
    max_block_s: float = 0.1
    """No task step may hold the event loop for longer."""
    tokens_in_flight: int = 2
    """Tokens that may come after a cancel or a pause: the step in progress, and one more before it arrives.
    More for an engine whose steps are shorter than a thread's way to the event loop and back."""
    exact_in_company: bool = True
    """The same request gives the same text whatever else is in the batch."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        """A function that gives an async context manager with the engine: the one thing that a subclass must give."""
        raise NotImplementedError("Give the class a fixture `open_engine`.")

    async def request(self, engine: Engine, text: str | None = None, **fields: Any) -> SequenceRequest:
        """Greedy, and past the end of the text, where the engine can."""
        can = engine.info.capabilities
        fields.setdefault("max_tokens", self.length)
        fields.setdefault("ignore_eos", "ignore_eos" in can)
        fields.setdefault("sampling", Sampling(temperature=0.0 if "temperature" in can else None))
        tokens = await engine.tokenize(self.prompt if text is None else text)
        return SequenceRequest(prompt=tuple(tokens), id="kit", **fields)

    async def long_request(self, engine: Engine) -> SequenceRequest:
        words = self.prompt
        while len(await engine.tokenize(words)) < self.long_prompt_tokens:
            words = f"{words} {words}"
        request = await self.request(engine, words)
        room = engine.info.context_length - self.length
        return SequenceRequest(prompt=request.prompt[: min(self.long_prompt_tokens, room)], max_tokens=self.length)

    async def hold_slots(self, engine: Engine, group: Company, n: int) -> list[Recorder]:
        """`n` sequences that hold their slots, parked, until they get credit."""
        held = [group.start(await self.request(engine), Recorder(window=1, follow=False)) for _ in range(n)]
        for recorder in held:
            await recorder.wait_deltas(1)
        return held


def need(engine: Engine, *capabilities: str) -> None:
    """Skip the test unless the engine can do all of these."""
    if missing := sorted(set(capabilities) - engine.info.capabilities):
        pytest.skip(f"the engine has no {', '.join(missing)}")


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait for something that no event tells of, such as a number in `stats`. Bounded by the test's timeout."""
    while not await condition():  # noqa: ASYNC110  # an engine's numbers are no event
        await trio.sleep(0.001)  # not `checkpoint`: a spinning Trio would starve the engine's thread of the GIL


def live(test: Callable[[Any, Engine], Awaitable[None]]) -> Callable[[Any, OpenEngine], None]:
    """Make a test of an async function that gets an open engine: opened, closed and checked for leftovers.

    No pytest-trio is needed, and no signature may be inherited: pytest would look for a fixture `engine`.
    """

    def run(self: Any, open_engine: OpenEngine) -> None:
        trio.run(_run, self, open_engine, test)

    run.__name__, run.__qualname__, run.__doc__ = test.__name__, test.__qualname__, test.__doc__
    return run


async def _run(kit: Kit, open_engine: OpenEngine, test: Callable[[Any, Engine], Awaitable[None]]) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    failure: BaseException | None = None
    async with open_engine() as engine:
        try:
            with trio.fail_after(kit.timeout_s):
                await test(kit, engine)
        except (Exception, BaseExceptionGroup, pytest.skip.Exception) as exc:
            failure = _only(exc)  # raised below, where no nursery of the engine can wrap it
    if failure is not None:
        raise failure
    assert trio.lowlevel.current_statistics().tasks_living <= before, "the engine left tasks behind"


def _only(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc
