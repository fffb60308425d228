"""What `tokenflow engine check` runs: the kit, on the engine that `check.run` hands in as a fixture."""

from __future__ import annotations

from time import perf_counter

import pytest
import trio

from tokenflow.testing.conformance import EngineConformance, OpenEngine
from tokenflow.testing.fakes import record

QUICK_S = 0.001
"""A token that takes less is made, and many after it, before a cancel has come to the engine's thread."""


class TestEngine(EngineConformance):
    measured = False

    @pytest.fixture
    def open_engine(self, configured_engine: OpenEngine) -> OpenEngine:
        kit = type(self)
        if not kit.measured:
            kit.measured = True
            if trio.run(self._seconds_per_token, configured_engine) < QUICK_S:
                kit.tokens_in_flight = 10_000
        return configured_engine

    async def _seconds_per_token(self, open_engine: OpenEngine) -> float:
        async with open_engine() as engine:
            request = await self.request(engine)
            began = perf_counter()
            recorder = await record(engine, request)
            return (perf_counter() - began) / max(1, recorder.tokens)
