"""The engine passes the kit, with the real model."""

from __future__ import annotations

import pytest
from tokenflow_llamacpp import LlamaConfig, open_llama

from tokenflow.testing.conformance import EngineConformance, OpenEngine

CONFIG = LlamaConfig(slots=2, context_length=256, batch=64, prefill_chunk=32)


@pytest.mark.model
class TestLlama(EngineConformance):
    length = 12  # a real model takes its time: long enough for every stop string of the kit
    long_prompt_tokens = 128
    exact_in_company = False  # sums depend on the batch's shape

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return lambda: open_llama(CONFIG)
