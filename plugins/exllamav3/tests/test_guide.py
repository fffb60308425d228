"""Sequences with a grammar."""

from __future__ import annotations

from plugins.exllama_common.tests.guided import Guided


class TestGuided(Guided):
    pass
