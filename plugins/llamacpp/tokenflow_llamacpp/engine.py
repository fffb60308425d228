"""The engine: a StepLoop over llama.cpp, and its vocabulary."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from tokenflow.api import EngineStats, Grammars, StepLoop, VocabularyEngine, serving
from tokenflow_llamacpp.config import LlamaConfig
from tokenflow_llamacpp.stepper import LlamaStepper


class LlamaEngine(VocabularyEngine):
    """A GGUF model.

    Args:
        loop: being served.
        stepper: its stepper, open.
        grammars: of its vocabulary.
    """

    def __init__(self, loop: StepLoop, stepper: LlamaStepper, grammars: Grammars) -> None:
        super().__init__(loop, stepper.info, stepper.vocabulary, grammars)
        self._stepper = stepper

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
    async with serving(loop), await trio.to_thread.run_sync(stepper.vocabulary.grammars) as grammars:
        yield LlamaEngine(loop, stepper, grammars)
