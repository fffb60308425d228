"""Several at once: they share what they have in common, and who comes late waits for no more than a chunk."""

from __future__ import annotations

from collections.abc import Callable

from tokenflow_exllamav3.config import PAGE

from plugins.exllama_common.tests.table import Table
from tokenflow.api import Sampling

Make = Callable[..., Table]


def test_choices_share_the_prompts_pages(table: Table) -> None:
    """Four of one prompt, as `n` asks for them: it is evaluated once, held once, and counted as what it was."""
    prompt = table.prompt(3 * PAGE + 100)
    samplings = [Sampling(seed=seed) for seed in range(4)]
    wanted = [table.alone(prompt, sampling=sampling).data for sampling in samplings]
    counted, evaluated = table.stepper.prompt_tokens, table.model.evaluated
    played = [table.seat(prompt, sampling=sampling) for sampling in samplings]
    assert [one.seq.cached_tokens for one in played] == [0, *[3 * PAGE] * 3]
    table.play(*played, tokens=1)
    assert table.model.evaluated - evaluated == len(prompt) - 1
    assert table.stepper.prompt_tokens - counted == len(prompt) - 1 + 4  # each its last one, with its first step
    assert table.batch.used_tokens == (3 + 4) * PAGE
    table.play(*played)
    assert [one.data for one in played] == wanted
    assert table.batch.used_tokens == 0


def test_a_sibling_that_leaves_in_the_middle_of_the_prompt(make_table: Make) -> None:
    table = make_table(chunk_size=PAGE)
    prompt = table.prompt(3 * PAGE + 100)
    wanted = table.alone(prompt).data
    first, second = table.seat(prompt), table.seat(prompt)
    table.step(first, second)
    table.leave(first)
    table.play(second)
    assert second.data == wanted
    assert table.batch.used_tokens == 0


def test_what_is_kept_is_used_again(table: Table) -> None:
    prompt = table.prompt(2 * PAGE + 50)
    first = table.alone(prompt)
    table.play(table.seat(prompt))
    again = table.seat(prompt)
    assert again.seq.cached_tokens == 2 * PAGE
    counted = table.stepper.prompt_tokens
    table.play(again)
    assert again.data == first.data
    assert table.stepper.prompt_tokens - counted == 1, "the rest of it was in a page that could be copied"


def test_a_long_prompt_beside_who_speaks(make_table: Make) -> None:
    """Half a chunk in every third step, and a token for the others in each."""
    table = make_table(chunk_size=2 * PAGE, prefill_every=3, cache_tokens=32 * PAGE)
    speaker = table.seat(table.prompt(50), 100)
    table.play(speaker, tokens=5)
    late = table.seat(table.prompt(6 * PAGE, seed=1))
    pieces = []
    while not late.steps:
        before, tokens = table.model.evaluated, speaker.tokens
        table.step(speaker, late)
        pieces.append(table.model.evaluated - before)
        assert speaker.tokens == tokens + 1
    assert set(pieces) == {0, PAGE, PAGE - 1}
    assert [at % 3 for at, piece in enumerate(pieces) if piece] == [0] * 6


def test_who_leaves_is_gone_before_the_next_step(table: Table) -> None:
    """In its prompt, and while it speaks."""
    speaker, reader = table.seat(table.prompt(50)), table.seat(table.prompt(1800, seed=1))
    table.step(speaker, reader)
    evaluated = table.model.evaluated
    table.leave(reader)
    table.play(speaker, tokens=8)
    assert table.model.evaluated == evaluated
    table.leave(speaker)
    assert table.batch.used_tokens == 0
    assert not table.batch.num_remaining_jobs()
