"""The options of `engine = "exllamav3"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from tokenflow.api import check_context

PAGE = 256
"""Tokens in a page of the cache: the library's unit for all that it keeps, shares and forgets."""

Bits = Annotated[int, Ge(2), Le(8)]
Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl3Config:
    """An EXL3 model on this machine's GPUs."""

    model: str
    """The directory with config.json, tokenizer.json and the *.safetensors files, relative to the working directory."""
    slots: Annotated[int, Ge(1), Le(256)] = 8
    """Sequences decoded at once; more wait for a slot."""
    context_length: Annotated[int, Ge(8)] | None = None
    """Tokens of prompt and completion together, per sequence; no more than cache_tokens.
    Unset: what the model was trained for, at most 8192."""
    cache_tokens: Annotated[int, Ge(PAGE)] | None = None
    """Tokens in the cache, for all sequences and what is kept of old ones. Unset: twice context_length."""
    cache_k_bits: Bits | None = None
    """Keys in the cache are kept in this many bits. Unset: FP16."""
    cache_v_bits: Bits | None = None
    """Values likewise. Unset: as the keys."""
    reserve_tokens: Annotated[int, Ge(PAGE)] | None = None
    """How far ahead of its text a sequence holds cache; then it asks for more, and waits if there is none.
    Unset: for all that it may generate, so that one which has begun never waits."""
    chunk_size: Annotated[int, Ge(PAGE)] = 2048
    """Most prompt tokens in a step while nobody decodes, in whole pages of 256: who leaves waits for one at most."""
    shared_chunk_size: Annotated[int, Ge(PAGE)] | None = None
    """The same while others decode. Unset: half of chunk_size."""
    prefill_every: Count = 5
    """While others decode, prompts get their chunk in every so many steps: 1 is fastest for the newcomer."""
    gpu_split: tuple[Annotated[float, Ge(0)], ...] | None = None
    """GB to use on each GPU, in CUDA's order; 0 leaves one out. Unset: as the model fits."""
    tensor_parallel: bool = False
    """All GPUs work on each layer together, instead of one after the other."""
    draft_model: str | None = None
    """The directory of a small model that guesses tokens ahead; the model's own directory: its built-in head (MTP)."""
    draft_tokens: Count | None = None
    """How many tokens are guessed at once. Unset: what the draft model is made for, else 4."""
    ngram_match: Annotated[int, Ge(0)] = 0
    """Guess from what the sequence has said before, where its last so many tokens have occurred; 0: never."""
    rope_scaling: Literal["linear", "yarn"] | None = None
    """Stretch the model's context by rope_factor. Unset: as its config.json says."""
    rope_factor: Annotated[float, Gt(1)] = 2.0
    """How much longer the context becomes with rope_scaling."""
    warm_up: bool = True
    """Compile and tune kernels before the first request, not in it."""

    def __post_init__(self) -> None:
        if self.draft_model and self.ngram_match:
            raise ValueError("draft_model and ngram_match are two ways to guess ahead; set one of them")
        check_context(self.context_length, self.cache_tokens)
