"""How the next token is drawn: by llama.cpp's own chain of samplers, in its own order, which is llama-server's.

    logit_bias, penalties, top_k, typical_p, top_p, min_p, xtc, temperature, then a draw, by mirostat where asked for
    (or, at temperature 0, the likeliest)

* The three penalties look at the last 64 tokens, of prompt and completion together, as llama-server does by default.
* Log-probabilities are the model's own, before all of this.
* Sequences that are greedy without penalties or biases share one chain: it keeps no state.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import fields
from hashlib import blake2b
from heapq import nlargest
from math import exp, inf, isfinite, log
from typing import Any, Protocol

from tokenflow.api import InvalidRequest, Sampling, SequenceRequest, TokenLogprob
from tokenflow_llamacpp.compat import add_penalties
from tokenflow_llamacpp.vocabulary import LlamaVocabulary

CAN = frozenset(field.name for field in fields(Sampling)) - {"dry", "banned_strings"}
PENALTY_WINDOW = 64
_NO_PENALTIES = (1.0, 0.0, 0.0)
GREEDY_BELOW = 1e-5
"""A lower temperature would make infinities of logits; what it asks for is the likeliest token."""

Bias = tuple[int, float]
"""A token, and what is added to its logit."""

_POSSIBLE = 1e-30
"""Of the likeliest token's probability: less is none."""

_ZEROS = re.compile(rb"\0+")


class Sampler(Protocol):
    """Draws the tokens of one sequence."""

    @property
    def ended(self) -> bool:
        """Nothing can follow what has been drawn."""
        ...

    def draw(self, llama: Any, index: int, context: Sequence[int], most: int) -> Sequence[int]:
        """The next token, and as many more as are certain, `most` in all.

        Args:
            llama: cyllama's context, which has decoded.
            index: where in its batch the logits for the next token are.
            context: all tokens so far.
            most: at least 1.
        """
        ...

    def close(self) -> None: ...


class ChainSampler:
    """A `Sampler` that is one chain from beginning to end.

    Args:
        chain: cyllama's.
        shared: with other sequences, so not to be closed.
    """

    __slots__ = ("_chain", "_shared")
    ended = False

    def __init__(self, chain: Any, *, shared: bool) -> None:
        self._chain = chain
        self._shared = shared

    def draw(self, llama: Any, index: int, context: Sequence[int], most: int) -> Sequence[int]:
        return (self._chain.sample(llama, index),)

    def close(self) -> None:
        if not self._shared:
            self._chain.close()


class Samplers:
    """Makes each sequence's sampler.

    Args:
        library: cyllama's llama.cpp.
        vocabulary: of the model.
    """

    def __init__(self, library: Any, vocabulary: LlamaVocabulary) -> None:
        self._library = library
        self._vocabulary = vocabulary
        self._bans: list[Bias] = [(token, -inf) for token in range(vocabulary.size)]
        self._banned_ends = [self._bans[token] for token in sorted(vocabulary.ends)]
        self._greedy = {ignore_eos: self._shared_greedy(ignore_eos) for ignore_eos in (False, True)}

    def make(self, request: SequenceRequest) -> ChainSampler:
        """The sampler of one sequence.

        Raises:
            InvalidRequest: a bias for a token that does not exist, or that is no number.
        """
        sampling = request.sampling
        if _is_greedy(sampling) and not sampling.logit_bias and _penalties(sampling) == _NO_PENALTIES:
            return ChainSampler(self._greedy[request.ignore_eos], shared=True)
        chain = self._compose(request, self.biases(request), request.prompt, _seed(sampling.seed))
        return ChainSampler(chain, shared=False)

    def make_masked(
        self, request: SequenceRequest, biases: list[Bias], mask: bytes, context: Sequence[int], seed: int
    ) -> Any:
        """A chain, for as long as the mask stays the same.

        Args:
            biases: the request's.
            mask: a byte a token; 0 bans.
            context: the tokens so far.
            seed: of 32 bits.
        """
        banned: list[Bias] = []
        for run in _ZEROS.finditer(mask):  # few and long: what a grammar allows, or bans, is mostly a handful
            banned += self._bans[run.start() : run.end()]
        return self._compose(request, biases + banned, context, seed)

    def _compose(self, request: SequenceRequest, biases: list[Bias], context: Sequence[int], seed: int) -> Any:
        penalties = _penalties(request.sampling)
        chain = self._chain()
        if biases:
            chain.add_logit_bias(self._vocabulary.size, biases)
        if penalties != _NO_PENALTIES:
            add_penalties(chain, self._vocabulary.size, PENALTY_WINDOW, penalties)
        if _is_greedy(request.sampling):
            chain.add_greedy()
        else:
            _add_draw(chain, request.sampling, seed)
        if penalties != _NO_PENALTIES:
            for token in context[-PENALTY_WINDOW:]:
                chain.accept(token)
        return chain

    def close(self) -> None:
        for chain in self._greedy.values():
            chain.close()

    def _chain(self) -> Any:
        params = self._library.LlamaSamplerChainParams()
        params.no_perf = True
        return self._library.LlamaSampler(params)

    def _shared_greedy(self, ignore_eos: bool) -> Any:
        chain = self._chain()
        if ignore_eos:
            chain.add_logit_bias(self._vocabulary.size, self._banned_ends)
        chain.add_greedy()
        return chain

    def biases(self, request: SequenceRequest) -> list[Bias]:
        """Added to logits: what the request asks for, and the ends where they are to be ignored."""
        biases = dict(request.sampling.logit_bias or {})
        for token, bias in biases.items():
            if not 0 <= token < self._vocabulary.size:
                last = self._vocabulary.size - 1
                raise InvalidRequest(f"logit_bias: there is no token {token}; ids are 0 to {last}.", param="logit_bias")
            if not isfinite(bias):
                raise InvalidRequest(f"logit_bias: {bias} is no finite number.", param="logit_bias")
        return [*biases.items(), *(self._banned_ends if request.ignore_eos else ())]


