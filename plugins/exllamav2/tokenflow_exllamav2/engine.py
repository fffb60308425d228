"""The engine: a StepLoop over exllamav2, and the model's vocabulary."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from tokenflow.api import EngineStats, Grammars, LoopEngine, StepLoop, serving
from tokenflow_exllamav2.config import Exl2Config
from tokenflow_exllamav2.stepper import Exl2Stepper, Load, load_model

SHORT_TEXT = 500
"""Characters. About what a way to a thread and back costs under load. Longer texts go there."""


class Exl2Engine(LoopEngine):
    """A model in exllamav2.

    Args:
        loop: being served.
        stepper: its stepper, open.
        grammars: of its vocabulary, entered; None: it is asked for none.
    """

    def __init__(self, loop: StepLoop, stepper: Exl2Stepper, grammars: Grammars | None = None) -> None:
        super().__init__(loop, stepper.info, grammars)
        self._stepper = stepper
        self._vocabulary = stepper.vocabulary
        self._tokenizing = trio.CapacityLimiter(2)  # tokenizing has no need to take more cores from sampling

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        if len(text) <= SHORT_TEXT:
            return self._vocabulary.tokenize(text, special)
        return await trio.to_thread.run_sync(self._vocabulary.tokenize, text, special, limiter=self._tokenizing)

    async def detokenize(self, tokens: list[int]) -> str:
        return self._vocabulary.detokenize(tokens)

    async def stats(self) -> EngineStats:
        batch = self._stepper.batch
        return replace(
            await super().stats(),
            prompt_tokens=self._stepper.prompt_tokens,
            kv_tokens_used=batch.used_tokens,
            kv_tokens_capacity=batch.max_total_tokens,
            kv_tokens_evicted=batch.evicted_tokens,
        )


@asynccontextmanager
async def open_exllamav2(config: Exl2Config, load: Load = load_model) -> AsyncGenerator[Exl2Engine, None]:
    """Load the model in the thread that decodes, and serve it.

    Args:
        load: how; tests have no GPU.
    """
    stepper = Exl2Stepper(config, load)
    loop = StepLoop(stepper)
    async with serving(loop):
        grammars = await trio.to_thread.run_sync(stepper.vocabulary.grammars)
        async with grammars:
            yield Exl2Engine(loop, stepper, grammars)
