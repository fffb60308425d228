"""The engine passes the kit, on the rig."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenflow_exllamav2 import Exl2Config, open_exllamav2

from tokenflow.testing.conformance import EngineConformance, OpenEngine

from .rig.model import load_rig


class TestRig(EngineConformance):
    options: ClassVar[dict[str, Any]] = {}
    paged = True
    tokens_in_flight = 1000  # a step takes less than a thread's way to the event loop and back

    @pytest.fixture
    def open_engine(self, directory: Path) -> OpenEngine:
        config = Exl2Config(model=str(directory), slots=3, context_length=1024, **self.options)
        return lambda: open_exllamav2(config, partial(load_rig, paged=self.paged))


@pytest.mark.stress
class TestUnpaged(TestRig):
    """Without flash-attn: one slot."""

    paged = False


@pytest.mark.stress
class TestGuessing(TestRig):
    options: ClassVar = {"draft_model": "another"}


@pytest.mark.stress
class TestGuessingFromItsOwnText(TestRig):
    options: ClassVar = {"ngram_draft": True}
