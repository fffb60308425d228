"""What goes wrong in one sequence ends it alone; what goes wrong in the library costs nobody else a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenflow_exllamav2.config import PAGE

from plugins.exllama_common.tests.faults import Faults, fail, three
from plugins.exllama_common.tests.table import Table
from tokenflow.api import ContextLengthExceeded, EngineError, InvalidRequest, Sampling

# --- one sequence's -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["rng", "gen_settings", "held_text", "sequence_ids"])
def test_one_sequence_fails_in_the_batch(table: Table, where: str) -> None:
    wanted, played = three(table)
    job = played[1].seq.data
    if where == "sequence_ids":  # while its token is taken, not while it is drawn
        job.sequence.sequence_ids.append = fail
    else:
        setattr(job, where, None)
    table.play(*played)
    error = played[1].ended
    assert error is not None and isinstance(error.error, EngineError)
    assert wanted[1].startswith(played[1].data)
    assert [played[0].data, played[2].data] == [wanted[0], wanted[2]]
    assert table.batch.used_tokens == 0


def test_one_sequence_fails_in_its_prompt(table: Table) -> None:
    wanted, played = three(table)
    bad = table.seat(table.prompt(1200, seed=9))
    table.step(*played, bad)
    table.model.before = lambda what, ids: fail() if what == "prefill" else None
    table.step(*played, bad)
    assert bad.ended is not None and isinstance(bad.ended.error, EngineError)
    table.play(*played)
    assert [one.data for one in played] == wanted


def test_a_page_that_was_being_written_is_not_trusted(make_table: Any) -> None:
    """The library would give it its old name back, under which it is looked for."""
    table = make_table(cache_tokens=8 * PAGE, context_length=8 * PAGE)
    kept = table.prompt(7 * PAGE + 100)
    wanted = table.alone(kept).data
    table.play(table.seat(kept))
    bad = table.seat(table.prompt(200, seed=9), 8)
    (page,) = bad.seq.data.pages

    def fail_while_writing(what: str, ids: torch.Tensor) -> None:
        table.batch.cache.flat[page.page_index * PAGE : (page.page_index + 1) * PAGE] = 7
        fail()

    table.model.before = fail_while_writing
    table.play(bad)
    table.model.before = lambda what, ids: None
    again = table.seat(kept)
    table.play(again)
    assert again.data == wanted


def test_a_prompt_of_one_token_beside_guesses_from_text(make_table: Any) -> None:
    """The library looks for the last three tokens of a text that has one."""
    table = make_table(ngram_draft=True)
    wanted, played = three(table)
    short = table.seat((5,), 20)
    table.play(*played, short)
    assert [one.data for one in played] == wanted
    assert short.tokens == 20


def test_too_large_for_the_context(table: Table) -> None:
    with pytest.raises(ContextLengthExceeded):
        table.seat(table.prompt(3000), 1097)
    assert table.batch.used_tokens == 0


def test_too_large_for_the_cache(make_table: Any) -> None:
    """It is never promised; were it, the library's assertion is one sequence's refusal."""
    table = make_table(cache_tokens=4 * PAGE, context_length=None)
    assert table.stepper.info.context_length == 4 * PAGE
    wanted = table.alone(table.prompt(20)).data
    played = table.seat(table.prompt(20))
    object.__setattr__(table.stepper.info, "context_length", 4096)
    with pytest.raises(InvalidRequest, match="5 pages"):
        table.seat(table.prompt(1000), 100)
    table.play(played)
    assert played.data == wanted


# --- the whole batch's ----------------------------------------------------------------------------------------------


class TestFaults(Faults):
    pass


# --- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("banned", [None, ("never said",)])
def test_a_page_that_another_has_and_has_not_filled(table: Table, banned: tuple[str, ...] | None) -> None:
    """One says, word for word, what is in another one's prompt, which is not through: the library asserts it is."""
    start = table.prompt(PAGE - 10)
    said = table.alone(start, 40)
    whole = start + tuple(said_tokens(table, start, 40))
    table.forget()
    sampling = Sampling(temperature=0, banned_strings=banned)
    speaker = table.seat(start, 40, sampling=sampling)
    table.play(speaker, tokens=2)
    reader = table.seat(whole[: PAGE + 5], 20)
    table.play(speaker, tokens=20)  # it fills a page that the reader, who takes no part, has by name
    table.play(speaker, reader)
    assert speaker.data == said.data
    assert reader.tokens == 20
    assert table.batch.used_tokens == 0


def said_tokens(table: Table, prompt: tuple[int, ...], count: int) -> list[int]:
    played = table.seat(prompt, count)
    job = played.seq.data
    table.play(played)
    return [int(token) for token in job.sequence.sequence_ids.torch()[0, len(prompt) :]]
