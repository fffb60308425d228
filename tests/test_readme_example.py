"""The README's engine is short, loads as a plugin file, and keeps the contract."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tokenflow_llamacpp.sampling import CAN

from tokenflow.api import EnginePlugin, Sampling
from tokenflow.engines.registry import Registry
from tokenflow.testing.conformance import EngineConformance, OpenEngine

README = Path(__file__).parents[1] / "README.md"
MARK = "<!-- example-engine -->"


def block() -> str:
    after = README.read_text(encoding="utf-8").split(MARK, 1)[1]
    return after.split("```python\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def plugin(tmp_path: Path) -> EnginePlugin[Any]:
    path = tmp_path / "parrot.py"
    path.write_text(block(), encoding="utf-8")
    registry = Registry(find=tuple)
    registry.load_file(path)
    (engine,) = registry.engines().values()
    return engine


def test_it_is_twenty_lines() -> None:
    assert len(block().strip().splitlines()) <= 20


def test_what_llamacpp_cannot_do_is_said() -> None:
    said = README.read_text(encoding="utf-8").split("`llamacpp` cannot do ", 1)[1].partition(",")[0]
    assert set(re.findall(r"\w+", said.replace(" and ", " "))) == {field.name for field in fields(Sampling)} - CAN


class TestReadmeEngine(EngineConformance):
    @pytest.fixture
    def open_engine(self, plugin: EnginePlugin[Any]) -> OpenEngine:
        return lambda: plugin.open(plugin.config())
