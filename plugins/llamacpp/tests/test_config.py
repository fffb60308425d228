"""Options, and the one line that a wrong one gets."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import tokenflow_llamacpp
from tokenflow_llamacpp import SMOLLM2, LlamaConfig
from tokenflow_llamacpp.config import model_path

from tokenflow.api import StartupError


def test_the_hook_offers_the_engine_and_its_model() -> None:
    (plugin,) = tokenflow_llamacpp.register_engines()
    assert plugin.name == "llamacpp"
    assert plugin.config is LlamaConfig
    assert [source.name for source in plugin.models] == ["smollm2-135m-instruct"]


def test_every_field_has_its_help() -> None:
    (cls,) = ast.parse(inspect.getsource(LlamaConfig)).body
    assert isinstance(cls, ast.ClassDef)
    _, *body = cls.body
    helped = [
        line.target.id
        for line, below in pairwise(body)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr)
    ]
    assert helped == [field.name for field in fields(LlamaConfig)]


def test_a_context_larger_than_the_cache() -> None:
    with pytest.raises(
        ValueError, match="context_length = 1000000 is larger than cache_tokens = 10, which has to hold"
    ):
        LlamaConfig(context_length=1_000_000, cache_tokens=10)
    assert LlamaConfig(context_length=10, cache_tokens=10)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENFLOW_CACHE", str(tmp_path))
    return tmp_path


def test_a_model_that_was_not_pulled(cache: Path) -> None:
    with pytest.raises(StartupError) as info:
        model_path(SMOLLM2.name)
    assert str(info.value) == (
        f"{cache / SMOLLM2.filename}: there is no such model file; "
        "fetch it with `tokenflow pull smollm2-135m-instruct`."
    )


def test_a_model_that_was_pulled_in_part(cache: Path) -> None:
    SMOLLM2.path.write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"has 4 bytes instead of 98362432; fetch it with `tokenflow pull smol"):
        model_path(SMOLLM2.name)


def test_neither_a_name_nor_a_file(cache: Path) -> None:
    with pytest.raises(StartupError) as info:
        model_path("smollm")
    assert str(info.value) == (
        f"{Path.cwd() / 'smollm'}: there is no such model file; `model` is the path of a GGUF file or one of: "
        "smollm2-135m-instruct (`tokenflow pull smollm2-135m-instruct`)."
    )


def test_what_config_check_says_of_the_file(cache: Path, tmp_path: Path) -> None:
    (plugin,) = tokenflow_llamacpp.register_engines()
    line = f"{SMOLLM2.path}: there is no such model file; fetch it with `tokenflow pull smollm2-135m-instruct`"
    assert list(plugin.missing(LlamaConfig())) == [("model", line)]
    (tmp_path / "x.gguf").touch()
    assert list(plugin.missing(LlamaConfig(model=str(tmp_path / "x.gguf")))) == []


def test_a_path(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    assert model_path(str(tmp_path / "x.gguf"))[0] == tmp_path / "x.gguf"
