"""The options of `engine = "exllamav2"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from tokenflow.api import check_context

PAGE = 256
"""Tokens in a page of the cache: the library's unit for all that it keeps, shares and forgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl2Config:
    """An EXL2, GPTQ or FP16 model on this machine's GPUs."""

    model: str
    """The directory with config.json, tokenizer.json and the *.safetensors files, relative to the working directory."""
    slots: Annotated[int, Ge(1), Le(256)] = 8
    """Sequences decoded at once; more wait for a slot. Without flash-attn there is one."""
    context_length: Annotated[int, Ge(8)] | None = None
    """Tokens of prompt and completion together, per sequence; no more than cache_tokens.
    Unset: what the model was trained for, at most 8192."""
    cache_tokens: Annotated[int, Ge(PAGE)] | None = None
    """Tokens in the cache, for all sequences and what is kept of old ones. Unset: twice context_length."""
    cache_type: Literal["FP16", "Q8", "Q6", "Q4"] = "FP16"
    """How keys and values are kept: Q8 takes half of FP16's memory, Q4 a quarter."""
    chunk_size: Annotated[int, Ge(PAGE)] = 512
    """Most prompt tokens in a step, in whole pages of 256: who leaves waits for one such step at most."""
    gpu_split: tuple[Annotated[float, Ge(0)], ...] | None = None
    """GB of weights on each GPU, in CUDA's order. Unset: as the model and its cache fit."""
    tensor_parallel: bool = False
    """All GPUs work on each layer together, instead of one after the other."""
    draft_model: str | None = None
    """The directory of a small model with the same tokenizer, which guesses tokens ahead."""
    ngram_draft: bool = False
    """Guess ahead from what the sequence has said before; not beside a draft_model."""
    draft_tokens: Annotated[int, Ge(1), Le(7)] = 4
    """How many tokens are guessed at once."""
    loras: tuple[str, ...] = ()
    """Directories of LoRA adapters, applied to every sequence."""
    rope_scale: Annotated[float, Gt(0)] | None = None
    """Linear scaling of positions: 2 doubles the context of a model tuned for it. Unset: as its config.json says."""
    rope_alpha: Annotated[float, Gt(0)] | None = None
    """NTK scaling of positions, for models that were not tuned for it. Unset: 1."""

    def __post_init__(self) -> None:
        if self.draft_model and self.ngram_draft:
            raise ValueError("draft_model and ngram_draft are two ways to guess ahead; set one of them")
        check_context(self.context_length, self.cache_tokens)

    @property
    def guesses(self) -> int:
        """Tokens guessed at once; 0: none are."""
        return self.draft_tokens if self.draft_model or self.ngram_draft else 0
