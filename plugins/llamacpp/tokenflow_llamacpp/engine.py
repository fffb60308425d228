"""The engine: a StepLoop over llama.cpp, and its vocabulary."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from tokenflow.api import EngineStats, Grammars, LoopEngine, StepLoop, serving
from tokenflow_llamacpp.config import LlamaConfig
from tokenflow_llamacpp.stepper import LlamaStepper

SHORT_TEXT = 500
"""Characters. Half a millisecond: about what a way to a thread and back costs under load. Longer texts go there."""


class LlamaEngine(LoopEngine):
    """A GGUF model.

    Args:
        loop: being served.
        stepper: its stepper, open.
        grammars: of its vocabulary.
    """

    def __init__(self, loop: StepLoop, stepper: LlamaStepper, grammars: Grammars) -> None:
        super().__init__(loop, stepper.info, grammars)
        self._stepper = stepper
        self._vocabulary = stepper.vocabulary
        self._tokenizing = trio.CapacityLimiter(2)  # tokenizing has no need to take more cores from decoding

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        if len(text) <= SHORT_TEXT:
            return self._vocabulary.tokenize(text, special)
        return await trio.to_thread.run_sync(self._vocabulary.tokenize, text, special, limiter=self._tokenizing)

    async def detokenize(self, tokens: list[int]) -> str:
        return self._vocabulary.detokenize(tokens)

    async def stats(self) -> EngineStats:
        slots = self._stepper.slots
        return replace(
            await super().stats(),
            prompt_tokens=self._stepper.prompt_tokens,
            kv_tokens_used=slots.used,
            kv_tokens_capacity=slots.capacity,
            kv_tokens_evicted=slots.evicted,
        )


@asynccontextmanager
async def open_llama(config: LlamaConfig) -> AsyncGenerator[LlamaEngine, None]:
    """Load the model in the thread that decodes, and serve it."""
    stepper = LlamaStepper(config)
    loop = StepLoop(stepper)
    async with serving(loop):
        grammars = await trio.to_thread.run_sync(stepper.vocabulary.grammars)
        async with grammars:
            yield LlamaEngine(loop, stepper, grammars)
