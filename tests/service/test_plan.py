"""A request meets the model: what its engine cannot do is refused by name, never ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest

from tokenflow.api import Dry, EngineInfo, InvalidRequest, Mirostat, Sampling, Xtc
from tokenflow.config.model import LimitsConfig, ReplayConfig, StreamConfig, TimeoutsConfig
from tokenflow.core.types import GenerationRequest, TokenPrompt
from tokenflow.service.plan import Plan, Planner

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

LIMITS = LimitsConfig(max_banned_strings=2, max_stop_chars=8)


async def plan(capabilities: set[str], sampling: Sampling) -> Plan:
    info = EngineInfo(model="m", context_length=64, slots=1, capabilities=frozenset(capabilities))
    planner = Planner(info, None, LIMITS, TimeoutsConfig(), StreamConfig(), ReplayConfig())
    request = GenerationRequest(model="m", prompts=(TokenPrompt(tokens=(1,)),), sampling=sampling)
    engine: Any = None  # token ids need none
    return await planner.plan(request, engine, "id")


@pytest.mark.parametrize("capability", ASKED)
async def test_what_the_engine_cannot_do(capability: str) -> None:
    values, param = ASKED[capability]
    sampling = Sampling(**values)
    assert (await plan({capability}, sampling)).sequences[0].sampling == sampling
    with pytest.raises(InvalidRequest) as caught:
        await plan(set(ASKED) - {capability}, sampling)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


async def test_what_asks_for_nothing_needs_nothing() -> None:
    await plan(set(), Sampling(temperature=1, top_k=0, top_p=1, min_p=0, typical_p=1, repetition_penalty=1))


@pytest.mark.parametrize("banned", [("a", "b", "c"), ("a" * 9,)])
async def test_banned_strings_are_few_and_short(banned: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await plan({"banned_strings"}, Sampling(banned_strings=banned))
    assert caught.value.param == "banned_strings"
