"""The synthetic engine passes the kit, on each driver; so do the engines that adapters make."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext

import pytest
import trio
from tokenflow_synthetic import SyntheticConfig, open_in_task, open_synthetic
from tokenflow_synthetic.vocabulary import VOCABULARY
from tokenflow_synthetic.words import tokens

from tokenflow.api import EngineInfo, SequenceRequest, engine_from_blocking_iterator, engine_from_generator
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
