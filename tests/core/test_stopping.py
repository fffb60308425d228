"""The text assembler against a naive reference that sees the whole text at once and one character at a time."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenflow.core.stopping import TextAssembler

# A small alphabet with itself as stop strings makes near misses and overlaps the rule rather than the exception.
TEXTS = st.text(alphabet="abcé€😀", max_size=24)
STOPS = st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), max_size=3).map(tuple)
CUTS = st.lists(st.integers(0, 100), max_size=12)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def run(parts: list[bytes], stop: tuple[str, ...]) -> tuple[str, bool]:
    assembler = TextAssembler(stop)
    text = "".join(assembler.push(part) for part in parts) + assembler.flush()
    return text, assembler.stopped


def reference(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The stop string that is complete first ends the text; of several complete at once, the one that begins first."""
    for end in range(1, len(text) + 1):
        sizes = [len(s) for s in stop if text[:end].endswith(s)]
        if sizes:
            return text[: end - max(sizes)], True
    return text, False


@given(TEXTS, STOPS, CUTS)
@example("abcx", ("abc", "b"), [])  # "b" is complete first, however the bytes come
@example("aab", ("ab",), [1, 2])
@example("xabab", ("abab", "ab"), [])
def test_any_split_gives_what_the_reference_gives(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    assert run(pieces(text.encode(), cuts), stop) == reference(text, stop)


@given(st.binary(max_size=16), CUTS)
@example(b"\xed\xa0\x80\xf0\x9f", [1, 2, 4])
def test_any_split_of_any_bytes_gives_the_same_text(data: bytes, cuts: list[int]) -> None:
    assert run(pieces(data, cuts), ()) == (data.decode(errors="replace"), False)
    assert run(pieces(data, cuts), ("\ufffd",)) == run([data], ("\ufffd",))


@given(TEXTS, STOPS, CUTS)
def test_nothing_is_sent_that_could_become_a_stop_string(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    assembler = TextAssembler(stop)
    data, sent = b"", ""
    for part in pieces(text.encode(), cuts):
        sent += assembler.push(part)
        data += part
        whole = data.decode(errors="ignore")
        assert whole.startswith(sent)  # once, and in order
        if not assembler.stopped:
            held = whole[len(sent) :]
            assert not held or any(s.startswith(held) for s in stop)  # nothing is held without a reason
            tails = [whole[at:] for at in range(len(whole))]
            assert not any(s.startswith(tail) and len(tail) > len(held) for tail in tails for s in stop)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("one EENEND", ("END",), "one EEN"),
        ("aaab", ("aab",), "a"),
        ("abcd", ("abcd", "bc"), "a"),
        ("abcd", ("cd", "abcd"), ""),
        ("END", ("END",), ""),
        ("at the very EN", ("END",), "at the very EN"),
        ("no empty one", ("",), "no empty one"),
        ("grün\n\nrot", ("\n\n",), "grün"),
    ],
)
def test_text_ends_before_the_stop_string(text: str, stop: tuple[str, ...], expected: str) -> None:
    data = text.encode()
    stopped = expected != text
    assert run([data], stop) == (expected, stopped)
    assert run([bytes([byte]) for byte in data], stop) == (expected, stopped)


def test_a_near_miss_is_sent_as_soon_as_it_is_one() -> None:
    assembler = TextAssembler(("END",))
    assert [assembler.push(p) for p in (b"x", b"E", b"N", b"E", b"N", b"T", b"!")] == [
        "x",
        "",
        "",
        "EN",
        "",
        "ENT",
        "!",
    ]
    assert assembler.flush() == ""


def test_what_follows_the_stop_string_is_never_sent() -> None:
    assembler = TextAssembler(("END",))
    assert assembler.push(b"aENDb") == "a"
    assert assembler.stopped
    assert assembler.push(b"c\xe2") == ""
    assert assembler.flush() == ""


@pytest.mark.parametrize("tail", [b"\xe2", b"\xe2\x82", b"\xf0\x9f\x98"])
@pytest.mark.parametrize("stop", [(), ("END",)])
def test_half_a_character_at_the_end_becomes_one_replacement(tail: bytes, stop: tuple[str, ...]) -> None:
    assembler = TextAssembler(stop)
    assert assembler.push(b"ok" + tail) == "ok"
    assert assembler.flush() == "\ufffd"
    assert assembler.flush() == ""


def test_the_replacement_can_complete_a_stop_string() -> None:
    assembler = TextAssembler(("a\ufffd",))
    assert assembler.push(b"xa\xe2") == "x"
    assert assembler.flush() == ""
    assert assembler.stopped


def test_a_character_in_pieces_waits_and_then_comes_whole() -> None:
    assembler = TextAssembler()
    assert [assembler.push(bytes([byte])) for byte in "😀".encode()] == ["", "", "", "😀"]
