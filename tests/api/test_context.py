"""Lengths that do not fit each other, and those that a model was not made for."""

from __future__ import annotations

import logging

import pytest

from tokenflow.api import check_context, warn_beyond_training, warn_of_small_cache


def test_a_context_larger_than_its_cache() -> None:
    with pytest.raises(ValueError, match="context_length = 11 is larger than cache_tokens = 10, which has to"):
        check_context(11, 10)
    for fits in ((10, 10), (None, 10), (11, None), (None, None)):
        check_context(*fits)


@pytest.mark.parametrize(
    ("asked", "trained", "told"), [(None, 4096, 0), (4096, 4096, 0), (4097, 4096, 1), (4097, 0, 0)]
)
def test_a_context_beyond_what_the_model_was_trained_for(
    caplog: pytest.LogCaptureFixture, asked: int | None, trained: int, told: int
) -> None:
    warn_beyond_training(logging.getLogger("test"), "a.gguf", asked, trained)
    assert [message.partition(": what")[0] for message in caplog.messages] == told * [
        "a.gguf: context_length = 4097, but the model was trained for 4096 tokens"
    ]


@pytest.mark.parametrize(("asked", "room", "told"), [(None, 256, 1), (None, 4096, 0), (256, 256, 0)])
def test_a_cache_that_makes_the_context_smaller_than_usual(
    caplog: pytest.LogCaptureFixture, asked: int | None, room: int, told: int
) -> None:
    warn_of_small_cache(logging.getLogger("test"), "a.gguf", asked, 4096, room)
    assert [message.partition(":")[0] for message in caplog.messages] == told * ["a.gguf"]
    assert all("is 256 tokens and not 4096" in message for message in caplog.messages)
