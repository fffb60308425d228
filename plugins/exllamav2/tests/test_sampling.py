"""Each parameter reaches the library's sampler, as what it says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenflow_exllamav2 import Exl2Config
from tokenflow_exllamav2.stepper import Exl2Stepper

from plugins.exllama_common.tests.fixtures import tables
from plugins.exllama_common.tests.table import Played, Table
from tokenflow.api import Dry, Grammar, InvalidRequest, Mirostat, Sampling, Xtc

from .rig import model as rig

LENGTH = 24


def said(table: Table, length: int = LENGTH, prompt: tuple[int, ...] | None = None, **sampling: Any) -> bytes:
    return table.alone(prompt or table.prompt(30), length, sampling=Sampling(**sampling)).data


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Table]:
    """A model that lacks the last of its tokenizer's tokens, as finetunes do to which somebody added some."""
    directory = rig.write_directory(tmp_path / "narrow")
    (directory / "added_tokens.json").write_text('{"<added>": 440}')
    config = Exl2Config(model=str(directory), slots=4, context_length=2048, cache_tokens=4096)
    with tables(lambda: Exl2Stepper(config, rig.load_rig)) as make:
        table = make()
        assert table.stepper.vocabulary.size == 441 > table.batch.padded_vocab_size == 416
        yield table


async def test_tokens_that_the_model_lacks(narrow: Table) -> None:
    """A grammar's mask and XTC's have them, and its logits have not."""
    grammar = Grammar(kind="regex", source="([a-c]{3}, ){5}done")
    request = narrow.request(narrow.prompt(20), 60, grammar=grammar, logprobs=2)
    played = Played(request)
    async with narrow.stepper.vocabulary.grammars() as grammars:
        played.seq.matcher = await grammars.matcher(grammar)
    assert narrow.try_seat(played)
    narrow.play(played)
    assert re.fullmatch(grammar.source, played.data.decode())
    assert said(narrow, xtc=Xtc(probability=1.0, threshold=0.01))
    with pytest.raises(InvalidRequest, match="there is no token 416; ids are 0 to 415"):
        said(narrow, logit_bias={416: 1.0})


def test_seeds(table: Table) -> None:
    assert said(table, seed=7) == said(table, seed=7)
    assert len({said(table, seed=seed) for seed in (0, 1, -1, 1 << 62)}) == 4
    assert len({said(table) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-6},
        {"typical_p": 1e-9, "top_k": 1},
        {"mirostat": Mirostat(tau=1e-6, eta=0.0)},
        {"top_k": 1 << 62, "top_p": 1e-9},
    ],
    ids=str,
)
def test_what_leaves_one_choice_is_greedy(table: Table, sampling: dict[str, Any]) -> None:
    assert said(table, seed=1, **sampling) == said(table, temperature=0)


