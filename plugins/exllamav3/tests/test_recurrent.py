"""Models that keep a state of each sequence beside its pages: sliding windows, linear attention and the like.

What they keep cannot be taken back. Whoever goes on without it is evaluated anew, from the last copy that was kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tokenflow_exllamav3 import Exl3Config
from tokenflow_exllamav3.config import PAGE
from tokenflow_exllamav3.stepper import Exl3Stepper

from plugins.exllama_common.tests.faults import Faults
from plugins.exllama_common.tests.fixtures import tables
from plugins.exllama_common.tests.guided import Guided
from plugins.exllama_common.tests.pausing import Pausing
from plugins.exllama_common.tests.table import Table
from tokenflow.api import Dry, Sampling

from . import test_crowd
from .rig.model import hash_load


@pytest.fixture
def make_table() -> Iterator[Callable[..., Table]]:
    def new_stepper(**options: Any) -> Exl3Stepper:
        usual = {"slots": 4, "context_length": 2048, "cache_tokens": 4096, "chunk_size": 512}
        return Exl3Stepper(Exl3Config(model="rig", **(usual | options)), partial(hash_load, recurrent=True))

    with tables(new_stepper) as make:
        yield make


class TestPausing(Pausing):
    tidied_after = 8

    @pytest.fixture
    def sampling(self) -> Sampling:
        return Sampling(seed=7, min_p=0.05, repetition_penalty=1.2, dry=Dry(multiplier=2.0, allowed_length=1))


class TestFaults(Faults):
    test_a_failure_after_some_have_taken_their_tokens = None  # who comes before whom is another matter here


class TestGuided(Guided):
    pass


@pytest.mark.parametrize("left", [50, PAGE - 20, PAGE + 50, 2 * PAGE + 50])
def test_what_is_cached_is_what_is_not_evaluated(table: Table, left: int) -> None:
    """Pages alone are of no use: what counts is where a state was kept, of the same prompt or of a longer one."""
    prompt = table.prompt(6 * PAGE + 50)
    wanted = table.alone(prompt[: len(prompt) - left]).data
    table.play(table.seat(prompt))
    counted = table.stepper.prompt_tokens
    again = table.seat(prompt[: len(prompt) - left])
    table.play(again)
    assert again.data == wanted
    assert again.seq.cached_tokens % PAGE == 0
    assert table.stepper.prompt_tokens - counted == len(prompt) - left - again.seq.cached_tokens


def test_choices_of_one_prompt(table: Table) -> None:
    """They share its pages, and each has a state of its own: it is told what it need not evaluate, and that is none."""
    prompt = table.prompt(3 * PAGE + 100)
    wanted = [table.alone(prompt, sampling=Sampling(seed=seed)).data for seed in range(3)]
    counted = table.stepper.prompt_tokens
    played = [table.seat(prompt, sampling=Sampling(seed=seed)) for seed in range(3)]
    table.play(*played)
    assert [one.data for one in played] == wanted
    cached = sum(one.seq.cached_tokens for one in played)
    assert table.stepper.prompt_tokens - counted == 3 * len(prompt) - cached


@pytest.mark.parametrize("seed", [2, 3], ids=["draft model", "ngrams"])
def test_a_crowd(seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With steps that fail, banned strings and tokens that are guessed; some have no pages for a while."""
    caplog.set_level(logging.CRITICAL, "tokenflow.exllamav3")  # a record of a failure keeps its frames
    monkeypatch.setattr(test_crowd, "hash_load", partial(hash_load, recurrent=True))
    test_crowd.play(seed)
