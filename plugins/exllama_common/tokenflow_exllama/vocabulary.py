"""Text to tokens and back, each token with its exact bytes.

The libraries' tokenizers have one switch for control tokens, which every call sets, so no two threads may use one. Here
are two copies of what it wraps, one for each position of the switch, which nobody sets again: any thread, at any time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer  # type: ignore[import-untyped]

from tokenflow.api import BYTE_TOKEN, GPT2_BYTES, Vocabulary

_CONTROL_LIKE = re.compile(r"<\|.*\|>")


class ExllamaVocabulary(Vocabulary):
    """A model's tokens. The texts of all its control tokens are special.

    Args:
        tokenizer: the library's.
        wrapped: what it wraps, of the tokenizers library.
        ends: tokens that end a sequence.
    """

    def __init__(self, tokenizer: Any, wrapped: Tokenizer, ends: Iterable[int] = ()) -> None:
        spelling = json.loads(wrapped.to_str())
        for token in spelling["added_tokens"]:  # else users could spell them: they'd be read in any text
            token["special"] = token["special"] or _CONTROL_LIKE.fullmatch(token["content"]) is not None
        added = {token["id"]: token for token in spelling["added_tokens"]}
        self._readers = {special: _reader(spelling, special) for special in (False, True)}
        # What the library knows beside its tokenizer file, and looks for by itself: so must we.
        plain = tokenizer.unspecial_piece_to_id
        missing = {text: id for text, id in tokenizer.extended_piece_to_id.items() if wrapped.token_to_id(text) is None}
        self._extras = {False: dict(plain), True: {**plain, **missing}}
        ends = frozenset(ends)
        controls = {id for id, token in added.items() if token["special"]} | set(missing.values()) | ends
        names = dict(tokenizer.extended_id_to_piece) | {id: token["content"] for id, token in added.items()}
        to_bytes = _byte_level if '"ByteLevel"' in json.dumps(spelling["decoder"]) else _byte_fallback
        raw = [self._readers[False].id_to_token(token) for token in range(tokenizer.actual_vocab_size)]
        texts = [names[token].encode() if token in names else to_bytes(text or "") for token, text in enumerate(raw)]
        super().__init__(texts, controls=controls, ends=ends, bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id)
        self.adds_bos = self._readers[False].encode("a").ids[:1] == [tokenizer.bos_token_id]
        """Every text begins with the token for that, as the tokenizer file has it."""

    def _read(self, text: str, special: bool) -> list[int]:
        return list(self._readers[special].encode(text, add_special_tokens=False).ids)

    def _tokenize(self, text: str, special: bool) -> list[int]:
        extras = self._extras[special]
        if not extras:
            return super()._tokenize(text, special)
        tokens = []
        for part in re.split("(" + "|".join(map(re.escape, extras)) + ")", text):
            tokens += [extras[part]] if part in extras else super()._tokenize(part, special)
        return tokens

    def generated(self, tokens: list[int], shown: frozenset[str] = frozenset()) -> bytes:
        """The bytes of generated tokens: of control tokens only those that are to be shown have any."""
        if not shown:
            return b"".join([self.pieces[token] for token in tokens])
        visible = self.shown(shown)
        return b"".join([self.texts[token] if token in visible else self.pieces[token] for token in tokens])


def _reader(spelling: dict[str, Any], special: bool) -> Tokenizer:
    reader = Tokenizer.from_str(json.dumps(spelling))
    reader.no_truncation()
    reader.no_padding()
    reader.encode_special_tokens = not special  # the library's word for: read their texts as text
    return reader


def _byte_level(token: str) -> bytes:
    return bytes(GPT2_BYTES[char] for char in token) if set(token) <= GPT2_BYTES.keys() else token.encode()


def _byte_fallback(token: str) -> bytes:
    """SentencePiece's spelling: single bytes as `<0x0A>`, a space as U+2581."""
    if match := BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


# --- the library's view of it -----------------------------------------------------------------------------------------

_HIGH = 0xF780
"""Where bytes above 0x7F go: a private plane, whose characters have no case and are no replacement character."""


def as_bytewise(data: bytes) -> str:
    """Each byte as a character of its own: ASCII is itself."""
    return "".join([chr(byte if byte < 0x80 else _HIGH + byte) for byte in data])


class BytewiseTokenizer:
    """The tokenizer that a Generator gets: its text is bytewise, so every token's text is final at once.

    With real text the library would hold tokens back until a character is whole, and nobody could count them; here
    characters are the StepLoop's affair. What it still looks for in the text, banned strings and DRY's breakers, must
    be given to it in the same spelling: see `bytewise_cases`.
    """

    def __init__(self, tokenizer: Any, vocabulary: ExllamaVocabulary) -> None:
        self._tokenizer = tokenizer
        self._pieces = [as_bytewise(piece) for piece in vocabulary.pieces]
        self._texts = [as_bytewise(text) for text in vocabulary.texts]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        return self._texts if include_special_tokens else self._pieces


def bytewise_cases(text: str) -> set[str]:
    """`text` in every case that the library, which ignores that of ASCII alone here, would not find by itself."""
    return {as_bytewise(form.encode()) for form in (text, text.lower(), text.upper(), text.capitalize(), text.title())}


def before_banned(data: bytes, banned: tuple[str, ...] | None) -> bytes:
    """What comes before the first of the banned strings."""
    text = as_bytewise(data).lower()
    found = [text.find(form.lower()) for string in banned or () for form in bytewise_cases(string)]
    return data[: min((at for at in found if at >= 0), default=len(data))]