@pytest.mark.parametrize("sampling", [{"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}, {"typical_p": 1.0}], ids=str)
def test_what_asks_for_nothing_changes_nothing(table: Table, sampling: dict[str, Any]) -> None:
    assert said(table, seed=1, **sampling) == said(table, seed=1)


def test_typical_leaves_nothing_to_chance(table: Table) -> None:
    assert len({said(table, seed=seed, typical_p=1e-9) for seed in range(3)}) == 1


def test_xtc_excludes_the_top_choice(table: Table) -> None:
    """Of the two likeliest, both above the threshold, the less likely one is left."""
    xtc = Xtc(probability=1.0, threshold=0.01)
    newline = {10: -100.0}  # what has one in it is never excluded
    played = table.alone(
        table.prompt(30), LENGTH, logprobs=3, sampling=Sampling(top_k=2, seed=1, xtc=xtc, logit_bias=newline)
    )
    drawn = [logprob for step in played.steps for logprob in step.logprobs]
    assert table.stepper._loaded.samplers.make(Sampling(xtc=xtc)).top_p < 1, (
        "the library's XTC is right on what is sorted"
    )
    ranks = [[top.bytes for top in logprob.top].index(logprob.bytes) for logprob in drawn]
    assert ranks.count(1) > 0.8 * LENGTH  # control tokens are never excluded, either


def test_penalties_see_prompt_and_completion(table: Table) -> None:
    first = table.alone(table.prompt(30), 1).seq
    vocabulary = table.stepper.vocabulary
    plain = said(table, 1, temperature=0)
    (token,) = [id for id, piece in enumerate(vocabulary.pieces) if piece == plain][:1]
    assert first is not None
    for name, value in (("repetition_penalty", 30.0), ("frequency_penalty", 30.0), ("presence_penalty", 30.0)):
        bias = {token: 50.0}
        prompt = table.prompt(30)
        assert said(table, 2, prompt, temperature=0, logit_bias=bias) == 2 * plain
        assert said(table, 2, prompt, temperature=0, logit_bias={token: 20.0}, **{name: value}) != 2 * plain, name


def test_dry_breaks_repetitions(table: Table) -> None:
    """But for those across a breaker."""
    x, y, z = (table.stepper.vocabulary.tokenize(text)[0] for text in ("ba", "de", "fi"))
    prompt = (x, y, z) * 5 + (x, y)
    repeats: dict[str, Any] = {"temperature": 0, "logit_bias": {z: 20.0}}
    assert said(table, 1, prompt, **repeats) == b"fi"
    assert said(table, 1, prompt, dry=Dry(multiplier=5.0), **repeats) != b"fi"
    assert said(table, 1, prompt, dry=Dry(multiplier=5.0, sequence_breakers=("e",)), **repeats) == b"fi"
    assert said(table, 1, prompt, dry=Dry(multiplier=5.0, allowed_length=18), **repeats) == b"fi"


def test_dry_with_a_range(table: Table) -> None:
    near = Dry(multiplier=1.0, allowed_length=1, range_tokens=64)
    assert said(table, 100, seed=2, dry=near)


@pytest.mark.parametrize(
    ("dry", "param"),
    [
        (Dry(multiplier=1.0, allowed_length=21), "dry_allowed_length"),
        (Dry(multiplier=1.0, range_tokens=20), "dry_range"),
    ],
)
def test_what_the_library_cannot_do_is_said(table: Table, dry: Dry, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        said(table, dry=dry)
    assert caught.value.param == param


@pytest.mark.parametrize(("token", "bias"), [(10_000, 1.0), (-1, 1.0), (5, math.nan), (5, math.inf)])
def test_a_wrong_bias_is_refused(table: Table, token: int, bias: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        said(table, logit_bias={token: bias})
    assert caught.value.param == "logit_bias"


def test_biases_force_and_ban(table: Table) -> None:
    token = table.stepper.vocabulary.tokenize("ba")[0]
    assert said(table, 3, seed=1, logit_bias={token: 100}) == b"ba" * 3
    plain = said(table, 1, temperature=0)
    first = [id for id, piece in enumerate(table.stepper.vocabulary.pieces) if piece == plain]
    assert said(table, 1, temperature=0, logit_bias=dict.fromkeys(first, -100.0)) != plain


def test_log_probabilities_are_the_models_own(table: Table) -> None:
    """Whatever the sampler does to what it draws from."""
    plain = table.alone(table.prompt(30), 1, logprobs=5).steps[0].logprobs[0]
    biased = {"logit_bias": {5: 100.0}, "temperature": 0.3, "presence_penalty": 1.0}
    drawn = table.alone(table.prompt(30), 1, logprobs=5, sampling=Sampling(**biased)).steps[0].logprobs[0]
    assert drawn.top == plain.top
    assert drawn.bytes == table.stepper.vocabulary.texts[5] != plain.bytes
    assert drawn.logprob < plain.logprob <= plain.top[0].logprob
    assert math.isclose(sum(math.exp(top.logprob) for top in plain.top), 1, abs_tol=0.5)


def test_guesses_change_nothing(table: Table, make_table: Any) -> None:
    """With a draft model and from its own text: the same tokens as without, and exactly as many."""
    for options in ({"draft_model": "another"}, {"ngram_draft": True}):
        guessing = make_table(**options)
        assert "banned_strings" not in guessing.stepper.info.capabilities
        for length in (1, 5, 40):
            for sampling in (Sampling(temperature=0), Sampling(seed=5, mirostat=Mirostat(tau=2.0))):
                wanted = table.alone(table.prompt(250), length, sampling=sampling)
                guessed = guessing.alone(guessing.prompt(250), length, sampling=sampling)
                assert (guessed.data, guessed.tokens) == (wanted.data, length)
                if "draft_model" in options and sampling.temperature == 0 and length == 40:
                    assert len(guessed.steps) < 25, "few guesses were right"
