"""Plugins for these tests: files, and distributions that are installed into a folder on the path for one test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

ENGINE = """
from dataclasses import dataclass
from tokenflow.api import EnginePlugin, SinkPlugin, hookimpl

@dataclass(frozen=True, slots=True, kw_only=True)
class {name}Config:
    times: int = 1

def open_it(config):
    raise NotImplementedError

@hookimpl
def register_engines():
    return [EnginePlugin(name="{name}", config={name}Config, open=open_it)]

@hookimpl
def register_sinks():
    return [SinkPlugin(name="{name}-sink", config={name}Config, open=open_it)]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a plugin file; without a text, one that offers an engine called `name`."""

    def write_it(file: str, text: str | None = None, *, name: str = "echo") -> Path:
        path = tmp_path / file
        path.write_text(dedent(text) if text is not None else ENGINE.format(name=name))
        return path

    return write_it


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a distribution with entry points `{name: module}`, and its modules."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def install_it(distribution: str, points: dict[str, str], **modules: str) -> None:
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {module}\n" for name, module in points.items())
        (info / "entry_points.txt").write_text(f"[tokenflow]\n{lines}")
        for module, text in modules.items():
            (site / f"{module}.py").write_text(dedent(text))
        importlib.invalidate_caches()

    yield install_it
    for module in set(sys.modules) - before:
        if str(site) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]
