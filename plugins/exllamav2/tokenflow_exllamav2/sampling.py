"""How the next token is drawn: by the library's own sampler, in its own order.

    penalties, logit_bias, DRY, temperature, top_k, top_p, min_p, typical_p, mirostat, XTC, then a draw
    (or, at temperature 0, the likeliest)

* Penalties and DRY look at the whole text, prompt and completion together, as the library does by default.
* Log-probabilities are the model's own, before all of this.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from math import inf, isfinite
from typing import Any

import torch
from exllamav2.generator import ExLlamaV2Sampler
from tokenflow_exllama.vocabulary import BytewiseTokenizer, ExllamaVocabulary, as_bytewise

from tokenflow.api import Dry, InvalidRequest, Sampling, TokenLogprob

CAPABILITIES = frozenset(field.name for field in fields(Sampling))
"""All of them; but guessing ahead and going back don't mix, see `loading`."""
MAX_LOGPROBS = 20
NGRAM = 20
"""How long a repetition the library's DRY looks for."""
_NEARLY_ALL = 0.99999


class Samplers:
    """Makes each sequence's settings. They are its own, for the library keeps a sampler's state in them.

    Args:
        tokenizer: what the generator has.
        size: tokens in the vocabulary.
        padded: entries in the model's logits.
    """

    def __init__(self, tokenizer: BytewiseTokenizer, size: int, padded: int) -> None:
        self._tokenizer = tokenizer
        self._size = min(size, padded)  # some models lack the last of their tokenizer's tokens
        self._padded = padded

    def make(self, sampling: Sampling) -> Any:
        """The settings for one sequence.

        Raises:
            InvalidRequest: what the library cannot do, or a bias for a token that does not exist or is no number.
        """
        settings = ExLlamaV2Sampler.Settings(
            token_repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
            token_frequency_penalty=sampling.frequency_penalty or 0.0,
            token_presence_penalty=sampling.presence_penalty or 0.0,
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_k=min(sampling.top_k or 0, self._size),
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            min_p=sampling.min_p or 0.0,
            typical=sampling.typical_p or 0.0,
            token_bias=self._bias(sampling),
        )
        if sampling.temperature == 0 or sampling.min_p == 1 or sampling.top_p == 0:
            settings.top_k = 1  # what each of these says; the library takes some of them for "off"
        if sampling.mirostat is not None:
            settings.mirostat = True
            settings.mirostat_tau, settings.mirostat_eta = sampling.mirostat.tau, sampling.mirostat.eta
        if sampling.xtc is not None:
            settings.xtc_probability, settings.xtc_threshold = sampling.xtc.probability, sampling.xtc.threshold
            settings.top_p = min(settings.top_p, _NEARLY_ALL)  # its XTC is right on sorted candidates; top_p sorts them
            protected = ExLlamaV2Sampler.get_default_xtc_mask_tokens(self._tokenizer)
            settings.xtc_ignore_tokens = frozenset(token for token in protected if token < self._size)
        if sampling.dry is not None:
            self._set_dry(settings, sampling.dry)
        return settings

    def _bias(self, sampling: Sampling) -> torch.Tensor | None:
        if not sampling.logit_bias:
            return None
        tensor = torch.zeros(self._padded)
        for token, bias in sampling.logit_bias.items():
            if not 0 <= token < self._size:
                last = self._size - 1
                raise InvalidRequest(f"logit_bias: there is no token {token}; ids are 0 to {last}.", param="logit_bias")
            if not isfinite(bias):
                raise InvalidRequest(f"logit_bias: {bias} is no finite number.", param="logit_bias")
            tensor[token] = bias if bias > -100 else -inf
        return tensor

    def _set_dry(self, settings: Any, dry: Dry) -> None:
        if dry.allowed_length > NGRAM:
            raise InvalidRequest(
                f"dry_allowed_length: {dry.allowed_length} asked for; at most {NGRAM} here.", param="dry_allowed_length"
            )
        if 0 < dry.range_tokens <= NGRAM:
            raise InvalidRequest(
                f"dry_range: {dry.range_tokens} asked for; 0 or more than {NGRAM} here.", param="dry_range"
            )
        settings.dry_multiplier, settings.dry_base, settings.dry_max_ngram = dry.multiplier, dry.base, NGRAM
        settings.dry_allowed_length, settings.dry_range = dry.allowed_length, dry.range_tokens
        if dry.sequence_breakers is not None:
            breakers = [as_bytewise(text.encode()) for text in dry.sequence_breakers]
            texts = self._tokenizer.get_id_to_piece_list(True)
            settings.dry_sequence_breakers = {
                token for token, text in enumerate(texts) if any(breaker in text for breaker in breakers)
            }


def forget_repetitions(settings: Any) -> None:
    """For a text that was taken back: DRY counts what is left anew."""
    settings.ngram_trie, settings.ngram_index, settings.ngram_history = None, 0, deque()


class Ranking:
    """What the model thought of one token's place, before any sampler: log-probabilities, and the likeliest tokens."""

    def __init__(self, logits: torch.Tensor, alternatives: int, size: int) -> None:
        self._logprobs = torch.log_softmax(logits.flatten()[:size].float(), dim=-1)
        self._top = torch.topk(self._logprobs, alternatives).indices.tolist()

    def of(self, token: int, vocabulary: ExllamaVocabulary) -> TokenLogprob:
        top = tuple(vocabulary.logprob(id, float(self._logprobs[id])) for id in self._top)
        return vocabulary.logprob(token, float(self._logprobs[token]), top)
