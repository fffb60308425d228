"""The kit's promises about grammars, kept by a model without a model: it throws dice among the bytes it may say."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tokenflow.api import EngineInfo, Grammars, InvalidRequest, LoopEngine, SequenceRequest, Step, StepLoop, serving
from tokenflow.api.grammar import Matcher
from tokenflow.api.loop import Sequence
from tokenflow.testing.conformance import OpenEngine, Structured
from tokenflow.testing.conformance.structured import CODE
from tokenflow.testing.fakes import record
from tokenflow.testing.steppers import PlainStepper

END = 256


class DiceStepper(PlainStepper):
    """Bytes by chance, with as many more as the grammar makes certain."""

    def add(self, seq: Sequence) -> bool:
        seq.data = random.Random(seq.request.sampling.seed or 0)
        return super().add(seq)

    def step(self, run: list[Sequence]) -> Iterable[tuple[Sequence, Step]]:
        for seq in run:
            if self.used[seq] > 0:
                self.used[seq] -= self.chunk
            elif seq.matcher is None:
                yield seq, Step(1, bytes([seq.data.choice(b"abc ")]))
            else:
                yield from ((seq, step) for step in self.draw(seq.matcher, seq.data, seq.room))

    def draw(self, matcher: Matcher, dice: random.Random, room: int) -> Iterable[Step]:
        tokens = matcher.forced()[:room] or [dice.choice([n for n, may in enumerate(matcher.mask()) if may])]
        if tokens == [END]:
            return [Step(1, b"", "stop")]
        matcher.accept(*tokens)
        steps = [Step(1, bytes([token])) for token in tokens]
        return [*steps[:-1], replace(steps[-1], finish="stop" if matcher.ended else None)]


class DiceEngine(LoopEngine):
    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    async def detokenize(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    return Grammars(tokens, ends=[END], specials=[END], tokenize=lambda text: list(text.encode()))


@asynccontextmanager
async def open_dice(grammars: Grammars | None) -> AsyncIterator[DiceEngine]:
    info = EngineInfo(model="dice", context_length=1024, slots=2, capabilities=frozenset({"seed"}))
    loop = StepLoop(DiceStepper(slots=2))
    async with serving(loop):
        if grammars is None:
            yield DiceEngine(loop, info)
        else:
            async with grammars:
                yield DiceEngine(loop, info, grammars)


class TestDice(Structured):
    @pytest.fixture
    def open_engine(self, grammars: Grammars) -> OpenEngine:
        return lambda: open_dice(grammars)


async def test_an_engine_without_grammars_says_so() -> None:
    async with open_dice(None) as engine:
        assert "grammar" not in engine.info.capabilities
        with pytest.raises(InvalidRequest, match="cannot hold a text to a grammar"):
            await engine.compile(CODE)
        with pytest.raises(InvalidRequest, match="cannot hold a text to a grammar"):
            await record(engine, SequenceRequest(prompt=(1,), max_tokens=4, grammar=CODE))
