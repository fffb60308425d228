"""Text to tokens and back, as the library's own tokenizer has it, for both ways of spelling bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exllamav3 import Tokenizer
from tokenflow_exllama.vocabulary import BytewiseTokenizer, ExllamaVocabulary, as_bytewise, bytewise_cases
from tokenizers.processors import TemplateProcessing

from plugins.exllama_common.tests import tokens
from tokenflow.api import InvalidRequest
from tokenflow.testing.conformance.texts import HARD_TEXTS

from .rig.model import settings

KINDS = {"byte-level": tokens.write, "sentencepiece": tokens.write_sentencepiece}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    KINDS[request.param](tmp_path)
    return Tokenizer(settings(tmp_path))


@pytest.fixture
def vocabulary(tokenizer: Any) -> ExllamaVocabulary:
    return ExllamaVocabulary(tokenizer, tokenizer.tokenizer, tokenizer.config.eos_token_id_list)


@pytest.mark.parametrize("text", ["", "a", " a", "\n", *HARD_TEXTS, *tokens.CONTROLS])
def test_any_text_comes_back(vocabulary: ExllamaVocabulary, text: str) -> None:
    found = vocabulary.tokenize(text)
    assert vocabulary.detokenize(found) == text
    assert b"".join(vocabulary.pieces[token] for token in found) == text.encode(), "no control token is among them"


@pytest.mark.parametrize("text", [*HARD_TEXTS, "<|im_start|>user\nba be<|im_end|>\n"])
def test_as_the_library_reads_it(tokenizer: Any, vocabulary: ExllamaVocabulary, text: str) -> None:
    """But for the space that it puts before a text that begins."""
    for special in (False, True):
        theirs = tokenizer.encode("\n" + text, encode_special_tokens=special)[0].tolist()
        lead = tokenizer.encode("\n", encode_special_tokens=special)[0].tolist()
        assert theirs[: len(lead)] == lead
        assert vocabulary.tokenize(text, special) == theirs[len(lead) :]


def test_control_tokens(vocabulary: ExllamaVocabulary) -> None:
    assert vocabulary.specials >= set(tokens.CONTROLS)
    assert (vocabulary.bos, vocabulary.eos) == tokens.CONTROLS[:2]
    for text in tokens.CONTROLS:
        (token,) = vocabulary.tokenize(text, special=True)
        assert vocabulary.pieces[token] == b""
        assert vocabulary.detokenize([token]) == text
    assert vocabulary.ends == set(vocabulary.tokenize("<|end|>", special=True))


def test_whether_a_text_begins_with_a_token_is_in_the_file(tokenizer: Any, vocabulary: ExllamaVocabulary) -> None:
    assert not vocabulary.adds_bos
    bos = tokens.CONTROLS[0], tokenizer.bos_token_id
    tokenizer.tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $0", special_tokens=[bos])
    begun = ExllamaVocabulary(tokenizer, tokenizer.tokenizer, tokenizer.config.eos_token_id_list)
    assert begun.adds_bos
    assert begun.tokenize("a") == vocabulary.tokenize("a")


def test_what_is_no_text_or_no_token(vocabulary: ExllamaVocabulary) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        vocabulary.tokenize("a\ud83d")
    for token in (-1, vocabulary.size):
        with pytest.raises(ValueError, match=f"Token {token} is not in the vocabulary"):
            vocabulary.detokenize([0, token])


def test_the_generators_view(tokenizer: Any, vocabulary: ExllamaVocabulary) -> None:
    """Each byte is a character, none of them one that the library would wait for; the rest is the library's own."""
    bytewise = BytewiseTokenizer(tokenizer, vocabulary)
    pieces = bytewise.get_id_to_piece_list()
    assert [len(piece) for piece in pieces] == [len(piece) for piece in vocabulary.pieces]
    assert not any("\ufffd" in piece for piece in pieces)
    assert bytewise.actual_vocab_size == tokenizer.actual_vocab_size
    assert as_bytewise("É".encode()) in bytewise_cases("é")
    assert as_bytewise("é".encode()).lower() == as_bytewise("é".encode()), "bytes have no case"
