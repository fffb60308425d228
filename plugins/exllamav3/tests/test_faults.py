"""What goes wrong in one sequence ends it alone; what goes wrong in the library costs nobody else a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio
from tokenflow_exllamav3 import Exl3Config, open_exllamav3
from tokenflow_exllamav3.config import PAGE

from plugins.exllama_common.tests.faults import Faults, Make, fail, three
from plugins.exllama_common.tests.table import Table
from tokenflow.api import ContextLengthExceeded, EngineError, InvalidRequest, SequenceRequest
from tokenflow.testing.fakes import record

from .rig.model import hash_load

# --- one sequence's ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guesses", [{}, {"draft_model": "rig"}], ids=["plain", "guessing"])
@pytest.mark.parametrize("where", ["rng", "sampler", "held_text", "sequence_ids"])
def test_one_sequence_fails_in_the_batch(make_table: Make, where: str, guesses: dict[str, Any]) -> None:
    """As it draws, or as what it drew is taken in."""
    table = make_table(**guesses)
    wanted, played = three(table)
    job = played[1].seq.data
    if where == "sequence_ids":
        job.sequence.sequence_ids.append = fail
    else:
        setattr(job, where, None)
    table.play(*played)
    assert played[1].ended is not None
    assert isinstance(played[1].ended.error, EngineError)
    assert wanted[1].startswith(played[1].data)
    assert [played[0].data, played[2].data] == [wanted[0], wanted[2]]
    assert table.batch.used_tokens == 0


def test_one_sequence_fails_in_its_prompt(table: Table) -> None:
    wanted, played = three(table)
    bad = table.seat(table.prompt(1200, seed=9))
    table.model.before = lambda what, ids: fail() if what == "prefill" else None
    while not bad.ended:  # the library lets some steps pass between two pieces of a prompt
        table.step(*played, bad)
    table.model.before = lambda what, ids: None
    assert isinstance(bad.ended.error, EngineError)
    table.play(bad, *played)
    assert [one.data for one in played] == wanted
    again = table.seat(table.prompt(1200, seed=9))
    assert again.seq.cached_tokens == 0
    table.play(again)
    assert again.data == table.alone(table.prompt(1200, seed=9)).data


def test_logits_that_are_no_numbers_are_one_sequences(table: Table) -> None:
    """The library looks at those of a first token, and raises."""
    wanted, played = three(table)
    forward = table.model.forward

    def poisoned(input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = forward(input_ids, params)
        logits[-1] = float("nan")  # who has come last
        return logits

    bad = table.seat(table.prompt(20, seed=9))
    table.model.forward = poisoned
    table.step(*played, bad)
    table.model.forward = forward
    assert bad.ended is not None
    assert "non-finite" in str(bad.ended.error)
    table.play(bad, *played)
    assert [one.data for one in played] == wanted


def test_too_large_for_the_context(table: Table) -> None:
    with pytest.raises(ContextLengthExceeded):
        table.seat(table.prompt(2000), 49)
    assert table.batch.used_tokens == 0


def test_too_large_for_the_cache(make_table: Make) -> None:
    """It is never promised; were it, the library's assertion is one sequence's refusal."""
    table = make_table(cache_tokens=4 * PAGE, context_length=None)
    assert table.stepper.info.context_length == 4 * PAGE - 1
    other = table.seat(table.prompt(100), 20)
    object.__setattr__(table.stepper.info, "context_length", 4096)
    with pytest.raises(InvalidRequest, match="5 pages"):
        table.seat(table.prompt(1100), 10)
    table.play(other)
    assert other.tokens == 20


@pytest.mark.parametrize("options", [{}, {"draft_model": "rig"}, {"ngram_match": 1}], ids=["plain", "draft", "ngram"])
def test_all_of_the_context_can_be_used(make_table: Make, options: dict[str, Any]) -> None:
    """Alone in a cache that is no larger."""
    table = make_table(cache_tokens=2 * PAGE, context_length=None, **options)
    length = table.stepper.info.context_length
    one = table.seat(table.prompt(length - 30), 30)
    table.play(one)
    assert one.tokens == 30
    assert one.steps[-1].finish == "length"


@pytest.mark.parametrize("token", [-1, 410, 1 << 40])
def test_a_token_outside_the_vocabulary(table: Table, token: int) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        table.seat((1, token))


# --- the library's ----------------------------------------------------------------------------------------------------


class TestFaults(Faults):
    pass


def test_a_generator_that_cannot_be_made_again_ends_the_engine() -> None:
    """No new generator can be made: the loop ends, every caller is let go, and the host opens the engine anew."""

    async def main() -> None:
        with pytest.raises(EngineError, match="for good"):
            async with open_exllamav3(Exl3Config(model="rig"), hash_load) as engine:
                stepper: Any = engine.loop.stepper
                stepper.batch.model.before = lambda what, ids: fail() if what == "decode" else None
                object.__setattr__(stepper._loaded.main, "cache", None)
                with pytest.raises(EngineError):
                    await record(engine, SequenceRequest(prompt=(1, 2, 3), max_tokens=4))
                await trio.sleep_forever()

    trio.run(main)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_gpus_that_work_together_are_not_trusted_after_a_failure(table: Table, where: str) -> None:
    """Of several processes one has failed: whatever the others still have to say is not asked for."""
    table.steps_may_fail = True
    _, played = three(table)
    table.model.loaded_tp = True
    table.model.before = lambda what, ids: fail() if what == where else None
    newcomer = table.seat(table.prompt(1200, seed=9))
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        for _ in range(6):  # a piece of a prompt comes in every so many steps
            table.step(*played, newcomer)
    with pytest.raises(EngineError, match="for good: EngineError: the processes of its GPUs may be out of step"):
        table.stepper.remove(newcomer.seq)
    table.held.clear()
