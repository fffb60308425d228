"""The engine that both plugins make of their steppers: a StepLoop, and the model's vocabulary."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import trio

from tokenflow.api import EngineStats, Grammars, StepLoop, VocabularyEngine, serving
from tokenflow_exllama.stepper import ExllamaStepper


class ExllamaEngine(VocabularyEngine):
    """A model in one of the libraries.

    Args:
        loop: being served.
        stepper: its stepper, open.
        grammars: of its vocabulary, entered; None: it is asked for none.
    """

    def __init__(
        self, loop: StepLoop, stepper: ExllamaStepper[Any, Any, Any], grammars: Grammars | None = None
    ) -> None:
        super().__init__(loop, stepper.info, stepper.vocabulary, grammars)
        self._stepper = stepper

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
async def open_engine(stepper: ExllamaStepper[Any, Any, Any]) -> AsyncGenerator[ExllamaEngine, None]:
    """Load the model in the thread that decodes, and serve it."""
    loop = StepLoop(stepper)
    async with serving(loop), await trio.to_thread.run_sync(stepper.vocabulary.grammars) as grammars:
        yield ExllamaEngine(loop, stepper, grammars)
