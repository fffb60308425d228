"""The command that checks a card, as far as it goes without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import trio
from tokenflow_exllamav2 import Exl2Config, open_exllamav2

from bench import gpu_check

from .rig.library import import_exllamav2
from .rig.model import HashCache, HashModel, load_rig, settings_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == gpu_check.NO_GPU
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("Nothing was checked: ")


def test_without_flash_attn_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bare generator would not begin, and who pauses would wait for a slot that the other one has."""
    import_exllamav2()
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    monkeypatch.setattr("tokenflow_exllama.gpus.import_on_gpu", lambda library, version: None)
    monkeypatch.setattr("exllamav2.attn.has_flash_attn_with_paged", False)
    assert gpu_check.main() == gpu_check.NO_GPU
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("Nothing was checked: exllamav2 finds no flash-attn")


def test_leaving_and_pausing(directory: Path) -> None:
    async def contract() -> tuple[dict, dict]:
        config = Exl2Config(**gpu_check.options(directory))
        async with open_exllamav2(config, load_rig) as engine:
            return await gpu_check.leavings(engine, 1), await gpu_check.pausings(engine)

    leaving, pausing = trio.run(contract)
    assert set(leaving) == set(gpu_check.PHASES)
    assert leaving["waiting"]["tokens_after"] == 0
    assert pausing["parked"] == {"same_text": True, "evaluated_again": 0, "whole": True}
    assert pausing["released"]["same_text"]
    assert pausing["released"]["evaluated_again"] <= gpu_check.PAGE


def test_the_bare_generator(directory: Path) -> None:
    """The library's own, on the rig: the other side of the ratio."""
    library = import_exllamav2()
    from exllamav2.generator import ExLlamaV2DynamicGenerator

    shape = gpu_check_shape(directory)
    settings = settings_of(directory, shape)
    tokenizer = library.ExLlamaV2Tokenizer(settings)
    generator = ExLlamaV2DynamicGenerator(HashModel(settings), HashCache(4096), tokenizer, max_batch_size=4)
    assert gpu_check.bare_rate(generator, 8, [[1, 2, 3], [4, 5, 6]]) > 0
    assert not generator.referenced_pages


def gpu_check_shape(directory: Path) -> object:
    from tokenflow_exllamav2.loading import Shape

    return Shape.of(Exl2Config(model=str(directory)), 4096)


def test_the_table_and_the_verdict() -> None:
    good = {
        "model": "small",
        "kit": {"kept": 40, "broken": 0, "not tried": 1},
        "rates": {1: {"bare": 200.0, "http": 198.0, "ratio": 0.99}},
        "leaving": {"decoding": {"median_ms": 3.0, "p99_ms": 5.0, "worst_ms": 6.0, "tokens_after": 1}},
        "pausing": {how: {"same_text": True, "evaluated_again": 0, "whole": True} for how in ("parked", "released")},
    }
    assert gpu_check.holds(good)
    assert not gpu_check.holds(good | {"kit": {"kept": 40, "broken": 1}})
    assert not gpu_check.holds(good | {"pausing": good["pausing"] | {"parked": {"whole": True, "evaluated_again": 9}}})
    lines = gpu_check.table(good).splitlines()
    assert lines[0] == "small: 40 kept, 0 broken, 1 not tried"
    assert "198.0 tokens/s through HTTP, 0.990 of the bare 200.0" in lines[1]
    assert len(lines) == 5
