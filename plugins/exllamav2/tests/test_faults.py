"""What goes wrong in one sequence ends it alone; what goes wrong in the library costs nobody else a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenflow_exllamav2.config import PAGE

from plugins.exllama_common.tests.table import Played, Table
from tokenflow.api import ContextLengthExceeded, EngineError, InvalidRequest, Sampling


def three(table: Table, max_tokens: int = 24) -> tuple[list[bytes], list[Played]]:
    """Three sequences, a few tokens on their way, and what each says alone."""
    samplings = [Sampling(temperature=0), Sampling(seed=3), Sampling(seed=4, top_p=0.9)]
    prompts = [table.prompt(250 + 30 * n, seed=n) for n in range(3)]
    wanted = [table.alone(p, max_tokens, sampling=s).data for p, s in zip(prompts, samplings, strict=True)]
    played = [table.seat(p, max_tokens, sampling=s) for p, s in zip(prompts, samplings, strict=True)]
    table.play(*played, tokens=8)
    return wanted, played


def fail(*args: Any, **options: Any) -> None:
    raise ZeroDivisionError("a fault of the test's")


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
    table.model.before_forward = lambda ids: fail() if ids.shape[1] > 1 else None
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

    def fail_while_writing(ids: torch.Tensor) -> None:
        table.batch.cache.flat[page.page_index * PAGE : (page.page_index + 1) * PAGE] = 7
        fail()

    table.model.before_forward = fail_while_writing
    table.play(bad)
    table.model.before_forward = lambda ids: None
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
    table = make_table(cache_tokens=4 * PAGE, context_length=4096)
    assert table.stepper.info.context_length == 4 * PAGE
    wanted = table.alone(table.prompt(20)).data
    played = table.seat(table.prompt(20))
    object.__setattr__(table.stepper.info, "context_length", 4096)
    with pytest.raises(InvalidRequest, match="5 pages"):
        table.seat(table.prompt(1000), 100)
    table.play(played)
    assert played.data == wanted


# --- the whole batch's ----------------------------------------------------------------------------------------------


def test_a_step_that_fails_once(table: Table) -> None:
    """Everybody begins again from what they said, and says the same as ever."""
    wanted, played = three(table)
    failures = []

    def fail_once(ids: torch.Tensor) -> None:
        if not failures:
            failures.append(ids.shape[0])
            fail()

    table.model.before_forward = fail_once
    table.play(*played)
    assert failures == [3]
    assert [one.data for one in played] == wanted
    assert table.batch.used_tokens == 0


def test_who_is_parked_survives_a_failure_too(table: Table) -> None:
    wanted, played = three(table)
    table.step(*played[:2])
    table.model.before_forward = fail
    table.step(*played[:2])
    table.model.before_forward = lambda ids: None
    table.play(*played)
    assert [one.data for one in played] == wanted


def test_who_breaks_the_step_is_found(table: Table) -> None:
    """The model fails whenever one of them is in its batch: that one ends, the others go on."""
    wanted, played = three(table)
    table.model.before_forward = lambda ids: fail() if breaks(played[1], ids) else None
    table.play(*played)
    assert played[1].ended is not None and isinstance(played[1].ended.error, EngineError)
    assert [played[0].data, played[2].data] == [wanted[0], wanted[2]]
    assert table.batch.used_tokens == 0


def breaks(culprit: Played, ids: torch.Tensor) -> bool:
    """Its next token is about to be evaluated, in whatever company."""
    job = culprit.seq.data
    return (
        job is not None
        and job.is_prefill_done()
        and int(job.sequence.sequence_ids.torch()[0, -1]) in ids[:, 0].tolist()
    )


def test_a_batch_that_fails_with_nobody_to_blame(table: Table) -> None:
    """All is well with each alone, never with all: it is given up, and the next ones are served."""
    _, played = three(table)
    table.model.before_forward = lambda ids: fail() if len(ids) > 1 else None
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        table.play(*played)
    table.leave()
    table.model.before_forward = lambda ids: None
    assert table.batch.used_tokens == 0
    wanted, played = three(table)
    table.play(*played)
    assert [one.data for one in played] == wanted


def test_a_gpu_that_is_gone_ends_the_engine(table: Table) -> None:
    """Every caller is let go, and the slot that nobody can free is not trusted: the host opens the engine anew."""
    _, played = three(table)
    loaded: Any = table.stepper._loaded
    object.__setattr__(loaded, "works", lambda: False)
    table.model.before_forward = fail
    with pytest.raises(EngineError):
        table.step(*played)
    with pytest.raises(EngineError):
        table.stepper.remove(played[0].seq)
    table.held.clear()


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
