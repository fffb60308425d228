"""Continuous batching with the real model, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from tokenflow_llamacpp import LlamaConfig
from tokenflow_llamacpp.stepper import LlamaStepper

from tokenflow.api import EngineError, InvalidRequest
from tokenflow.errors import ContextLengthExceeded

from .conftest import CONFIG, Played, Table

pytestmark = pytest.mark.model

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LONG = "The quick brown fox jumps over the lazy dog." + " It is a very lazy dog." * 12  # 94 tokens


def chat(text: str) -> str:
    return CHAT.format(text)


def test_one_token_a_step_and_an_end(table: Table) -> None:
    played = table.start(chat("What is the capital of France?"))
    table.play(played, tokens=64)
    assert played.text == "The capital of France is Paris."
    assert [step.tokens for step in played.steps] == [1] * len(played.steps)
    assert [step.finish for step in played.steps] == [None] * (len(played.steps) - 1) + ["stop"]


def test_all_decode_in_one_batch(table: Table) -> None:
    first, second = table.start(chat("Hello")), table.start(chat("Name a colour."))
    table.step()
    third = table.start(chat("Name a city."))
    for _ in range(4):
        table.step()
    assert [len(played.steps) for played in (first, second, third)] == [5, 5, 4]


def test_a_prompt_comes_in_pieces_while_others_decode(table: Table) -> None:
    other = table.start(chat("Hello"))
    table.step()
    newcomer = table.start(table.tokens(LONG)[:60])
    for _ in range(4):  # 60 tokens, 16 at a time
        assert not newcomer.steps
        table.step()
    assert len(newcomer.steps) == 1
    assert len(other.steps) == 5


def test_a_prompt_takes_the_whole_batch_while_nobody_decodes(table: Table) -> None:
    played = table.start(table.tokens(LONG)[:80])
    table.step()
    assert not played.steps
    table.step()
    assert len(played.steps) == 1


def test_first_come_first_served(table: Table) -> None:
    first, second = table.start(table.tokens(LONG)[:60]), table.start(table.tokens(LONG)[1:61])
    table.step()
    assert (len(first.steps), len(second.steps)) == (1, 0)


def test_a_pause_changes_nothing(table: Table) -> None:
    played, undisturbed, company = (table.start(chat("Tell me a story.")) for _ in range(3))
    table.play(undisturbed, tokens=16)
    table.leave(undisturbed)
    table.play(played, tokens=8)
    before = played.text
    table.play(company, tokens=6)  # six steps without it
    assert played.text == before
    table.play(played, tokens=16)
    assert played.text == undisturbed.text


def test_who_sits_out_costs_nothing_and_gets_nothing(table: Table) -> None:
    first, second = table.start(chat("Hello")), table.start(chat("Name a colour."))
    table.step()
    table.step(first)
    assert (len(first.steps), len(second.steps)) == (2, 1)
    assert table.stepper._batch.n_tokens == 1


# --- cutting a step short -------------------------------------------------------------------------------------------


def neighbours(table: Table, *, disturbed: bool) -> list[str]:
    """Two that decode beside a long prompt; disturbed, a step of theirs is cut short, and the long prompt leaves."""
    table.fresh()
    pair = [table.start(chat("Tell me a story.")), table.start(chat("Write a poem."))]
    table.play(*pair, tokens=4)
    if disturbed:
        victim = table.start(table.tokens(LONG))
        table.step(*pair, victim, interrupt=victim)
        assert [played.tokens for played in pair] == [4, 4]  # nothing of that step counts
        table.leave(victim)
        assert table.stepper.slots.used == sum(len(p.seq.data.slot.tokens) for p in pair)
    table.play(*pair, tokens=16)
    return [played.text for played in pair]


@pytest.fixture
def unkept(stepper: LlamaStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper.slots, "_keep", False)


@pytest.mark.usefixtures("unkept")
def test_an_abort_in_prefill_leaves_the_neighbours_unharmed(table: Table) -> None:
    before = table.stepper.interrupted
    assert neighbours(table, disturbed=True) == neighbours(table, disturbed=False)
    assert table.stepper.interrupted == before + 1


def test_an_interrupted_prompt_can_go_on_too(table: Table) -> None:
    prompt = table.tokens(LONG)[:90]
    straight = table.start(prompt)
    table.play(straight, tokens=8)
    table.fresh()
    played = table.start(prompt)
    table.step(played, interrupt=played)
    table.step(played)
    table.step(played, interrupt=played)
    table.play(played, tokens=8)
    assert played.text == straight.text


def test_a_step_that_was_lost_is_followed_by_a_short_one(table: Table) -> None:
    """Nobody may interrupt it, so who leaves during it waits for its end."""
    other, victim = table.start(table.tokens(LONG)), table.start(table.tokens(LONG))
    victim.seq.cancelled = True
    table.step(other, victim, interrupt=victim)
    assert other.seq.data.slot.tokens == []
    done = []
    for _ in range(2):
        table.step(other)
        done.append(len(other.seq.data.slot.tokens))
    assert done == [CONFIG.prefill_chunk, CONFIG.prefill_chunk + CONFIG.batch]


def test_a_stale_interrupt_costs_nothing(table: Table) -> None:
    """It came when the step that it was meant for had ended."""
    played = table.start(chat("Hello"))
    table.stepper.interrupt(played.seq)
    before = table.stepper.interrupted
    table.step(played)
    assert table.stepper.interrupted == before
    assert len(played.steps) == 1


def test_an_interrupt_before_the_decode_is_not_lost(table: Table) -> None:
    """It came before the step began, which cleared the flag: the cancelled one is left out all the same."""
    victim, other = table.start(table.tokens(LONG)), table.start(chat("Hello"))
    victim.seq.cancelled = True
    table.stepper.interrupt(victim.seq)
    table.step(victim, other)
    assert victim.seq.data.slot.tokens == []
    assert len(other.steps) == 1


def test_everybody_leaves_once(table: Table) -> None:
    played = table.start(chat("Hello"))
    table.stepper.interrupt(None)
    table.step(played)
    assert not played.steps
    table.step(played)
    assert len(played.steps) == 1


def test_interrupt_at_any_time() -> None:
    LlamaStepper(CONFIG).interrupt(None)  # not open yet


# --- kept prefixes --------------------------------------------------------------------------------------------------


def test_a_kept_prefix_gives_the_same_text(table: Table) -> None:
    prompt = chat("Tell me a story about a bear.")
    first = table.start(prompt)
    assert first.cached == 0
    table.play(first, tokens=12)
    table.leave(first)
    again = table.start(prompt)
    assert again.cached == len(table.tokens(prompt)) - 1
    table.play(again, tokens=12)
    assert again.text == first.text


def test_a_conversation_goes_on_from_what_is_kept(table: Table) -> None:
    prompt = chat("What is the capital of France?")
    first = table.start(prompt)
    table.play(first, tokens=64)
    table.leave(first)
    turn = prompt + first.text + "<|im_end|>\n" + chat("And of Italy?")
    second = table.start(turn)
    assert second.cached >= len(table.tokens(prompt + first.text))
    evaluated = table.stepper.prompt_tokens
    table.step(second)
    assert table.stepper.prompt_tokens - evaluated == len(table.tokens(turn)) - second.cached


def test_a_prefix_of_one_that_still_runs_is_shared(table: Table) -> None:
    first = table.start(LONG + " One")
    table.play(first, tokens=1)
    second = table.start(LONG + " Two")
    assert second.cached == len(table.tokens(LONG))
    table.leave(first)  # the shared part is still there for the other one
    table.play(second, tokens=8)
    text = second.text
    table.fresh()
    alone = table.start(LONG + " Two")
    table.play(alone, tokens=8)
    assert text == alone.text


def test_without_a_prefix_cache_nothing_is_kept(table: Table, unkept: None) -> None:
    first = table.start(chat("Hello"))
    table.step()
    table.leave(first)
    assert table.stepper.slots.used == 0
    assert table.start(chat("Hello")).cached == 0


# --- room -----------------------------------------------------------------------------------------------------------


def test_as_many_as_there_are_slots(table: Table) -> None:
    played = [table.start("a", 8) for _ in range(4)]
    assert table.try_start("a", 8) is None
    table.leave(played[0])
    assert table.try_start("a", 8) is not None


def test_no_more_than_the_cache_holds(table: Table) -> None:
    first = table.start("a", 500)
    table.start("b", 500)
    assert table.try_start("c", 100) is None
    assert table.try_start("c", 20) is not None
    table.leave(first)
    assert table.try_start("c", 100) is not None


def test_what_never_fits_is_refused(table: Table) -> None:
    with pytest.raises(ContextLengthExceeded, match="holds 512 tokens"):
        table.start("a", 512)


@pytest.mark.parametrize("token", [-1, 49_152])
def test_a_token_outside_the_vocabulary(table: Table, token: int) -> None:
    other = table.start(chat("Hello"))
    with pytest.raises(InvalidRequest, match=f"Token {token} is not in the vocabulary") as info:
        table.start((1, token))
    assert info.value.param == "prompt"
    table.step()
    assert len(other.steps) == 1


# --- faults ---------------------------------------------------------------------------------------------------------


class Faulty:
    """The context with a decode that raises what it is told to."""

    def __init__(self, context: object, *faults: Exception) -> None:
        self._context = context
        self._faults = list(faults)

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)

    def decode(self, batch: object) -> None:
        raise self._faults.pop(0)


def faulty(table: Table, monkeypatch: pytest.MonkeyPatch, *faults: Exception) -> tuple[Played, Played]:
    old, new = table.start(chat("Hello")), table.start(chat("Name a colour."))
    table.step()
    monkeypatch.setattr(table.stepper, "_context", Faulty(table.stepper._context, *faults))
    return old, new


def test_a_full_cache_costs_what_is_kept_first_then_the_latest(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.leave(table.start("something kept"))
    kept = table.start("something kept")
    table.step()
    table.leave(kept)
    old, new = faulty(table, monkeypatch, ValueError("no room"), ValueError("no room"))
    table.step()
    assert (len(old.steps), len(new.steps)) == (1, 1)
    assert table.stepper.slots.drop_kept() == 0
    table.step()
    assert isinstance(new.steps[-1].error, EngineError)
    monkeypatch.undo()
    table.leave(new)
    table.step(old)
    assert len(old.steps) == 2


def test_after_a_fatal_error_nothing_is_trusted(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(table, monkeypatch, RuntimeError("failed with code -3"))
    with pytest.raises(EngineError, match="code -3"):
        table.step()
    monkeypatch.undo()
    assert table.stepper.slots.used == 0
    table.leave()
    played = table.start(chat("What is the capital of France?"))
    table.play(played, tokens=64)
    assert played.text == "The capital of France is Paris."


def test_one_that_cannot_be_drawn_fails_alone(table: Table) -> None:
    first, second = table.start(chat("Hello")), table.start(chat("Name a colour."))
    table.step()
    first.seq.data.sampler = Mock(draw=Mock(side_effect=ArithmeticError))
    table.step()
    assert isinstance(first.steps[-1].error, ArithmeticError)
    assert second.steps[-1].error is None


def test_a_recurrent_model_is_not_interrupted(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.stepper, "_can_cut", False)
    played = table.start(table.tokens(LONG)[:40])
    table.step(played, interrupt=played)
    assert len(played.steps) == 1


@pytest.fixture
def small() -> Iterator[Table]:
    stepper = LlamaStepper(LlamaConfig(slots=2, cache_tokens=256, batch=128))
    stepper.open()
    table = Table(stepper)
    yield table
    table.leave()
    stepper.close()


def test_all_of_the_cache_can_be_used(small: Table) -> None:
    """What is reserved is there: no step runs out of room, though all take all they asked for."""
    prompt = small.tokens(LONG)[:64]
    kept = small.start(prompt, 8)
    small.play(kept, tokens=1)
    small.leave()
    pair = [small.start(tuple(token + n for token in prompt), 64, ignore_eos=True) for n in (1, 2)]
    assert small.stepper.slots.evicted == 64
    assert small.try_start("a", 1) is None
    small.play(*pair, tokens=64)
    assert [played.tokens for played in pair] == [64, 64]
    assert small.stepper.slots.used == 254


def test_a_cache_smaller_than_the_context_is_the_limit(small: Table) -> None:
    assert small.stepper.info.context_length == 256
