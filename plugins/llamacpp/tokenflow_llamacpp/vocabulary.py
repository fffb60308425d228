"""Text to tokens and back. Read only, and the one part of llama.cpp that any thread may use at any time.

The vocabulary lives in the model, which is freed with the last reference: a tokenize in some thread keeps its own, so
an engine that closes meanwhile takes nothing away from it.
"""

from __future__ import annotations

from typing import Any

from tokenflow.api import Grammars, InvalidRequest
from tokenflow_llamacpp.compat import get, token_bytes

# llama.h: llama_token_attr
_UNKNOWN, _CONTROL, _USER_DEFINED = 1, 8, 16


class Vocabulary:
    """A model's tokens.

    Args:
        model: cyllama's; kept.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._vocab = vocab = model.get_vocab()
        self.size = int(vocab.n_vocab)
        ids = range(self.size)
        attributes = [int(vocab.get_attr(token)) for token in ids]
        self.texts = [token_bytes(vocab, token) for token in ids]
        """Each token's bytes, control tokens by their names."""
        self.pieces = [
            b"" if attribute & (_UNKNOWN | _CONTROL) else text
            for text, attribute in zip(self.texts, attributes, strict=True)
        ]
        """Each token's bytes as generated text: control tokens have none, as in llama-server."""
        self.ends = frozenset(token for token in ids if vocab.is_eog(token))
        """Tokens that end a sequence: end of text, end of turn, and their like."""
        self.specials = frozenset(
            text.decode(errors="replace")
            for token, (text, attribute) in enumerate(zip(self.texts, attributes, strict=True))
            if text and (token in self.ends or _is_special(text, attribute))
        )
        self._hidden = {
            self.texts[token].decode(errors="replace"): token
            for token in ids
            if self.texts[token] and not self.pieces[token]
        }
        self.bos = self._name(get(vocab, "token_bos"))
        self.eos = self._name(get(vocab, "token_eos"))
        self._lead = self._added_lead()

    def shown(self, names: frozenset[str]) -> dict[int, bytes]:
        """Bytes of those control tokens, for a sequence whose text is to have them."""
        return {self._hidden[name]: name.encode() for name in names if name in self._hidden}

    def _name(self, token: int) -> str:
        return self.texts[token].decode(errors="replace") if 0 <= token < self.size else ""

    def _added_lead(self) -> tuple[int, ...]:
        """What must go from the front of `"\\n" + text` to get the tokens of `text` and nothing else.

        SentencePiece models put a space before every text, so that "Hello" becomes that of " Hello"; a text that goes
        on from another one must not have it. A newline in front takes the space, and never merges with what follows.
        """
        plain = "".join(self.texts[token].decode(errors="replace") for token in self._tokenize("a", False))
        return () if plain == "a" else tuple(self._tokenize("\n", False))

    def _tokenize(self, text: str, special: bool) -> list[int]:
        return list(self._vocab.tokenize(text, False, special))

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Tokens of `text` with nothing added to it. Takes about a microsecond a character."""
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(
                f"The text has half of a surrogate pair, {text[exc.start]!a}, at character {exc.start}; "
                "it is not valid Unicode.",
            ) from exc
        if not self._lead:
            return self._tokenize(text, special)
        tokens = self._tokenize("\n" + text, special)
        cut = len(self._lead)
        return tokens[cut:] if tuple(tokens[:cut]) == self._lead else self._tokenize(text, special)

    def detokenize(self, tokens: list[int]) -> str:
        """Exact, control tokens included; half a character is U+FFFD.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        self.check(tokens)
        return b"".join([self.texts[token] for token in tokens]).decode(errors="replace")

    def grammars(self) -> Grammars:
        """What compiles grammars for it. Takes some tenths of a second, and the interpreter's lock meanwhile."""
        specials = [token for token, piece in enumerate(self.pieces) if not piece]
        return Grammars(self.texts, ends=sorted(self.ends), specials=specials, tokenize=self.tokenize)

    def check(self, tokens: list[int] | tuple[int, ...]) -> None:
        """ValueError for a token that is not in the vocabulary: inside llama.cpp some would end the process."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.size):
            wrong = next(token for token in tokens if not 0 <= token < self.size)
            raise ValueError(f"Token {wrong} is not in the vocabulary, which has 0 to {self.size - 1}.")


def _is_special(text: bytes, attribute: int) -> bool:
    """User text must not be able to spell it. User-defined tokens may be plain text, such as runs of spaces."""
    if attribute & (_UNKNOWN | _CONTROL):
        return True
    return bool(attribute & _USER_DEFINED) and text.startswith(b"<|") and text.endswith(b"|>")
