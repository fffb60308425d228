"""What it says: a pure function of the prompt's tokens, the position and the seed. Nothing else, in any process, ever.

The prompt and seed are hashed to a key; each block of 64 tokens is one keyed hash of the block's number, a byte a word.
So a token costs a fraction of a microsecond, and any position can be had without those before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import count, cycle, islice

from tokenflow.api import SequenceRequest, Step, TokenLogprob
from tokenflow_synthetic.config import SyntheticConfig
from tokenflow_synthetic.vocabulary import FIRST_WORD, VOCABULARY, WORDS, detokenize, tokenize

_BLOCK = 64
_STEPS = tuple(Step(1, piece) for piece in VOCABULARY)
"""One for every token, made once: a Step does not change."""


def tokens(prompt: tuple[int, ...], seed: int | None = None) -> Iterator[int]:
    """The endless continuation of `prompt`."""
    key = blake2b(repr((tuple(prompt), seed)).encode(), digest_size=32).digest()
    for block in count():
        for byte in blake2b(block.to_bytes(8, "little"), key=key, digest_size=_BLOCK).digest():
            yield FIRST_WORD + byte


def generate(prompt: str, n: int, *, seed: int | None = None) -> str:
    """The text that the engine gives for `prompt` (plain text, as in completions) and `max_tokens = n`."""
    return detokenize(list(islice(tokens(tuple(tokenize(prompt)), seed), n)))


def steps(config: SyntheticConfig, request: SequenceRequest) -> Iterator[Step]:
    """What one sequence makes, token by token; ends where the sequence stops by itself."""
    made: Iterator[int]
    if config.text is None:
        made = tokens(request.prompt, request.sampling.seed)
    else:
        said = tokenize(config.text)
        made = cycle(said) if request.ignore_eos else iter(said)
    if config.one_byte:
        made = (byte for token in made for byte in VOCABULARY[token])
    if config.stop_at is not None and not request.ignore_eos:
        made = islice(made, config.stop_at)
    if request.logprobs is None:
        return map(_STEPS.__getitem__, made)
    return (Step(1, VOCABULARY[token], None, (logprob(token, request.logprobs),)) for token in made)


@lru_cache(maxsize=4096)
def logprob(token: int, top: int) -> TokenLogprob:
    """A plausible distribution: the token itself has a half, the next in the list a quarter, and so on."""

    def of(rank: int) -> TokenLogprob:
        piece = VOCABULARY[(token + rank) % len(VOCABULARY)]
        return TokenLogprob(piece.decode(errors="replace"), -(rank + 1) * math.log(2), piece)

    return of(0)._replace(top=tuple(of(rank) for rank in range(top)))


assert len(WORDS) == 256, "a byte picks a word"
