"""The engine: a StepLoop over exllamav3, and its vocabulary."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from tokenflow.api import EngineStats, Grammars, LoopEngine, StepLoop, serving
from tokenflow_exllamav3.config import Exl3Config
from tokenflow_exllamav3.loading import load as load_model
from tokenflow_exllamav3.stepper import Exl3Stepper, Load

SHORT_TEXT = 500
"""Characters. Half a millisecond: about what a way to a thread and back costs under load. Longer texts go there."""


class Exl3Engine(LoopEngine):
    """An EXL3 model.

    Args:
        loop: being served.
        stepper: its stepper, open.
        grammars: of its vocabulary, entered; None: it is asked for none.
    """

    def __init__(self, loop: StepLoop, stepper: Exl3Stepper, grammars: Grammars | None = None) -> None:
        super().__init__(loop, stepper.info, grammars)
        self._stepper = stepper
        self._vocabulary = stepper.vocabulary
        self._tokenizing = trio.CapacityLimiter(2)

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        if len(text) <= SHORT_TEXT:
            return self._vocabulary.tokenize(text, special)
        return await trio.to_thread.run_sync(self._vocabulary.tokenize, text, special, limiter=self._tokenizing)

    async def detokenize(self, tokens: list[int]) -> str:
        return self._vocabulary.detokenize(tokens)

    async def stats(self) -> EngineStats:
        stepper = self._stepper
        return replace(
            await super().stats(),
            prompt_tokens=stepper.prompt_tokens,
            kv_tokens_used=stepper.used_tokens,
            kv_tokens_capacity=stepper.capacity,
            kv_tokens_evicted=stepper.evicted_tokens,
        )


@asynccontextmanager
async def open_exllamav3(config: Exl3Config, load: Load = load_model) -> AsyncGenerator[Exl3Engine, None]:
    """Load the model in the thread that decodes, and serve it.

    Args:
        load: how; tests have no GPU.
    """
    stepper = Exl3Stepper(config, load)
    loop = StepLoop(stepper)
    async with serving(loop), await trio.to_thread.run_sync(stepper.vocabulary.grammars) as grammars:
        yield Exl3Engine(loop, stepper, grammars)
