"""How the next token is drawn: by llama.cpp's own chain of samplers, in its own order, which is llama-server's.

    logit_bias, penalties, top_k, typical_p, top_p, min_p, xtc, temperature, then a draw, by mirostat where asked for
    (or, at temperature 0, the likeliest)

* The three penalties look at the last 64 tokens, of prompt and completion together, as llama-server does by default.
* Log-probabilities are the model's own, before all of this.
* Sequences that are greedy without penalties or biases share one chain: it keeps no state.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from heapq import nlargest
from math import exp, inf, isfinite, log
from typing import Any

from tokenflow.api import InvalidRequest, Sampling, SequenceRequest, TokenLogprob
from tokenflow_llamacpp.compat import add_penalties
from tokenflow_llamacpp.vocabulary import Vocabulary

CAN = frozenset(field.name for field in fields(Sampling)) - {"dry", "banned_strings"}
PENALTY_WINDOW = 64
GREEDY_BELOW = 1e-5
"""A lower temperature would make infinities of logits; what it asks for is the likeliest token."""


class Samplers:
    """Makes each sequence's sampler.

    Args:
        library: cyllama's llama.cpp.
        vocabulary: of the model.
    """

    def __init__(self, library: Any, vocabulary: Vocabulary) -> None:
        self._library = library
        self._vocabulary = vocabulary
        self._banned_ends = [(token, -inf) for token in sorted(vocabulary.ends)]
        self._greedy = {ignore_eos: self._shared_greedy(ignore_eos) for ignore_eos in (False, True)}

    def make(self, request: SequenceRequest) -> tuple[Any, bool]:
        """The sampler of one sequence, and whether it is its own, to be closed with it.

        Raises:
            InvalidRequest: a bias for a token that does not exist, or that is no number.
        """
        sampling = request.sampling
        biases = self._biases(request)
        penalties = (
            1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
            sampling.frequency_penalty or 0.0,
            sampling.presence_penalty or 0.0,
        )
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        greedy = temperature < GREEDY_BELOW
        if greedy and not sampling.logit_bias and penalties == (1.0, 0.0, 0.0):
            return self._greedy[request.ignore_eos], False
        chain = self._chain()
        if biases:
            chain.add_logit_bias(self._vocabulary.size, biases)
        if penalties != (1.0, 0.0, 0.0):
            add_penalties(chain, self._vocabulary.size, PENALTY_WINDOW, penalties)
        if greedy:
            chain.add_greedy()
        else:
            _add_draw(chain, request, temperature)
        if penalties != (1.0, 0.0, 0.0):
            for token in request.prompt[-PENALTY_WINDOW:]:
                chain.accept(token)
        return chain, True

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

    def _biases(self, request: SequenceRequest) -> list[tuple[int, float]]:
        biases = dict(request.sampling.logit_bias or {})
        for token, bias in biases.items():
            if not 0 <= token < self._vocabulary.size:
                last = self._vocabulary.size - 1
                raise InvalidRequest(f"logit_bias: there is no token {token}; ids are 0 to {last}.", param="logit_bias")
            if not isfinite(bias):
                raise InvalidRequest(f"logit_bias: {bias} is no finite number.", param="logit_bias")
        return [*biases.items(), *(self._banned_ends if request.ignore_eos else ())]


def _add_draw(chain: Any, request: SequenceRequest, temperature: float) -> None:
    sampling = request.sampling
    if sampling.top_k:
        chain.add_top_k(sampling.top_k)
    if sampling.typical_p is not None and sampling.typical_p < 1:
        chain.add_typical(sampling.typical_p, 1)
    if sampling.top_p is not None and sampling.top_p < 1:
        chain.add_top_p(sampling.top_p, 1)
    if sampling.min_p:
        chain.add_min_p(sampling.min_p, 1)
    seed = _seed(sampling.seed)
    if sampling.xtc is not None:
        chain.add_xtc(sampling.xtc.probability, sampling.xtc.threshold, 1, seed)
    if temperature != 1:
        chain.add_temp(temperature)
    if sampling.mirostat is not None:
        chain.add_mirostat_v2(seed, sampling.mirostat.tau, sampling.mirostat.eta)
    else:
        chain.add_dist(seed)


def _seed(seed: int | None) -> int:
    """Any integer as llama.cpp's 32 bits, of which the highest value would mean: at random."""
    if seed is None:
        return random.randrange(0xFFFFFFFF)
    return (seed ^ (seed >> 32)) % 0xFFFFFFFF


def token_logprob(logits: Sequence[float], token: int, alternatives: int, vocabulary: Vocabulary) -> TokenLogprob:
    """The token that was drawn, with the likeliest ones, most likely first."""
    highest = nlargest(max(alternatives, 1), logits)
    top = highest[0]
    total = top + log(sum(map(exp, [logit - top for logit in logits])))
    ids: list[int] = []
    if alternatives:
        lowest = highest[-1]
        ids = [id for id, logit in enumerate(logits) if logit >= lowest]
        ids = sorted(ids, key=lambda id: -logits[id])[:alternatives]
    texts = vocabulary.texts

    def of(id: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text = texts[id]
        return TokenLogprob(text.decode(errors="replace"), logits[id] - total, text, top)

    return of(token, tuple(of(id) for id in ids))
