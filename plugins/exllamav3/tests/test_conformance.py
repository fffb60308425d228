"""The engine passes the kit, with the library's real scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenflow_exllamav3 import Exl3Config, open_exllamav3

from tokenflow.testing.conformance import EngineConformance, OpenEngine

from .rig.model import hash_load

CONFIG = Exl3Config(model="rig", slots=4, context_length=1024, chunk_size=256)


class OnRig(EngineConformance):
    length = 16
    long_prompt_tokens = 700  # three pages, so three steps
    tokens_in_flight = 40  # a step takes less than a thread's way to the event loop and back, on a busy machine
    config = CONFIG

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return lambda: open_exllamav3(self.config, hash_load)


class TestPlain(OnRig):
    pass


class TestGuessingAhead(OnRig):
    """A draft model that is right two times out of three."""

    config = replace(CONFIG, draft_model="rig", draft_tokens=3)


@pytest.mark.stress
class TestRepeating(OnRig):
    """Guesses from what has been said."""

    config = replace(CONFIG, ngram_match=1, draft_tokens=3)


@pytest.mark.stress
class TestShortOfPages(OnRig):
    """Never more than two sequences fit, and each asks for a page at a time."""

    config = replace(CONFIG, cache_tokens=2048, reserve_tokens=256)
