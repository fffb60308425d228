"""The little that the plain data can work out by itself."""

from __future__ import annotations

import pytest

from tokenflow.core.types import Delta, TokenLogprob, Usage


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