def _temperature(sampling: Sampling) -> float:
    return 1.0 if sampling.temperature is None else sampling.temperature


def _is_greedy(sampling: Sampling) -> bool:
    return _temperature(sampling) < GREEDY_BELOW


def _penalties(sampling: Sampling) -> tuple[float, float, float]:
    """Repetition, frequency, presence."""
    repetition = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
    return repetition, sampling.frequency_penalty or 0.0, sampling.presence_penalty or 0.0


def _add_draw(chain: Any, sampling: Sampling, seed: int) -> None:
    if sampling.top_k:
        chain.add_top_k(sampling.top_k)
    if sampling.typical_p is not None and sampling.typical_p < 1:
        chain.add_min_p(_POSSIBLE, 1)  # of what cannot be, it would take 0 * log(0): then it keeps just anything
        chain.add_typical(sampling.typical_p, 1)
    if sampling.top_p is not None and sampling.top_p < 1:
        chain.add_top_p(sampling.top_p, 1)
    if sampling.min_p:
        chain.add_min_p(sampling.min_p, 1)
    if sampling.xtc is not None:
        chain.add_xtc(sampling.xtc.probability, sampling.xtc.threshold, 1, seed)
    if (temperature := _temperature(sampling)) != 1:
        chain.add_temp(temperature)
    if sampling.mirostat is not None:
        chain.add_mirostat_v2(seed, sampling.mirostat.tau, sampling.mirostat.eta)
    else:
        chain.add_dist(seed)


def _seed(seed: int | None) -> int:
    """Any integer as llama.cpp's 32 bits, of which the highest value would mean: at random."""
    if seed is None:
        return random.randrange(0xFFFFFFFF)
    if 0 <= seed < 0xFFFFFFFF:
        return seed
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=8).digest()) % 0xFFFFFFFF


def token_logprob(logits: Sequence[float], token: int, alternatives: int, vocabulary: LlamaVocabulary) -> TokenLogprob:
    """The token that was drawn, with the likeliest ones, most likely first."""
    highest = nlargest(max(alternatives, 1), logits)
    total = highest[0] + log(sum(map(exp, [logit - highest[0] for logit in logits])))
    ids: list[int] = []
    if alternatives:
        lowest = highest[-1]
        ids = [id for id, logit in enumerate(logits) if logit >= lowest]
        ids = sorted(ids, key=lambda id: -logits[id])[:alternatives]
    top = tuple(vocabulary.logprob(id, logits[id] - total) for id in ids)
    return vocabulary.logprob(token, logits[token] - total, top)
