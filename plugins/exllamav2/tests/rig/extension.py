"""Stands in for `exllamav2_ext`: the few of its functions that the generator, its jobs and its sampler call.

They do what the C++ ones do to the same arguments, tensors that are written in place included. Whatever else is asked
for says its name and fails.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch


def count_match(a: torch.Tensor, b: torch.Tensor, most: int) -> int:
    """How many tokens two rows have in common at their beginning."""
    most = min(most, a.shape[-1], b.shape[-1])
    differ = np.nonzero(a[0, :most].numpy() != b[0, :most].numpy())[0]
    return int(differ[0]) if len(differ) else most


def partial_strings_match(text: Any, offsets: Any, strings: Any) -> int:
    """Where in the text one of the strings is; -2 if the text ends with the beginning of one; else -1."""
    said = bytes(text).decode("utf-32-le")
    bounds = np.frombuffer(bytes(offsets), dtype=np.int32)
    for start, end in pairwise(bounds):
        wanted = bytes(strings)[start:end].decode("utf-32-le")
        if (at := said.find(wanted)) >= 0:
            return at
        if any(said.endswith(wanted[:size]) for size in range(1, len(wanted))):
            return -2
    return -1


def fast_fill_cpu_ones_bool(mask: torch.Tensor) -> None:
    mask.fill_(True)


def logit_filter_exclusive(masks: torch.Tensor, allowed: list[list[int]]) -> None:
    for mask, tokens in zip(masks, allowed, strict=True):
        others = torch.ones_like(mask)
        others[list(tokens)] = False
        mask[others] = False


def fast_fadd_cpu(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(b)


def apply_rep_penalty(
    sequence: torch.Tensor, factor: float, sustain: int, decay: int, frequency: float, presence: float, logits: Any
) -> None:
    """The three penalties over the whole sequence."""
    assert (sustain, decay) == (-1, 0), "only over all of it"
    row = logits.view(-1)
    for token, count in zip(*np.unique(sequence.numpy(), return_counts=True), strict=True):
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= presence + frequency * count


def cache_rotate(pages: torch.Tensor, order: torch.Tensor, spare: torch.Tensor) -> None:
    """Each page of the order takes the content of the next one; the last, that of the first."""
    pages[order.long()] = pages[order.roll(-1).long()]


def sample_basic(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    top_a: float,
    min_p: float,
    tfs: float,
    typical: float,
    random: float,
    tokens: torch.Tensor,
    probabilities: torch.Tensor,
    top_probabilities: torch.Tensor,
    top_tokens: torch.Tensor,
    mask: torch.Tensor,
    mirostat: bool,
    surprises: list[float],
    tau: float,
    eta: float,
    post_temperature: float,
    xtc_mask: torch.Tensor,
    xtc_probability: float,
    xtc_threshold: float,
    *unused: float,
) -> list[float]:
    """Draw one token. Candidates are sorted throughout, the likeliest first."""
    if temperature < 0.01:
        temperature, top_k = 1.0, 1
    row = logits.reshape(-1).double().numpy()
    if mask.device.type != "meta":
        row = np.where(mask.reshape(-1).numpy(), row, -np.inf)
    ids = np.argsort(-row, kind="stable")
    p = np.exp((row[ids] - row[ids[0]]) / temperature)
    p /= p.sum()
    if 0 < top_k < len(p):
        ids, p = _keep(ids, p, top_k)
    if 0 < top_p < 1:
        ids, p = _keep(ids, p, int((p.cumsum() < top_p).sum()) + 1)
    if 0 < min_p < 1:
        ids, p = _keep(ids, p, int((p >= p[0] * min_p).sum()))
    if 0 < typical < 1:
        ids, p = _typical(ids, p, typical)
    if mirostat:
        surprise = surprises[0] or 2 * tau
        ids, p = _keep(ids, p, max(1, int((p >= 2.0**-surprise).sum())))
    if xtc_probability > 0:
        p = _exclude_top(p, xtc_mask.numpy()[ids], xtc_probability, xtc_threshold)
    drawn = min(int(np.searchsorted(p.cumsum(), random * 0.9998)), len(p) - 1)
    tokens[0, 0], probabilities[0, 0] = int(ids[drawn]), float(p[drawn])
    if mirostat:
        surprises = [surprise + eta * (tau + float(np.log2(p[drawn])))]
    return surprises


def _keep(ids: np.ndarray, p: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    return ids[:count], p[:count] / p[:count].sum()


def _typical(ids: np.ndarray, p: np.ndarray, typical: float) -> tuple[np.ndarray, np.ndarray]:
    surprise = -np.log(p + 1e-10)
    order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    kept = np.sort(order[: int((p[order].cumsum() < typical).sum()) + 1])
    return ids[kept], p[kept] / p[kept].sum()


def _exclude_top(p: np.ndarray, may: np.ndarray, probability: float, threshold: float) -> np.ndarray:
    top = np.nonzero((p >= threshold) & may)[0][:-1]  # all that reach it but the least likely
    if len(top):
        p = p.copy()
        p[top] *= 1 - probability
        p /= p.sum()
    return p


def module() -> ModuleType:
    """All of it under the extension's name."""
    stand_in = ModuleType("exllamav2_ext")
    functions = (count_match, partial_strings_match, fast_fill_cpu_ones_bool, logit_filter_exclusive, fast_fadd_cpu)
    for function in (*functions, apply_rep_penalty, cache_rotate, sample_basic):
        setattr(stand_in, function.__name__, function)
    stand_in.__getattr__ = _missing  # type: ignore[method-assign]
    return stand_in


def _missing(name: str) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise NotImplementedError(f"the rig has no {name}")

    if name.startswith("__"):
        raise AttributeError(name)
    return fail
