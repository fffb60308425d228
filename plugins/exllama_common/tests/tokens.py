"""A small vocabulary as model directories have it: tokenizer.json and its settings.

All bytes, syllables with and without a space before them, and control tokens. So any text can be spelled, most tokens
are readable, and single bytes make halves of characters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROLS = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprstvw" for vowel in "aeiou"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(directory: Path) -> None:
    """The files of a byte-level vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *SYLLABLES, *("Ġ" + syllable for syllable in SYLLABLES)]
    merges = [(syllable[0], syllable[1]) for syllable in SYLLABLES]
    merges += [("Ġ", syllable) for syllable in SYLLABLES]
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _finish(tokenizer, directory)


def write_sentencepiece(directory: Path) -> None:
    """The files of one that puts a space before every text, and falls back to bytes."""
    alphabet = [chr(code) for code in range(0x21, 0x7F)]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *alphabet, "▁a", "▁b"]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: id for id, piece in enumerate(pieces)},
            [("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _finish(tokenizer, directory)


def _finish(tokenizer: Tokenizer, directory: Path) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": CONTROLS[0], "eos_token": CONTROLS[1], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
