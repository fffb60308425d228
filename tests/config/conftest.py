"""A catalogue without plugins, and a way to load a text as if it were `conf/x.toml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, MinLen, MultipleOf
from pydantic import StringConstraints

from tokenflow.config import Loaded, load
from tokenflow.errors import ConfigError, PluginError


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """A nested table."""

    name: str
    """Whose."""
    pitch: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    volume: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoConfig:
    """Says it again."""

    times: Annotated[int, Ge(1)] = 1
    """How often."""
    file: Path | None = None
    """A file."""
    mode: Literal["plain", "loud"] = "plain"
    """How."""
    size: int | str = "auto"
    """A number or a word."""
    voices: tuple[Voice, ...] = ()
    """Several tables."""
    voice: Voice | None = None
    """One table."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """A table with free keys."""
    tags: frozenset[str] = frozenset()
    """A set."""
    api_key: str | None = None
    """Secret."""
    pair: tuple[float, float] = (1.0, 2.0)
    """Exactly two."""
    word: Annotated[str, MinLen(2)] = "word"
    """Not too short."""
    code: Annotated[str, StringConstraints(pattern="^x")] | None = None
    """Begins with x."""
    level: Literal["low", "high"] | None = None
    """One of two, or none."""
    even: Annotated[int, MultipleOf(2)] = 2
    either: Voice | Sound | None = None
    both: int = field(init=False, default=2)
    """No key: it is not given, it is made."""

    def __post_init__(self) -> None:
        if self.times == 13:
            raise ValueError("times = 13 brings bad luck; take 12")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedyConfig:
    """Has a key without a default."""

    path: str
    """Where to."""


class FakeCatalogue:
    """Knows `echo` and `needy`, as engines and as sinks."""

    classes: Mapping[str, type] = {"echo": EchoConfig, "needy": NeedyConfig}

    def __init__(self) -> None:
        self.files: list[Path] = []

    def load_file(self, path: Path) -> None:
        if path.name == "broken.py":
            raise PluginError(f"plugin file {path} is broken")
        self.files.append(path)

    def engine_config(self, name: str) -> type:
        if name not in self.classes:
            raise PluginError(f'no plugin offers "{name}"')
        return self.classes[name]

    sink_config = engine_config

    def engine_missing(self, name: str, options: Any) -> list[tuple[str, str]]:
        if getattr(options, "times", 0) == 404:
            raise PluginError("the plugin failed to look")
        file = getattr(options, "file", None)
        return [("file", f"there is no file {file}; name another")] if file else []

    sink_missing = engine_missing


Load = Callable[..., Loaded]
Problems = Callable[..., list[str]]


@pytest.fixture
def catalogue() -> FakeCatalogue:
    return FakeCatalogue()


@pytest.fixture
def load_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, catalogue: FakeCatalogue) -> Load:
    """`load` of a text, in a folder of its own where it is `conf/x.toml`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()

    def load_it(
        text: str | bytes,
        env: Mapping[str, str] | None = None,
        *,
        look: bool = False,
        template_fault: Callable[[str | Path], str | None] = lambda given: None,
        **overrides: Any,
    ) -> Loaded:
        path = Path("conf/x.toml")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        return load(path, env or {}, dotted, catalogue, look=look, template_fault=template_fault)

    return load_it


@pytest.fixture
def problems_of(load_text: Load) -> Problems:
    """The problems of a text that must have some."""

    def problems(text: str | bytes, env: Mapping[str, str] | None = None, **overrides: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_text(text, env, **overrides)
        return caught.value.problems

    return problems
