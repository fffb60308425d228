"""Text to tokens and back. Read only, and the one part of llama.cpp that any thread may use at any time.

The vocabulary lives in the model, which is freed with the last reference: a tokenize in some thread keeps its own, so
an engine that closes meanwhile takes nothing away from it.
"""

from __future__ import annotations

from typing import Any

from tokenflow.api import Vocabulary
from tokenflow_llamacpp.compat import get, token_bytes

# llama.h: llama_token_attr
_UNKNOWN, _CONTROL, _USER_DEFINED = 1, 8, 16


class LlamaVocabulary(Vocabulary):
    """A model's tokens. Which of them have no text when they are generated is as in llama-server.

    Args:
        model: cyllama's; kept.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._vocab = vocab = model.get_vocab()
        ids = range(int(vocab.n_vocab))
        attributes = [int(vocab.get_attr(token)) for token in ids]
        super().__init__(
            [token_bytes(vocab, token) for token in ids],
            controls={token for token, attribute in enumerate(attributes) if attribute & (_UNKNOWN | _CONTROL)},
            ends={token for token in ids if vocab.is_eog(token)},
            bos=get(vocab, "token_bos"),
            eos=get(vocab, "token_eos"),
        )
        self.adds_bos = bool(get(vocab, "get_add_bos"))
        """Every text begins with the token for that."""
        self.specials |= {
            self._name(token)
            for token, (text, attribute) in enumerate(zip(self.texts, attributes, strict=True))
            if text and (token in self.ends or _is_like_control(text, attribute))
        }

    def _read(self, text: str, special: bool) -> list[int]:
        """Takes about a microsecond a character."""
        return list(self._vocab.tokenize(text, False, special))


def _is_like_control(text: bytes, attribute: int) -> bool:
    """User text must not be able to spell it. User-defined tokens may be plain text, such as runs of spaces."""
    return bool(attribute & _USER_DEFINED) and text.startswith(b"<|") and text.endswith(b"|>")
