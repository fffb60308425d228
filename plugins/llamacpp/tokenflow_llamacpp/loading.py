"""From a configuration to a model in memory, or to one line that says why not."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenflow.api import EngineInfo, StartupError, warn_beyond_training, warn_of_small_cache
from tokenflow_llamacpp import sampling
from tokenflow_llamacpp.compat import devices, get, has_gpu, last_error, load_library, load_model
from tokenflow_llamacpp.config import LlamaConfig, model_path
from tokenflow_llamacpp.vocabulary import LlamaVocabulary

MAX_LOGPROBS = 20
DEFAULT_CONTEXT = 4096

logger = logging.getLogger("tokenflow.llamacpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to decode, and what is known about it."""

    library: Any
    model: Any
    context: Any
    batch: Any
    batch_tokens: int
    vocabulary: LlamaVocabulary
    info: EngineInfo
    capacity: int
    """Tokens in the KV cache."""
    can_cut: bool
    """The memory can be cut at a position. Recurrent and hybrid models keep a state that cannot."""
    keep_prefixes: bool


def load(config: LlamaConfig) -> Loaded:
    """Load and warm up. In the thread that will decode.

    Raises:
        StartupError: with the path and the way out.
    """
    path, way_out = model_path(config.model)
    try:
        library = load_library()
    except ImportError as exc:
        raise StartupError(f"llama.cpp cannot be loaded ({exc}); install `cyllama` anew.") from exc
    _say_on_what(config, library)
    last_error()  # forget what others left
    try:
        model = load_model(library, path, config.gpu_layers)
    except Exception as exc:
        reason = last_error() or str(exc)
        raise StartupError(f"{path}: llama.cpp cannot load this model file ({_one_line(reason)}); {way_out}.") from exc
    architecture = _metadata(model, "general.architecture")
    if get(model, "has_encoder") or "bert" in architecture:
        raise StartupError(f"{path}: a model of the kind {architecture!r} does not generate text token by token.")
    try:
        return _with_context(config, path, library, model)
    except Exception as exc:
        reason = last_error() or str(exc)
        raise StartupError(
            f"{path}: no context for {config.slots} slots ({_one_line(reason)}); "
            "set a lower `slots`, `context_length` or `cache_tokens`."
        ) from exc


def _say_on_what(config: LlamaConfig, library: Any) -> None:
    logger.info("llama.cpp computes on %s", ", ".join(devices(library)) or "what it finds")
    if config.gpu_layers not in (None, 0) and not has_gpu(library):
        logger.warning(
            "gpu_layers = %d, and llama.cpp knows no GPU here: if there is one, install the build for it in cyllama's "
            "place, such as cyllama-cuda12 or cyllama-vulkan.",
            config.gpu_layers,
        )


def _with_context(config: LlamaConfig, path: Path, library: Any, model: Any) -> Loaded:
    trained = int(get(model, "n_ctx_train"))
    usual = min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    length = config.context_length or usual
    warn_beyond_training(logger, path, config.context_length, trained)
    capacity = config.cache_tokens or config.slots * length
    warn_of_small_cache(logger, path, config.context_length, usual, capacity)
    context = library.LlamaContext(model, _context_params(config, library, capacity), verbose=False)
    context.install_cancel_callback()
    batch_tokens = min(max(config.batch, config.slots), int(get(context, "n_batch")))
    batch = library.LlamaBatch(n_tokens=batch_tokens, embd=0, n_seq_max=1, verbose=False)
    _warm_up(context, batch)
    vocabulary = LlamaVocabulary(model)
    can_cut = not (get(model, "is_recurrent") or get(model, "is_hybrid"))
    keep = config.prefix_cache and can_cut
    template = model.get_default_chat_template() or None
    extras = {"logprobs", "ignore_eos"} | ({"prefix_cache"} if keep else set())
    info = EngineInfo(
        model=f"{path.name} ({get(model, 'desc')})",
        context_length=min(length, capacity),
        slots=config.slots,
        vocab_size=vocabulary.size,
        capabilities=sampling.CAN | extras,
        max_logprobs=MAX_LOGPROBS,
        chat_template=template,
        chat_templates={"tool_use": named} if (named := _metadata(model, "tokenizer.chat_template.tool_use")) else {},
        bos_token=vocabulary.bos,
        add_bos=vocabulary.adds_bos,
        eos_token=vocabulary.eos,
        special_tokens=vocabulary.specials,
    )
    return Loaded(
        library=library,
        model=model,
        context=context,
        batch=batch,
        batch_tokens=batch_tokens,
        vocabulary=vocabulary,
        info=info,
        capacity=capacity,
        can_cut=can_cut,
        keep_prefixes=keep,
    )


def _context_params(config: LlamaConfig, library: Any, capacity: int) -> Any:
    params = library.LlamaContextParams()
    params.n_ctx = capacity
    params.n_batch = params.n_ubatch = max(config.batch, config.slots)
    params.n_seq_max = config.slots
    params.n_threads = params.n_threads_batch = config.threads or physical_cores()
    params.kv_unified = True  # one cache for all: a long sequence may take what short ones leave, prefixes are shared
    params.swa_full = True  # else sliding-window models forget what a prefix would need
    params.no_perf = True
    if config.flash_attention is not None:
        params.flash_attn_type = int(config.flash_attention)
    return params


def _warm_up(context: Any, batch: Any) -> None:
    """One token, so that the weights are paged in before the first request waits for it."""
    batch.add(0, 0, [0], True)
    context.decode(batch)
    batch.reset()
    context.kv_cache_clear()


def _metadata(model: Any, key: str) -> str:
    try:
        return str(model.meta_val_str(key))
    except ValueError:
        return ""


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def physical_cores() -> int:
    """Cores that this process may use, each once: a second thread on the same core slows matrix products down."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in cpus:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)
