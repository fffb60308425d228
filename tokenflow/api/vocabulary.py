"""A model's vocabulary, for every engine that draws its tokens by their numbers, and the engine on a StepLoop with one.

What a plugin brings is what its library knows: each token's bytes, which of them are control tokens, and how a text is
read.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

import trio

from tokenflow.api.adapters import LoopEngine
from tokenflow.api.grammar import Grammars
from tokenflow.api.loop import StepLoop
from tokenflow.core.types import EngineInfo, TokenLogprob
from tokenflow.errors import InvalidRequest


def _gpt2_bytes() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


GPT2_BYTES = _gpt2_bytes()
"""GPT-2's alphabet, in which byte-level tokens are spelled: each byte as a printable character (`bytes_to_unicode` in
its encoder.py)."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece spells a token that is a single byte."""
SHORT_TEXT = 500
"""Characters. Half a millisecond: about what a way to a thread and back costs under load. Longer texts go there."""


class Vocabulary(ABC):
    """A model's tokens. Read only: any thread may use it at any time, if `_read` may be called in any.

    Args:
        texts: each token's bytes, control tokens by their names.
        controls: tokens that have no text when they are generated.
        ends: tokens that end a sequence: end of text, end of turn, and their like.
        bos: the token that begins a text, or none, or one outside the vocabulary.
        eos: the token that ends a text, likewise.
    """

    def __init__(
        self,
        texts: Sequence[bytes],
        *,
        controls: Collection[int],
        ends: Iterable[int],
        bos: int | None,
        eos: int | None,
    ) -> None:
        self.texts = list(texts)
        """Each token's bytes, control tokens by their names."""
        self.size = len(self.texts)
        self.pieces = [b"" if token in controls else text for token, text in enumerate(self.texts)]
        """Each token's bytes as generated text: control tokens have none."""
        self.ends = frozenset(ends)
        """Tokens that end a sequence: end of text, end of turn, and their like."""
        self._controls = {self._name(token): token for token in sorted(controls) if self.texts[token]}
        self.specials = frozenset(self._controls)
        """Texts that become tokens which no user may spell. A subclass may know of more."""
        self.bos, self.eos = self._name(bos), self._name(eos)
        self._lead = self._added_lead()

    @abstractmethod
    def _read(self, text: str, special: bool) -> list[int]:
        """As the model's own tokenizer has it, without tokens for its beginning or end; `text` is never empty."""

    def _name(self, token: int | None) -> str:
        return "" if token is None or not 0 <= token < self.size else self.texts[token].decode(errors="replace")

    def _added_lead(self) -> tuple[int, ...]:
        """What must go from the front of `"\\n" + text` to get the tokens of `text` and nothing else.

        SentencePiece models put a space before every text, so that "Hello" becomes that of " Hello"; a text that goes
        on from another one must not have it. A newline in front takes the space, and never merges with what follows.
        """
        plain = b"".join([self.texts[token] for token in self._read("a", False)])
        return () if plain == b"a" else tuple(self._read("\n", False))

    def shown(self, names: frozenset[str]) -> dict[int, bytes]:
        """Bytes of those control tokens, for a sequence whose text is to have them."""
        return {self._controls[name]: name.encode() for name in names if name in self._controls}

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Tokens of `text` with nothing added to it; `special`: control tokens' texts become those tokens.

        Raises:
            InvalidRequest: it is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(
                f"The text has half of a surrogate pair, {text[exc.start]!a}, at character {exc.start}; "
                "it is not valid Unicode.",
            ) from exc
        return self._tokenize(text, special)

    def _tokenize(self, text: str, special: bool) -> list[int]:
        if not self._lead or not text:
            return self._read(text, special) if text else []
        tokens = self._read("\n" + text, special)
        cut = len(self._lead)
        return tokens[cut:] if tuple(tokens[:cut]) == self._lead else self._read(text, special)

    def logprob(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        """What is said of a token that was drawn, or might have been."""
        text = self.texts[token]
        return TokenLogprob(text.decode(errors="replace"), logprob, text, top)

    def detokenize(self, tokens: list[int]) -> str:
        """Exact, control tokens included; half a character is U+FFFD.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        self.check(tokens)
        return b"".join([self.texts[token] for token in tokens]).decode(errors="replace")

    def check(self, tokens: list[int] | tuple[int, ...]) -> None:
        """ValueError for a token that is not in the vocabulary: inside a library some would end the process."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.size):
            wrong = next(token for token in tokens if not 0 <= token < self.size)
            raise ValueError(f"Token {wrong} is not in the vocabulary, which has 0 to {self.size - 1}.")

    def grammars(self) -> Grammars:
        """What compiles grammars for it. Takes some tenths of a second, and the interpreter's lock meanwhile."""
        specials = [token for token, piece in enumerate(self.pieces) if not piece]
        return Grammars(self.texts, ends=sorted(self.ends), specials=specials, tokenize=self.tokenize)


class VocabularyEngine(LoopEngine):
    """An engine on a StepLoop with a Vocabulary.

    Args:
        loop, info, grammars: as in `LoopEngine`; `grammars` are of this vocabulary.
        vocabulary: of its model.
    """

    def __init__(
        self, loop: StepLoop, info: EngineInfo, vocabulary: Vocabulary, grammars: Grammars | None = None
    ) -> None:
        super().__init__(loop, info, grammars)
        self._vocabulary = vocabulary
        self._tokenizing = trio.CapacityLimiter(2)  # tokenizing has no need to take more cores from decoding

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        if len(text) <= SHORT_TEXT:
            return self._vocabulary.tokenize(text, special)
        return await trio.to_thread.run_sync(self._vocabulary.tokenize, text, special, limiter=self._tokenizing)

    async def detokenize(self, tokens: list[int]) -> str:
        return self._vocabulary.detokenize(tokens)
