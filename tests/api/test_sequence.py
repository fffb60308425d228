"""`Sequence.take`: what stop strings, lengths, half characters and log-probabilities make of a step. Pure."""

from __future__ import annotations

from typing import Any

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


def test_the_end_sends_held_logprobs() -> None:
    seq = sequence(logprobs=0, max_tokens=2)
    assert seq.take(Step(1, b"\xf0", None, logprob("?"))) == (Delta(""), None)
    delta, finished = seq.take(Step(1, b"\x9f", None, logprob("!")))
    assert delta == Delta("\ufffd", 1, logprob("?") + logprob("!"))
    assert finished == Finished("length")
