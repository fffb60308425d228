"""The engine: the stepper on a StepLoop, with the tokenizer and the numbers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import fields, replace

import trio

from tokenflow.api import EngineInfo, EngineStats, LoopEngine, Sampling, StepLoop, serving
from tokenflow_synthetic import vocabulary
from tokenflow_synthetic.config import SyntheticConfig
from tokenflow_synthetic.stepper import SyntheticStepper

_PROMISES = {"logit_bias", "banned_strings"}
"""What shows in any text whether it was honoured."""
CAPABILITIES = {"logprobs", "ignore_eos"} | {field.name for field in fields(Sampling)} - _PROMISES
"""Sampling parameters are taken so that any client can be served; but for `seed` they change nothing."""


class SyntheticEngine(LoopEngine):
    """What `open_synthetic` gives; `stepper` has the counts by request."""

    def __init__(self, loop: StepLoop, stepper: SyntheticStepper) -> None:
        config = stepper.config
        super().__init__(
            loop,
            EngineInfo(
                model="synthetic",
                context_length=config.context_length,
                slots=config.slots,
                vocab_size=len(vocabulary.VOCABULARY),
                capabilities=frozenset(CAPABILITIES - ({"seed"} if config.text is not None else set())),
                max_logprobs=20,
                chat_template=vocabulary.CHAT_TEMPLATE,
                eos_token="<|im_end|>",
                special_tokens=frozenset(vocabulary.SPECIAL),
            ),
        )
        self.stepper = stepper

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return vocabulary.tokenize(text, special=special)

    async def detokenize(self, tokens: list[int]) -> str:
        return vocabulary.detokenize(tokens)

    async def stats(self) -> EngineStats:
        rows = list(self.stepper.rows.values())
        return replace(
            await super().stats(),
            prompt_tokens=self.stepper.prompt_tokens,
            kv_tokens_used=sum(row.prompt_tokens + row.made for row in rows),
            kv_tokens_capacity=self.info.slots * self.info.context_length,
        )


@asynccontextmanager
async def open_synthetic(config: SyntheticConfig) -> AsyncGenerator[SyntheticEngine, None]:
    """On a thread of its own, in real time: what the server runs."""
    stepper = SyntheticStepper(config)
    loop = StepLoop(stepper)
    try:
        async with serving(loop):
            yield SyntheticEngine(loop, stepper)
    finally:
        stepper.unwedge.set()  # a thread that was given up may go now


@asynccontextmanager
async def open_in_task(config: SyntheticConfig, *, step_s: float = 0.01) -> AsyncGenerator[SyntheticEngine, None]:
    """In a Trio task, in Trio's time, where each step takes `step_s`: on a mock clock everything is deterministic.

    Prefill and rates are kept to the precision of a step. `wedge_at` would hang the caller: it is for threads.
    """
    stepper = SyntheticStepper(config, clock=trio.current_time, wait=False)
    loop = StepLoop(stepper)

    async def pace(loop: StepLoop) -> None:
        await trio.sleep(step_s)

    async with serving(loop, pace=pace):
        yield SyntheticEngine(loop, stepper)
