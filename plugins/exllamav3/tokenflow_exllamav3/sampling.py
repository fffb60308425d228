"""How the next token is drawn: by the library's own chain of samplers, in its own order.

    logit_bias, penalties, DRY, min_p, top_k, top_p, XTC, temperature, then a draw (or, at temperature 0, the likeliest)

* Penalties and DRY look at the whole text, prompt and completion together, as the library does by default.
* A chain that has only the plain filters is one fused kernel on the GPU, which is why their order is the library's.
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import Any

from exllamav3.generator import sampler as lib
from tokenflow_exllama.vocabulary import BytewiseTokenizer, as_bytewise

from tokenflow.api import Dry, InvalidRequest, Sampling

CAPABILITIES = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "xtc",
        "dry",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "logit_bias",
        "banned_strings",
        "logprobs",
        "ignore_eos",
    }
)
MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5
"""A lower temperature would make infinities of logits; what it asks for is the likeliest token."""


class Samplers:
    """Makes each sequence's chain.

    Args:
        tokenizer: what the generator has.
        size: tokens in the vocabulary.
    """

    def __init__(self, tokenizer: BytewiseTokenizer, size: int) -> None:
        self._size = size
        self._protected = lib.xtc_default_protected_token_ids(tokenizer)
        self._breakers = lru_cache(64)(lambda strings: lib.dry_sequence_breaker_tokens(tokenizer, strings))
        self._default_breakers = lib.dry_default_sequence_breaker_tokens(tokenizer)

    def make(self, sampling: Sampling) -> Any:
        """The chain for one sequence.

        Raises:
            InvalidRequest: a bias for a token that does not exist, or that is no number.
        """
        steps = [*self._shaping(sampling)]
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        if temperature < GREEDY_BELOW:
            return lib.CustomSampler([*steps, lib.SS_Argmax()])
        if sampling.min_p:
            steps.append(lib.SS_MinP(sampling.min_p))
        if sampling.top_k:
            steps.append(lib.SS_TopK(min(sampling.top_k, self._size)))  # its kernel counts in 32 bits
        if sampling.top_p is not None and sampling.top_p < 1:
            steps.append(lib.SS_TopP(sampling.top_p))
        if sampling.xtc is not None:
            steps.append(lib.SS_XTC(sampling.xtc.probability, sampling.xtc.threshold, self._protected))
        return lib.CustomSampler([*steps, lib.SS_Temperature(temperature), lib.SS_Sample()])

    def _shaping(self, sampling: Sampling) -> list[Any]:
        """What changes logits before any is chosen. Steps that change nothing fall away by themselves."""
        steps = []
        if sampling.logit_bias:
            steps.append(lib.SS_LogitBias(self._checked(sampling)))
        if sampling.repetition_penalty is not None:
            steps.append(lib.SS_RepP(sampling.repetition_penalty))
        steps.append(lib.SS_PresFreqP(sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0))
        if sampling.dry is not None:
            steps.append(self._dry(sampling.dry))
        return steps

    def _checked(self, sampling: Sampling) -> dict[int, float]:
        biases = dict(sampling.logit_bias or {})
        for token, bias in biases.items():
            if not 0 <= token < self._size:
                last = self._size - 1
                raise InvalidRequest(f"logit_bias: there is no token {token}; ids are 0 to {last}.", param="logit_bias")
            if not isfinite(bias):
                raise InvalidRequest(f"logit_bias: {bias} is no finite number.", param="logit_bias")
        return biases

    def _dry(self, dry: Dry) -> Any:
        if dry.sequence_breakers is None:
            breakers = self._default_breakers
        else:
            breakers = self._breakers(tuple(as_bytewise(text.encode()) for text in dry.sequence_breakers))
        return lib.SS_DRY(dry.multiplier, dry.base, dry.allowed_length, dry.range_tokens, breakers)
