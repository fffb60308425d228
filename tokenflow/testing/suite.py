"""What `tokenflow engine check` runs: the kit, on the engine that `check.run` hands in as a fixture."""

from __future__ import annotations

import pytest

from tokenflow.testing.conformance import EngineConformance, OpenEngine


class TestEngine(EngineConformance):
    @pytest.fixture
    def open_engine(self, configured_engine: OpenEngine) -> OpenEngine:
        return configured_engine
