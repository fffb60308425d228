"""What every vocabulary does with what its model's own tokenizer reads, and where an engine lets it read."""

from __future__ import annotations

import threading

import pytest

from tokenflow.api import (
    BYTE_TOKEN,
    GPT2_BYTES,
    EngineInfo,
    InvalidRequest,
    StepLoop,
    TokenLogprob,
    Vocabulary,
    VocabularyEngine,
)
from tokenflow.api.vocabulary import SHORT_TEXT
from tokenflow.testing.steppers import PlainStepper

TEXTS = (b"\n", b" ", b"a", b" a", b"\xf0\x9f", b"<|end|>", b"", b"<|im_start|>")
END, EMPTY, START = 5, 6, 7


class Letters(Vocabulary):
    """Knows `TEXTS`, the longest first; `lead`: what its tokenizer puts before a text, as SentencePiece does."""

    def __init__(self, lead: str = "", *, bos: int | None = START, eos: int | None = END) -> None:
        self._before = lead
        self.threads: list[int] = []
        super().__init__(TEXTS, controls={END, EMPTY, START}, ends={END}, bos=bos, eos=eos)

    def _read(self, text: str, special: bool) -> list[int]:
        assert text
        self.threads.append(threading.get_ident())
        known = [token for token in range(len(TEXTS)) if TEXTS[token] and (special or token < END)]
        rest, tokens = (self._before + text).encode(), []
        while rest:
            token = max((t for t in known if rest.startswith(TEXTS[t])), key=lambda t: len(TEXTS[t]))
            tokens.append(token)
            rest = rest.removeprefix(TEXTS[token])
        return tokens


@pytest.mark.parametrize("lead", ["", " "])
def test_nothing_is_added_to_a_text(lead: str) -> None:
    vocabulary = Letters(lead)
    assert [vocabulary.tokenize(text) for text in ("", "a", " a", "aa a", "\na")] == [[], [2], [3], [2, 2, 3], [0, 2]]


def test_a_lead_that_cannot_be_told_from_the_text_stays() -> None:
    class Merging(Letters):
        def _read(self, text: str, special: bool) -> list[int]:
            return [1, 3] if text == "\na" else super()._read(text, special)

    assert Merging(" ").tokenize("a") == [3]


def test_control_tokens() -> None:
    vocabulary = Letters()
    assert vocabulary.pieces == [b"\n", b" ", b"a", b" a", b"\xf0\x9f", b"", b"", b""]
    assert vocabulary.specials == {"<|end|>", "<|im_start|>"}
    assert vocabulary.tokenize("a<|end|>", special=True) == [2, END]
    assert vocabulary.shown(frozenset({"<|end|>", "<|unknown|>", "a"})) == {END: b"<|end|>"}
    assert (vocabulary.bos, vocabulary.eos) == ("<|im_start|>", "<|end|>")


@pytest.mark.parametrize("none", [None, -1, len(TEXTS)])
def test_a_model_that_has_no_token_for_it(none: int | None) -> None:
    vocabulary = Letters(bos=none, eos=none)
    assert (vocabulary.bos, vocabulary.eos) == ("", "")


def test_tokens_as_text() -> None:
    vocabulary = Letters()
    assert vocabulary.detokenize([START, 2, 3, 4]) == "<|im_start|>a a\ufffd"
    top = (vocabulary.logprob(4, -1.5),)
    assert top == (TokenLogprob("\ufffd", -1.5, b"\xf0\x9f"),)
    assert vocabulary.logprob(2, -0.5, top) == TokenLogprob("a", -0.5, b"a", top)


@pytest.mark.parametrize("token", [-1, len(TEXTS), 1 << 40])
def test_outside_the_vocabulary(token: int) -> None:
    vocabulary = Letters()
    vocabulary.check([])
    vocabulary.check((0, len(TEXTS) - 1))
    with pytest.raises(ValueError, match=f"Token {token} is not in the vocabulary, which has 0 to 7"):
        vocabulary.check((2, token))
    with pytest.raises(ValueError, match="not in the vocabulary"):
        vocabulary.detokenize([2, token])


def test_half_a_surrogate_pair() -> None:
    with pytest.raises(InvalidRequest, match=r"'\\ud800', at character 2"):
        Letters().tokenize("aa\ud800")


def test_grammars_know_what_is_no_text() -> None:
    texts, ends, specials = Letters().grammars()._vocabulary
    assert (texts, ends, specials) == (list(TEXTS), [END], [END, EMPTY, START])


async def test_an_engine_reads_long_texts_in_a_thread() -> None:
    vocabulary = Letters()
    engine = VocabularyEngine(
        StepLoop(PlainStepper()), EngineInfo(model="letters", context_length=64, slots=1), vocabulary
    )
    del vocabulary.threads[:]
    assert await engine.tokenize("a" * SHORT_TEXT) == [2] * SHORT_TEXT
    assert await engine.tokenize("a" * (SHORT_TEXT + 1)) == [2] * (SHORT_TEXT + 1)
    short, long = vocabulary.threads
    assert short == threading.get_ident() != long
    assert await engine.tokenize("<|end|>", special=True) == [END]
    assert await engine.detokenize([END]) == "<|end|>"


def test_the_two_spellings_of_bytes() -> None:
    assert sorted(GPT2_BYTES.values()) == list(range(256))
    assert bytes(GPT2_BYTES[char] for char in "Ġaé") == b" a\xe9"
    found = BYTE_TOKEN.fullmatch("<0x0A>")
    assert found is not None and found[1] == "0A"
    assert BYTE_TOKEN.fullmatch("<0x0A> ") is None
