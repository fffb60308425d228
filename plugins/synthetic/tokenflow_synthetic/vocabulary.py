"""The tokenizer: ids 0 to 255 are bytes, then three control tokens, then 256 words with a space before each.

Any text is a sequence of bytes, so every text has tokens and every roundtrip is exact. Words only make it shorter, and
make what is generated pleasant to read. The lists must never change: the tests pin texts made of them.
"""

from __future__ import annotations

import re

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FIRST_SPECIAL = 256
FIRST_WORD = FIRST_SPECIAL + len(SPECIAL)

_WORDS = """
acorn amber anchor apple april arch arrow ash aspen autumn badger bamboo barley barn basin bay beach beacon beech bell
berry birch bird bloom boat bough bramble branch brass bread breeze brick bridge bright brook bucket butter cabin calm
candle canoe canvas carbon castle cedar chalk cherry circle clay clear cliff cloud clover coal coast cobalt comet copper
coral corn cotton cove crane creek crow crystal current daisy dawn deer delta desert dew dove dune dusk eagle earth east
ebony echo elm ember evening falcon fallow farm feather fern field finch fir flame flint flock flower foam fog forest
fossil fox frost garden garnet gate ginger glacier glade glass glow gold grain granite grass gravel green grove gull
hail harbor harvest hawk hay hazel heath hedge heron hill hollow honey horizon ice indigo iris iron island ivory ivy
jade jasper june juniper kelp kettle kite lagoon lake lamp lantern larch lark laurel lava leaf lemon lichen light lily
lime linen lion loam lotus lumen lunar maple marble march marsh meadow mellow mesa mica midnight mild mill mint mist
moon morning moss moth mountain nectar nest night noon north oak oasis ocean olive onyx opal orchard otter owl
paper path pearl pebble petal pine plain planet plum pond poplar quartz quiet rain raven reed reef ridge river robin
rock root rose sage sail salt sand seed shadow shell shore silver sky slate snow song spark sparrow spring star
stone stork storm stream summer sun swallow swan thistle thorn thunder tide timber topaz valley velvet violet water wave
"""
WORDS = tuple(" " + word for word in _WORDS.split())
VOCABULARY = (
    *(bytes([value]) for value in range(256)),
    *(text.encode() for text in SPECIAL),
    *(word.encode() for word in WORDS),
)

_IDS = {text: FIRST_SPECIAL + at for at, text in enumerate(SPECIAL + WORDS)}

_PLAIN = re.compile(" [a-z]+")  # it may begin with a word: looked up, since a pattern of all of them takes long
_WITH_SPECIAL = re.compile("|".join([*map(re.escape, SPECIAL), _PLAIN.pattern]))
_LENGTHS = sorted({len(word) for word in WORDS}, reverse=True)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenize(text: str, *, special: bool = False) -> list[int]:
    """Tokens of `text`, the longest word first; control tokens only if `special`."""
    tokens: list[int] = []
    at = 0
    for match in (_WITH_SPECIAL if special else _PLAIN).finditer(text):
        found = match.group()
        known = found if found in _IDS else _word_before(found)
        if known:
            tokens += text[at : match.start()].encode(errors="replace")
            tokens.append(_IDS[known])
            at = match.start() + len(known)
    tokens += text[at:].encode(errors="replace")
    return tokens


def _word_before(text: str) -> str:
    """The longest word that `text` begins with."""
    for length in _LENGTHS:
        if text[:length] in _IDS:
            return text[:length]
    return ""


def detokenize(tokens: list[int] | tuple[int, ...]) -> str:
    """The text of `tokens`; ValueError for an id that there is not."""
    check(tokens)
    return b"".join(VOCABULARY[token] for token in tokens).decode(errors="replace")


def check(tokens: list[int] | tuple[int, ...]) -> None:
    for token in tokens:
        if not 0 <= token < len(VOCABULARY):
            raise ValueError(f"token {token} is outside the vocabulary of {len(VOCABULARY)}")
