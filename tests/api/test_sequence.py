"""`Sequence.take`: what stop strings, lengths, half characters and log-probabilities make of a step. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenflow.api import Delta, Finished, Send, Sequence, SequenceRequest, Step, TokenLogprob


def sequence(**fields: Any) -> Sequence:
    fields.setdefault("max_tokens", 10)
    return Sequence(SequenceRequest(prompt=(1,), **fields), Send(lambda event: None, window=1))


def logprob(token: str) -> tuple[TokenLogprob, ...]:
    return (TokenLogprob(token, -0.5, token.encode()),)


def test_text_comes_at_once() -> None:
    seq = sequence()
    assert seq.take(Step(1, b"a")) == (Delta("a"), None)
    assert seq.generated == 1


def test_length_ends_with_the_last_token() -> None:
    seq = sequence(max_tokens=2)
    assert seq.take(Step(1, b"a")) == (Delta("a"), None)
    assert seq.take(Step(1, b"b")) == (Delta("b"), Finished("length"))


def test_several_tokens_in_a_step_count() -> None:
    seq = sequence(max_tokens=4)
    assert seq.take(Step(3, b"abc")) == (Delta("abc", 3), None)
    assert seq.take(Step(1, b"d")) == (Delta("d"), Finished("length"))


def test_the_model_ends_by_itself() -> None:
    assert sequence().take(Step(1, b"", "stop")) == (Delta("", 1), Finished("stop"))


def test_an_end_without_a_token_is_no_delta() -> None:
    assert sequence().take(Step(0, b"", "stop")) == (None, Finished("stop"))


def test_the_models_end_goes_before_length() -> None:
    assert sequence(max_tokens=1).take(Step(1, b"a", "stop")) == (Delta("a"), Finished("stop"))


def test_a_character_waits_until_it_is_whole() -> None:
    seq = sequence()
    pieces = [seq.take(Step(1, bytes([byte])))[0] for byte in "🙂".encode()]
    assert pieces == [Delta(""), Delta(""), Delta(""), Delta("🙂")]


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    assert sequence(max_tokens=1).take(Step(1, b"\xf0\x9f")) == (Delta("\ufffd"), Finished("length"))


def test_a_stop_string_ends_it() -> None:
    seq = sequence(stop=("END",))
    assert seq.take(Step(1, b"a E")) == (Delta("a "), None)
    assert seq.take(Step(1, b"ND b")) == (Delta(""), Finished("stop"))


def test_a_near_miss_comes_whole() -> None:
    seq = sequence(stop=("END",))
    assert seq.take(Step(1, b"EN")) == (Delta(""), None)
    assert seq.take(Step(1, b"d")) == (Delta("ENd"), None)


def test_length_sends_what_was_held_for_a_stop_string() -> None:
    assert sequence(stop=("END",), max_tokens=1).take(Step(1, b"EN")) == (Delta("EN"), Finished("length"))


def test_a_stop_string_goes_before_length() -> None:
    assert sequence(stop=("END",), max_tokens=1).take(Step(1, b"aEND")) == (Delta("a"), Finished("stop"))


def test_a_stop_string_that_the_flush_completes() -> None:
    seq = sequence(stop=("\ufffd",), max_tokens=1)
    assert seq.take(Step(1, b"a\xf0")) == (Delta("a"), Finished("stop"))


def test_held_text_keeps_its_logprobs_with_it() -> None:
    seq = sequence(stop=("END",), logprobs=0)
    assert seq.take(Step(1, b"E", None, logprob("E"))) == (Delta("", 1), None)
    assert seq.take(Step(1, b"x", None, logprob("x"))) == (Delta("Ex", 1, logprob("E") + logprob("x")), None)
    assert seq.take(Step(1, b"y", None, logprob("y"))) == (Delta("y", 1, logprob("y")), None)


def test_the_stop_strings_own_logprobs_are_not_sent() -> None:
    seq = sequence(stop=("END",), logprobs=0)
    seq.take(Step(1, b"EN", None, logprob("EN")))
    assert seq.take(Step(1, b"D", None, logprob("D"))) == (Delta("", 1), Finished("stop"))


@pytest.mark.parametrize("together", [1, 2, 3, 9])
def test_what_is_held_for_a_stop_string_keeps_its_own_logprobs_and_no_others(together: int) -> None:
    """The second `a` might begin the stop string, and does, when the first one is certain."""
    tokens = ["x", "a", "a", "b", "y"]
    seq, told = sequence(stop=("ab",), logprobs=0), list[TokenLogprob]()
    for at in range(0, len(tokens), together):
        some = tokens[at : at + together]
        logprobs = tuple(entry for token in some for entry in logprob(token))
        delta, finished = seq.take(Step(len(some), "".join(some).encode(), None, logprobs))
        told += () if delta is None else delta.logprobs
        if finished is not None:
            break
    assert finished == Finished("stop")
    assert [entry.token for entry in told] == ["x", "a"]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (4,)])
def test_tokens_that_are_not_shown_shift_nothing(sizes: tuple[int, ...]) -> None:
    """A control token is told of with its text, and is not in the piece."""
    tokens = [("</s>", b""), ("a", b"a"), ("b", b"b"), ("zz", b"zz")]
    seq, told, text = sequence(stop=("zz",), logprobs=0), [], ""
    left = iter(tokens)
    for size in sizes:
        some = [next(left) for _ in range(size)]
        entries = tuple(entry for name, _ in some for entry in logprob(name))
        delta, finished = seq.take(Step(size, b"".join(piece for _, piece in some), None, entries))
        if delta is not None:
            text += delta.text
            told += [entry.token for entry in delta.logprobs]
    assert (text, told, finished) == ("ab", ["</s>", "a", "b"], Finished("stop"))


@given(
    st.lists(st.lists(st.sampled_from(b"ab\xc3\xa9"), min_size=1, max_size=3).map(bytes), min_size=1, max_size=12),
    st.lists(st.text(alphabet="abé\ufffd", min_size=1, max_size=3), max_size=2).map(tuple),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
@example([b"xs", b"to", b"p"], ("stop",), [1] * 12)
@example([b"a", b"\xc3", b"\xa9", b"\xc3"], (), [4] * 12)
def test_however_tokens_come_those_are_told_of_whose_text_is(
    tokens: list[bytes], stop: tuple[str, ...], sizes: list[int]
) -> None:
    entries = [TokenLogprob(str(at), -0.5, token) for at, token in enumerate(tokens)]

    def run(sizes: list[int]) -> tuple[str, list[TokenLogprob], list[tuple[str, int]]]:
        seq, at, sent, told = sequence(stop=stop, logprobs=0, max_tokens=len(tokens)), 0, "", list[TokenLogprob]()
        finished, grown = None, list[tuple[str, int]]()
        for size in sizes:
            some = tuple(entries[at : at + size])
            at += len(some)
            delta, finished = seq.take(Step(len(some), b"".join([entry.bytes for entry in some]), None, some))
            assert delta is not None and (delta.text or finished or not delta.logprobs), "none without a text"
            sent, told = sent + delta.text, told + list(delta.logprobs)
            grown.append((sent, len(told)))
            if finished is not None:
                return sent, told, grown
        raise AssertionError("it did not end")

    sent, told, by_one = run([1] * 12)
    assert run(sizes)[:2] == (sent, told)
    assert told == entries[: len(told)]
    if not stop:
        assert len(told) == len(tokens)
    for text, count in by_one[:-1]:
        begun = b"".join(tokens[:count])
        assert len(begun.decode(errors="replace")) >= len(text), "all that is in the text"
        if count:
            before = b"".join(tokens[: count - 1]).decode(errors="ignore")
            assert len(before) < len(text), "and nothing of which no character is"


def test_the_end_sends_held_logprobs() -> None:
    seq = sequence(logprobs=0, max_tokens=2)
    assert seq.take(Step(1, b"\xf0", None, logprob("?"))) == (Delta(""), None)
    delta, finished = seq.take(Step(1, b"\x9f", None, logprob("!")))
    assert delta == Delta("\ufffd", 1, logprob("?") + logprob("!"))
    assert finished == Finished("length")
