"""The little that the plain data can work out by itself."""

from __future__ import annotations

import copy
import pickle

import pytest

from tokenflow.core.types import (
    CAPABILITIES,
    CallPiece,
    Delta,
    EngineInfo,
    Finished,
    MessageDelta,
    Sampling,
    SequenceRequest,
    Started,
    TokenLogprob,
    Usage,
)
from tokenflow.errors import PluginError


@pytest.mark.parametrize(
    ("delta", "content"),
    [
        (Delta("a"), True),
        (Delta(""), False),
        (Delta("", 1, (TokenLogprob("a", -0.1, b"a"),)), True),
        (Delta("", 3), False),
    ],
)
def test_a_delta_has_content_where_a_reader_must_take_it(delta: Delta, content: bool) -> None:
    assert delta.has_content is content


def test_usage_adds_up_and_counts_cached_tokens_once() -> None:
    assert Usage(prompt=5, completion=7, cached=4).total == 12


LOGPROB = TokenLogprob("a", -0.1, b"a")


@pytest.mark.parametrize(
    "value",
    [
        Delta("a", 2, (LOGPROB,), 7),
        MessageDelta("a", 2, (LOGPROB,), "because", (CallPiece(0, "c", "f", "{}"),), 7),
        Started(5, 3),
        Finished("stop"),
        SequenceRequest(prompt=(1, 2), max_tokens=3, sampling=Sampling(logit_bias={1: 0.5})),
        EngineInfo(model="m", context_length=8, slots=1),
        Usage(prompt=5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_travels_could_be_sent_to_another_process(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


def info(*capabilities: str) -> EngineInfo:
    return EngineInfo(model="m", context_length=8, slots=1, capabilities=frozenset(capabilities))


def test_a_capability_that_is_none_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(PluginError) as caught:
        info("stop", "log_probs")
    assert caught.value.message.startswith(
        "its engine names a capability 'log_probs', which is none (did you mean logprobs?); there are banned_strings, "
    )
    with pytest.raises(PluginError, match="'telepathy', which is none; there are"):
        info("telepathy")


def test_all_capabilities_and_those_of_templates() -> None:
    assert info(*CAPABILITIES, "chat", "tools", "reasoning").capabilities > CAPABILITIES
    assert {"min_p", "xtc", "logprobs", "grammar", "release"} < CAPABILITIES
