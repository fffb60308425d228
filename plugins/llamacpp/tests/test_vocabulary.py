"""Tokens and back, exactly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenflow_llamacpp.compat import token_bytes
from tokenflow_llamacpp.stepper import LlamaStepper
from tokenflow_llamacpp.vocabulary import LlamaVocabulary

from tokenflow.api import InvalidRequest

model = pytest.mark.model


@model
@settings(max_examples=200)
@given(text=st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")))
def test_round_trip(stepper: LlamaStepper, text: str) -> None:
    """But for the bytes that this vocabulary does not have: six control characters, some of planes 4 and above."""
    vocabulary = stepper.vocabulary
    assert vocabulary.detokenize(vocabulary.tokenize(text)) == text


@model
@pytest.mark.parametrize("text", [" a", "a ", "\n\n a", "", "👩‍🚀 naïve ", "<|im_start|>", "a\0b"])
def test_nothing_is_added(vocabulary: LlamaVocabulary, text: str) -> None:
    for special in (False, True):
        assert vocabulary.detokenize(vocabulary.tokenize(text, special)) == text


@model
def test_control_tokens_only_where_asked(vocabulary: LlamaVocabulary) -> None:
    assert len(vocabulary.tokenize("<|im_start|>", special=True)) == 1
    assert len(vocabulary.tokenize("<|im_start|>", special=False)) > 1
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= vocabulary.specials
    assert not any(text in vocabulary.specials for text in ("a", " the", "\n"))


@model
def test_a_character_in_several_tokens_keeps_its_bytes(vocabulary: LlamaVocabulary) -> None:
    tokens = vocabulary.tokenize("🜁")
    assert len(tokens) > 1
    assert b"".join(vocabulary.texts[token] for token in tokens) == "🜁".encode()
    assert vocabulary.detokenize(tokens[:1]) == "\ufffd"


@model
def test_control_tokens_are_no_generated_text(vocabulary: LlamaVocabulary) -> None:
    (token,) = vocabulary.tokenize("<|im_start|>", special=True)
    assert vocabulary.pieces[token] == b""
    assert vocabulary.texts[token] == b"<|im_start|>"


@model
@pytest.mark.parametrize("token", [-1, 49_152, 2**31])
def test_outside_the_vocabulary(vocabulary: LlamaVocabulary, token: int) -> None:
    with pytest.raises(ValueError, match=f"Token {token} is not in the vocabulary"):
        vocabulary.detokenize([5, token])


@model
def test_half_a_surrogate_pair(vocabulary: LlamaVocabulary) -> None:
    with pytest.raises(InvalidRequest, match=r"'\\ud800', at character 2"):
        vocabulary.tokenize("ab\ud800")


# --- models of other kinds, as far as they can be told ----------------------------------------------------------------


class SentencePieces:
    """A vocabulary that puts a space before every text, as Llama 2's does."""

    words = ("<unk>", "\u2581", "<0x0A>", "a", "b", "\u2581a", "<0xE2>", "<s>")
    n_vocab = len(words)

    def get_vocab(self) -> SentencePieces:
        return self

    def get_attr(self, token: int) -> int:
        return {0: 1, 2: 32, 6: 32, 7: 8}.get(token, 4)

    def get_text(self, token: int) -> str:
        return self.words[token]

    def is_eog(self, token: int) -> bool:
        return False

    def token_bos(self) -> int:
        return 7

    def token_eos(self) -> int:
        return -1

    def token_to_piece(self, token: int, lstrip: int, special: bool) -> str:
        return {2: "\n", 6: "\ufffd"}.get(token, self.words[token].replace("\u2581", " "))

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        text = " " + text
        tokens = []
        while text:
            word = " a" if text.startswith(" a") else text[0]
            tokens.append({"\n": 2, " ": 1, " a": 5}.get(word) or self.words.index(word))
            text = text[len(word) :]
        return tokens


def test_a_space_that_the_model_adds_is_left_out() -> None:
    vocabulary = LlamaVocabulary(SentencePieces())
    assert [vocabulary.tokenize(text) for text in ("ab", " ab", "b")] == [[3, 4], [5, 4], [4]]
    assert vocabulary.detokenize(vocabulary.tokenize("ab a")) == "ab a"


def test_bytes_of_byte_tokens_and_names() -> None:
    vocabulary = LlamaVocabulary(SentencePieces())
    assert vocabulary.texts[6] == b"\xe2"
    assert vocabulary.texts[2] == b"\n"
    assert (vocabulary.bos, vocabulary.eos) == ("<s>", "")
    assert vocabulary.specials == {"<unk>", "<s>"}


def test_a_release_that_knows_bytes_is_asked() -> None:
    class Newer:
        def token_to_bytes(self, token: int, lstrip: int, special: bool) -> bytes:
            return b"\xe2"

    vocabulary: Any = Newer()
    assert token_bytes(vocabulary, 1) == b"\xe2"
