"""From the generator's results to the loop's steps.

Token ids are what counts; the results' text is the library's own spelling of them (see `BytewiseTokenizer`), and left.
Log-probabilities are the model's own, before any sampling.
"""

from __future__ import annotations

from math import log
from typing import Any

from tokenflow_exllama.vocabulary import ExllamaVocabulary, before_banned

from tokenflow.api import SequenceRequest, Step, TokenLogprob

LOWEST = -9999.0
"""The log-probability of a token whose probability is too small for a float32 (OpenAI's number for it)."""


def step_of(results: list[dict[str, Any]], request: SequenceRequest, vocabulary: ExllamaVocabulary) -> Step | None:
    """What one iteration made for one sequence. None: nothing, for it prefills, waits, or has its text held."""
    tokens: list[int] = []
    logprobs: tuple[TokenLogprob, ...] = ()
    reason = None
    for result in results:
        reason = result.get("eos_reason")
        said = result["held"] if reason == "stop_token" else result  # it is held back, with whatever else is
        if "token_ids" in said:
            tokens += said["token_ids"][0].tolist()
            logprobs += _logprobs(said, request.logprobs, vocabulary)
    text = vocabulary.generated(tokens, request.shown)
    match reason:
        case None:
            return Step(len(tokens), text, None, logprobs) if tokens else None
        case "max_new_tokens":  # looked at before banned strings are: one may have come whole
            return Step(len(tokens), before_banned(text, request.sampling.banned_strings), "length", logprobs)
        case "stop_token":
            return Step(len(tokens), text, "stop", logprobs[:-1])
        case _:
            return Step(len(tokens), text, "stop", logprobs)


def _logprobs(
    result: dict[str, Any], alternatives: int | None, vocabulary: ExllamaVocabulary
) -> tuple[TokenLogprob, ...]:
    """Of each token in one of the generator's results: its own, and the likeliest ones, most likely first."""
    if alternatives is None:
        return ()
    tokens, own = result["token_ids"][0].tolist(), result["token_probs"][0].tolist()
    if alternatives:
        ids, probabilities = result["top_k_tokens"][0].tolist(), result["top_k_probs"][0].tolist()
    else:
        ids = probabilities = [[]] * len(tokens)
    of = vocabulary.logprob
    return tuple(
        of(token, _log(probability), tuple(map(of, ids[at], map(_log, probabilities[at]))))
        for at, (token, probability) in enumerate(zip(tokens, own, strict=True))
    )


def _log(probability: float) -> float:
    return log(probability) if probability > 0 else LOWEST
