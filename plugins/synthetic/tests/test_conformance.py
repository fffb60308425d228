"""The synthetic engine passes the kit, on each driver; so do the engines that adapters make."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext

import pytest
import trio
from tokenflow_synthetic import SyntheticConfig, open_in_task, open_synthetic
from tokenflow_synthetic.engine import SyntheticEngine
from tokenflow_synthetic.vocabulary import VOCABULARY
from tokenflow_synthetic.words import tokens

from tokenflow.api import (
    EngineInfo,
    Sequence,
    SequenceRequest,
    Step,
    engine_from_blocking_iterator,
    engine_from_generator,
)
from tokenflow.testing.conformance import EngineConformance, OpenEngine


class TestUnpaced(EngineConformance):
    tokens_in_flight = 10_000  # a token takes a microsecond: all are made before a cancel has come to the thread

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return lambda: open_synthetic(SyntheticConfig())


class TestTask(EngineConformance):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return lambda: open_in_task(SyntheticConfig(), step_s=0)


class TestOneSlotOneByte(EngineConformance):
    tokens_in_flight = 10_000

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return lambda: open_synthetic(SyntheticConfig(slots=1, one_byte=True, text="Fünf 🐡 schwimmen. " * 9))


class TestPaced(EngineConformance):
    """Prefill and decoding take time, so that cancels meet a step that waits."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return lambda: open_synthetic(SyntheticConfig(prefill_ms=3, tokens_per_s=1000))


INFO = EngineInfo(model="adapted", context_length=4096, slots=3, capabilities=frozenset({"ignore_eos"}))


def say(prompt: str, request: SequenceRequest) -> Iterator[bytes]:
    return (VOCABULARY[token] for token in tokens(request.prompt))


async def say_async(prompt: str, request: SequenceRequest) -> AsyncIterator[bytes]:
    for piece in say(prompt, request):
        await trio.lowlevel.checkpoint()
        yield piece


class TestGenerator(EngineConformance):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return lambda: nullcontext(engine_from_generator(say_async, info=INFO))


class TestBlockingIterator(EngineConformance):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return lambda: nullcontext(engine_from_blocking_iterator(say, info=INFO))


# --- what the kit must find -----------------------------------------------------------------------------------------


@asynccontextmanager
async def open_deaf() -> AsyncIterator[SyntheticEngine]:
    """Makes a hundred tokens for who has left."""
    async with open_synthetic(SyntheticConfig()) as engine:
        remove = engine.stepper.remove

        def go_on(seq: Sequence) -> None:
            if seq.cancelled:
                engine.loop.generated += 100
                seq.send.dropped += 100
            remove(seq)

        engine.stepper.remove = go_on  # type: ignore[method-assign]
        yield engine


def test_an_engine_that_goes_on_after_a_cancel_is_found_however_fast_it_is() -> None:
    with pytest.raises(AssertionError):
        TestUnpaced().test_in_decoding(open_deaf)


async def say_in_halves(prompt: str, request: SequenceRequest) -> AsyncIterator[str]:
    for byte in "Fünf 🐡 schwimmen.".encode():
        await trio.lowlevel.checkpoint()
        yield bytes([byte]).decode(errors="replace")


def test_an_engine_that_cuts_characters_is_found() -> None:
    with pytest.raises(AssertionError):
        TestGenerator().test_text_is_whole(lambda: nullcontext(engine_from_generator(say_in_halves, info=INFO)))


@asynccontextmanager
async def open_cutting() -> AsyncIterator[SyntheticEngine]:
    """The same, of an engine that tells its tokens' bytes."""
    async with open_synthetic(SyntheticConfig(one_byte=True, text="Fünf 🐡 schwimmen.")) as engine:
        step = engine.stepper.step

        def cut(run: list[Sequence]) -> Iterator[tuple[Sequence, Step]]:
            for seq, made in step(run):
                piece = made.piece.decode(errors="replace").encode()
                yield seq, Step(made.tokens, piece, made.finish, made.logprobs)

        engine.stepper.step = cut  # type: ignore[method-assign]
        yield engine


def test_an_engine_that_cuts_characters_and_tells_their_bytes_is_found() -> None:
    with pytest.raises(AssertionError):
        TestOneSlotOneByte().test_text_is_whole(open_cutting)
