"""A request meets the model: what its engine cannot do is refused by name, never ignored in silence."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import pytest

from tokenflow.api import Dry, EngineInfo, Grammar, InvalidRequest, Mirostat, Sampling, Xtc
from tokenflow.config.model import DefaultsConfig, LimitsConfig, ReplayConfig, StreamConfig, TimeoutsConfig
from tokenflow.core.types import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from tokenflow.errors import ContextLengthExceeded
from tokenflow.service.plan import _NEUTRAL, Plan, Planner

ASKED = {
    "temperature": ({"temperature": 0.5}, "temperature"),
    "min_p": ({"min_p": 0.1}, "min_p"),
    "typical_p": ({"typical_p": 0.5}, "typical_p"),
    "xtc": ({"xtc": Xtc(probability=0.5)}, "xtc_probability"),
    "dry": ({"dry": Dry(multiplier=0.8)}, "dry_multiplier"),
    "mirostat": ({"mirostat": Mirostat()}, "mirostat"),
    "logit_bias": ({"logit_bias": {1: 1.0}}, "logit_bias"),
    "banned_strings": ({"banned_strings": ("a",)}, "banned_strings"),
}
"""Of capabilities: what asks for each, and the field of the body that an answer names."""

LIMITS = LimitsConfig(max_banned_strings=2, max_stop_chars=8, max_grammar_chars=8, grammar_timeout_s=2.0)


async def plan(
    capabilities: set[str],
    sampling: Sampling,
    grammar: Grammar | None = None,
    engine: Any = None,
    defaults: DefaultsConfig | None = None,
    **fields: Any,
) -> Plan:
    info = EngineInfo(model="m", context_length=64, slots=1, capabilities=frozenset(capabilities))
    rules = LIMITS, TimeoutsConfig(), StreamConfig(), ReplayConfig()
    planner = Planner(info, None, *rules, defaults or DefaultsConfig())
    fields.setdefault("prompts", (TokenPrompt(tokens=(1,)),))
    request = GenerationRequest(model="m", sampling=sampling, grammar=grammar, **fields)
    return await planner.plan(request, engine, "id")


@pytest.mark.parametrize("capability", ASKED)
async def test_what_the_engine_cannot_do(capability: str) -> None:
    values, param = ASKED[capability]
    sampling = Sampling(**values)
    assert (await plan({capability}, sampling)).sequences[0].sampling == sampling
    with pytest.raises(InvalidRequest) as caught:
        await plan(set(ASKED) - {capability}, sampling)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


async def test_defaults_are_for_what_a_request_does_not_say() -> None:
    defaults = DefaultsConfig(max_tokens=7, temperature=0.5, top_p=0.9, presence_penalty=0.1)
    can = {"temperature", "top_p", "min_p", "presence_penalty"}
    [silent] = (await plan(can, Sampling(), defaults=defaults)).sequences
    assert (silent.max_tokens, silent.sampling) == (7, Sampling(temperature=0.5, top_p=0.9, presence_penalty=0.1))
    said = Sampling(temperature=0, min_p=0.2, top_p=1)
    [own] = (await plan(can, said, defaults=defaults, max_tokens=9)).sequences
    assert (own.max_tokens, own.sampling) == (9, replace(said, presence_penalty=0.1))


async def test_a_default_is_not_told_as_what_was_requested() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"Shorten the prompt\.$") as caught:
        await plan(set(), Sampling(), defaults=DefaultsConfig(max_tokens=7), prompts=(TokenPrompt(tokens=(1,) * 64),))
    assert caught.value.details["requested"] is None


def test_every_default_is_a_field_of_sampling() -> None:
    every = DefaultsConfig(**{field.name: 1 for field in fields_of(DefaultsConfig)})
    assert set(every.sampling) == {field.name for field in fields_of(DefaultsConfig)} - {"max_tokens"} <= set(_NEUTRAL)


async def test_a_model_that_cannot_chat_says_so_before_all_else() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await plan(set(), Sampling(temperature=0.3), n=99, prompts=(ChatPrompt(messages=()),))
    assert caught.value.message == "This model has no chat template; use /v1/completions."


def test_every_field_of_sampling_is_looked_at() -> None:
    assert set(_NEUTRAL) == {field.name for field in fields_of(Sampling)}


async def test_what_asks_for_nothing_needs_nothing() -> None:
    await plan(set(), Sampling(temperature=1, top_k=0, top_p=1, min_p=0, typical_p=1, repetition_penalty=1))


HUGE = 10**400  # no float


@pytest.mark.parametrize("field", ["n", "coalesce_ms", "logprobs"])
async def test_a_number_too_large_for_a_float_is_refused_as_any_other(field: str) -> None:
    with pytest.raises(InvalidRequest, match=r"a huge number .* asked for; at most 1?[0-9]+ here"):
        await plan({"logprobs"}, Sampling(), **{field: HUGE})


@pytest.mark.parametrize("banned", [("a", "b", "c"), ("a" * 9,)])
async def test_banned_strings_are_few_and_short(banned: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await plan({"banned_strings"}, Sampling(banned_strings=banned))
    assert caught.value.param == "banned_strings"


class Tokenizing:
    """As much of an engine as a text meets: one that has a token for each character, and one for `<s>`."""

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return [ord(char) for char in (text.replace("<s>", "\x01") if special else text)]

    info = generate = detokenize = stats = int  # nobody asks


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        (TextPrompt(text="a"), "\x01a"),
        (TextPrompt(text="<s>a"), "\x01<s>a"),
        (TextPrompt(text="<s>a", begins=False), "<s>a"),
        (TextPrompt(text="a<s>", special=True), "\x01a\x01"),
        (TextPrompt(text="<s>a", special=True), "\x01a"),
        (TextPrompt(text="a<s>", special=True, begins=False), "a\x01"),
        (TokenPrompt(tokens=(97,)), "a"),
    ],
    ids=str,
)
async def test_a_text_begins_as_its_model_wants_it_once(prompt: TextPrompt | TokenPrompt, read: str) -> None:
    info = EngineInfo(model="m", context_length=64, slots=1, bos_token="<s>", add_bos=True)
    planner = Planner(info, None, LIMITS, TimeoutsConfig(), StreamConfig(), ReplayConfig(), DefaultsConfig())
    request = GenerationRequest(model="m", prompts=(prompt,))
    [sequence] = (await planner.plan(request, Tokenizing(), "id")).sequences
    assert "".join(map(chr, sequence.prompt)) == read
    assert await planner.tokenize(prompt, Tokenizing()) == sequence.prompt


async def test_a_model_that_wants_nothing_before_a_text_gets_nothing() -> None:
    prompts = (TextPrompt(text="a<s>", special=True),)
    [sequence] = (await plan(set(), Sampling(), engine=Tokenizing(), prompts=prompts)).sequences
    assert sequence.prompt == (97, 1)


class Compiling:
    """As much of an engine as a grammar meets: one that finds fault with every grammar but `a`."""

    def __init__(self) -> None:
        self.budgets: list[float] = []

    async def compile(self, grammar: Grammar, *, budget_s: float) -> None:
        self.budgets.append(budget_s)
        if grammar.source != "a":
            raise InvalidRequest("a fault", param=grammar.param)

    info = generate = tokenize = detokenize = stats = int  # nobody asks


@pytest.mark.parametrize(
    ("capabilities", "source", "code"),
    [
        (set(), "a", "unsupported_parameter"),
        ({"grammar"}, "a" * 9, "invalid_value"),
        ({"grammar"}, "b", "invalid_value"),
    ],
)
async def test_a_grammar_is_refused_before_anything_is_promised(capabilities: set[str], source: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await plan(capabilities, Sampling(), Grammar(kind="regex", source=source, param="guided_regex"), Compiling())
    assert (caught.value.param, caught.value.code) == ("guided_regex", code)


async def test_a_grammar_reaches_the_engine_as_it_is() -> None:
    grammar, engine = Grammar(kind="regex", source="a"), Compiling()
    assert (await plan({"grammar"}, Sampling(), grammar, engine)).sequences[0].grammar == grammar
    assert engine.budgets == [LIMITS.grammar_timeout_s]
