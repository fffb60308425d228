"""Dotted keys and TOML values, both ways, and what is never shown."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.config.keys import dotted, got, is_secret, parse_dotted, parse_value, shown, toml

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=0, max_size=5)
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_toml_reads_what_was_written(value: object) -> None:
    assert tomllib.loads(f"x = {toml(value)}")["x"] == value


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_dotted_keys_both_ways(names: list[str]) -> None:
    assert parse_dotted(dotted(tuple(names))) == tuple(names)


def test_dotted_with_indices() -> None:
    assert dotted(("auth", "keys", 0, "na.me")) == 'auth.keys[0]."na.me"'


@pytest.mark.parametrize("text", ["", "a b", "a.", "a = {} #", "a=1\nb", "a = 1 #", "[a]\nb"])
def test_no_dotted_key(text: str) -> None:
    with pytest.raises(ValueError, match="is no dotted key"):
        parse_dotted(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1.5", 1.5),
        ("true", True),
        ('"a"', "a"),
        ("[1, 2]", [1, 2]),
        ('[{a = "b"}]', [{"a": "b"}]),
        ('[{"a": "b"}]', [{"a": "b"}]),
        (' {"a": {"b": true}}', {"a": {"b": True}}),
        ("[1, null]", [1, None]),
        ("null", "null"),
        ("[a, b]", "[a, b]"),
        ("{{ messages }}", "{{ messages }}"),
        ("9" * 5000, "9" * 5000),
        ("yes", "yes"),
        ("", ""),
        ("1\nb=2", "1\nb=2"),
    ],
)
def test_values_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_values_nested_beyond_reason_are_text() -> None:
    assert parse_value("[" * 100_000) == "[" * 100_000


def test_half_a_surrogate_pair_is_no_text_that_json_could_bring() -> None:
    assert parse_value(r'["\ud800"]') == r'["\ud800"]'


def test_other_values_as_toml() -> None:
    assert toml(Path("a/b")) == '"a/b"'
    assert toml(frozenset(["b", "a"])) == '["a", "b"]'
    assert toml(math.inf) == "inf"
    assert toml((1.0, True)) == "[1.0, true]"


@pytest.mark.parametrize("key", ["key", "api_key", "auth_token", "PASSWORD", "client_secret", "credentials"])
def test_secrets_are_not_shown(key: str) -> None:
    assert is_secret(("models", key))
    assert shown((key,), "hunter2") == '"***"'
    assert got((key,), "hunter2") == "7 characters"
    assert shown((key,), None) == "unset"


@pytest.mark.parametrize("key", ["max_tokens", "keys", "tokens_per_s", "keyboard", "token_limit"])
def test_what_is_no_secret(key: str) -> None:
    assert not is_secret((key,))


def test_a_path_of_indices_is_no_secret() -> None:
    assert not is_secret((0,))


def test_passwords_in_urls_are_not_shown() -> None:
    assert shown(("url",), "http://me:hunter2@host/x") == '"http://***@host/x"'
    assert got(("url",), "http://me:hunter2@host/x") == '"http://***@host/x"'


def test_long_values_are_cut_in_errors() -> None:
    assert len(got(("x",), "a" * 1000)) < 80
