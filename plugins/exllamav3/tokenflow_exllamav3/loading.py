"""From a configuration to a model in GPU memory, or to one line that says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenflow_exllama.gpus import GB, check_memory, free_bytes, give_back, import_on_gpu
from tokenflow_exllama.models import (
    FILES,
    chat_templates,
    check_same_tokens,
    missing_directories,
    model_directory,
    one_line,
    weights_bytes,
)
from tokenflow_exllama.progress import GivenUp, Progress
from tokenflow_exllama.vocabulary import BytewiseTokenizer, ExllamaVocabulary

from tokenflow.api import EngineInfo, StartupError, warn_beyond_training, warn_of_small_cache
from tokenflow_exllamav3.config import PAGE, Exl3Config

logger = logging.getLogger("tokenflow.exllamav3")

VERSION = "1.6.5"
"""The release that this is written for: it reaches into its scheduler."""
DEFAULT_CONTEXT = 8192
DEFAULT_DRAFT = 4
_CONVERT = "convert the original model to EXL3, or fetch it converted"
_NOT_READ = {"exl2": '`engine = "exllamav2"` serves it'} | dict.fromkeys(
    ("gptq", "awq", "fp8", "bitsandbytes"), _CONVERT
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A model with its cache: the one that is served, or the one that guesses ahead for it."""

    directory: Path
    config: Any
    """The library's."""
    model: Any
    cache: Any

    @property
    def weights_bytes(self) -> int:
        return weights_bytes(self.directory)

    @property
    def cache_bytes(self) -> int:
        return sum(int(layer.storage_size()) for layer in self.cache.layers.values())

    def chunk(self, config: Exl3Config) -> int:
        """Most tokens of a prompt in a step. The library tries one while it loads, so the cache has room for it."""
        return min(_pages(config.chunk_size), int(self.cache.max_num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to decode, and what is known about it."""

    config: Exl3Config
    info: EngineInfo
    vocabulary: ExllamaVocabulary
    tokenizer: BytewiseTokenizer
    main: Part
    draft: Part | None = None

    def new_batch(self) -> Any:
        """A generator over the cache, which takes it from any other."""
        from tokenflow_exllamav3.batch import Batch

        config = self.config
        chunk, shared = self.main.chunk(config), config.shared_chunk_size
        return Batch(
            model=self.main.model,
            cache=self.main.cache,
            tokenizer=self.tokenizer,
            max_batch_size=config.slots,
            max_chunk_size=chunk,
            shared_chunk_size=None if shared is None else min(_pages(shared), chunk),
            prefill_cooldown=config.prefill_every - 1,
            draft_model=self.draft and self.draft.model,
            draft_cache=self.draft and self.draft.cache,
            num_draft_tokens=config.draft_tokens,
            ngram_match_min=config.ngram_match,
        )

    def unload(self) -> None:
        unload(self.main, self.draft)


def unload(*parts: Part | None) -> None:
    """Give the GPUs' memory back, to the driver: the next one to load asks it what is free."""
    for part in parts:
        if part is not None:
            part.model.unload()
            if getattr(part.model, "mp_children", None):  # the library ends the processes of whole models only
                part.model.destroy_tp_context()
    give_back()


def load(config: Exl3Config, given_up: Callable[[], bool]) -> Loaded:
    """Load and warm up. In the thread that will decode.

    Args:
        given_up: asked before each layer, and between what warms it up.

    Raises:
        StartupError: with the path, what is wrong with it, and the way out.
        GivenUp: `given_up()`.
    """
    directory = _directory(config.model)
    draft_directory = None if config.draft_model is None else _draft_directory(config.draft_model)
    check_same_tokens(directory, draft_directory)
    library = import_on_gpu("exllamav3", VERSION)
    main, draft = plan(library, config, directory, draft_directory)
    warn_beyond_training(logger, directory, config.context_length, main.config.max_position_embeddings)
    parts = [part for part in (main, draft) if part is not None]
    weights = sum(map(weights_bytes, {part.directory.resolve() for part in parts}))  # a head's are its model's
    check_memory(
        str(directory),
        weights=0 if _leaves_some_to_the_cpu(main) else weights,
        cache=sum(part.cache_bytes for part in parts),
        cache_tokens=main.cache.max_num_tokens,
        free=free_bytes(config.gpu_split),
    )
    vocabulary, tokenizer = read_vocabulary(library, main)
    try:
        if draft is not None:  # first, for the library leaves room for what it will ask of the other
            read_weights(draft, replace(config, tensor_parallel=False), given_up)
        read_weights(main, config, given_up, draft)
        if config.warm_up:
            logger.info("%s: compiling and tuning", directory.name)
            failed = main.model.warmup(
                cache=main.cache, max_chunk_size=main.chunk(config), callback=lambda *passes: _go_on(given_up)
            )
            if failed:  # it has printed why; requests of that shape will fail too
                logger.warning("%s: not everything could be warmed up: %s", directory.name, "; ".join(failed))
    except BaseException:
        unload(main, draft)
        raise
    info = engine_info(config, main, draft, vocabulary)
    return Loaded(config=config, info=info, vocabulary=vocabulary, tokenizer=tokenizer, main=main, draft=draft)


def _leaves_some_to_the_cpu(main: Part) -> bool:
    """Experts, as EXL3_MOE_CPU_OFFLOAD or EXL3_MOE_CPU_SPLIT says; nobody knows how much of it that is."""
    return bool(main.config.infer_params.moe_cpu_offload or main.config.infer_params.moe_cpu_split)


def _go_on(given_up: Callable[[], bool]) -> None:
    if given_up():
        raise GivenUp


def missing(config: Exl3Config) -> Iterator[tuple[str, str]]:
    """What is wrong with the directories of models, by the key."""
    yield from missing_directories({"model": config.model}, _directory)
    yield from missing_directories({"draft_model": config.draft_model}, _draft_directory)


def _directory(path: str) -> Path:
    return model_directory(path, kind="EXL3 model", not_read=_NOT_READ)


def _draft_directory(path: str) -> Path:
    """What guesses from another model's hidden states (DFlash) need not have a tokenizer."""
    files = tuple(name for name in FILES if name != "tokenizer.json")
    return model_directory(path, kind="EXL3 model", not_read=_NOT_READ, files=files)


# --- the model --------------------------------------------------------------------------------------------------------


def plan(library: Any, config: Exl3Config, directory: Path, draft_directory: Path | None) -> tuple[Part, Part | None]:
    """The model and its draft model as the library sees them, with their caches; nothing is in memory yet.

    Raises:
        StartupError: the library does not know such a model.
    """
    try:
        settings = library.Config.from_directory(str(directory))
        stretch(settings, config)
        model = library.Model.from_config(settings)
        if draft_directory is None:
            draft_settings = draft_model = None
        elif draft_directory.resolve() == directory.resolve():
            draft_settings, draft_model = settings, library.Model.from_config(settings, component="mtp")
        else:
            draft_settings = library.Config.from_directory(str(draft_directory))
            draft_model = library.Model.from_config(draft_settings)
        shape = _cache_options(library, config, settings, draft_window(config, draft_model))
        main = Part(directory=directory, config=settings, model=model, cache=library.Cache(model, **shape))
        if draft_directory is None:
            return main, None
        cache = library.Cache(draft_model, **shape)
        return main, Part(directory=draft_directory, config=draft_settings, model=draft_model, cache=cache)
    except StartupError:
        raise
    except Exception as exc:
        raise StartupError(f"{directory}: exllamav3 cannot serve this model ({one_line(exc)}).") from exc


def stretch(settings: Any, config: Exl3Config) -> None:
    """Apply `rope_scaling` to the library's settings, before a model is made of them."""
    if config.rope_scaling is None:
        return
    rope = getattr(settings, "rope_settings", None)
    if rope is None:
        raise StartupError(
            f"{settings.directory}: {settings.architecture} models have no positions that `rope_scaling` could stretch."
        )
    rope.rope_scaling = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    settings.max_position_embeddings = int(settings.max_position_embeddings * config.rope_factor)


def _cache_options(library: Any, config: Exl3Config, settings: Any, window: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_num_tokens": cache_tokens(config, settings.max_position_embeddings),
        "max_batch_size": config.slots,
        "max_history": window,
    }
    if config.cache_k_bits is not None or config.cache_v_bits is not None:
        keys, values = config.cache_k_bits or config.cache_v_bits, config.cache_v_bits or config.cache_k_bits
        options |= {"layer_type": library.CacheLayer_quant, "k_bits": keys, "v_bits": values}
    return options


def _context(config: Exl3Config, longest: int) -> int:
    return config.context_length or min(longest or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def cache_tokens(config: Exl3Config, longest: int) -> int:
    """How many tokens the cache is to hold.

    Args:
        longest: what the model is made for.
    """
    return _pages(config.cache_tokens or 2 * _context(config, longest))


def _pages(tokens: int) -> int:
    """In whole pages, rounded up."""
    return -(-tokens // PAGE) * PAGE


def draft_window(config: Exl3Config, draft_model: Any) -> int:
    """The most tokens that a step may guess ahead."""
    if draft_model is None:
        return (config.draft_tokens or DEFAULT_DRAFT) if config.ngram_match else 0
    return int(config.draft_tokens or draft_model.caps.get("default_draft_size", DEFAULT_DRAFT))


def read_weights(part: Part, config: Exl3Config, given_up: Callable[[], bool], draft: Part | None = None) -> None:
    """From disk to the GPUs, layer by layer.

    Args:
        draft: what guesses for it, in memory already.

    Raises:
        StartupError: it does not fit, or cannot be read.
        GivenUp: in between.
    """
    import torch

    progress = Progress(logger, part.directory.name, given_up)
    try:
        with torch.inference_mode():
            steps = part.model.load_gen(
                use_per_device=None if config.gpu_split is None else list(config.gpu_split),
                tensor_p=config.tensor_parallel,
                max_chunk_size=part.chunk(config),
                max_batch_size=config.slots,
                draft_model=draft and draft.model,
            )
            for layers, of in steps:
                progress(layers, of)
    except (StartupError, GivenUp):
        raise
    except Exception as exc:
        needs = (part.weights_bytes + part.cache_bytes) / GB
        raise StartupError(
            f"{part.directory}: exllamav3 cannot load this model ({one_line(exc)}); its weights and a cache of "
            f"{part.cache.max_num_tokens} tokens take {needs:.1f} GB, and some to work with."
        ) from exc


def read_vocabulary(library: Any, main: Part) -> tuple[ExllamaVocabulary, BytewiseTokenizer]:
    try:
        tokenizer = library.Tokenizer.from_config(main.config)
        vocabulary = ExllamaVocabulary(tokenizer, tokenizer.tokenizer, main.config.eos_token_id_list)
    except Exception as exc:
        raise StartupError(f"{main.directory}: its tokenizer cannot be read ({one_line(exc)}).") from exc
    return vocabulary, BytewiseTokenizer(tokenizer, vocabulary)


def engine_info(config: Exl3Config, main: Part, draft: Part | None, vocabulary: ExllamaVocabulary) -> EngineInfo:
    from tokenflow_exllamav3.sampling import CAPABILITIES, MAX_LOGPROBS

    templates = chat_templates(main.directory)
    # What a sequence takes at most: its text, the token after it, and what is guessed beyond.
    room = main.cache.max_num_tokens - 1 - draft_window(config, draft and draft.model)
    context = _context(config, main.config.max_position_embeddings)
    warn_of_small_cache(logger, main.directory, config.context_length, context, room)
    return EngineInfo(
        model=main.directory.name,
        context_length=min(context, room),
        slots=config.slots,
        vocab_size=vocabulary.size,
        capabilities=CAPABILITIES | {"prefix_cache"},
        max_logprobs=MAX_LOGPROBS,
        chat_template=templates.get("default"),
        chat_templates=templates,
        bos_token=vocabulary.bos,
        add_bos=vocabulary.adds_bos,
        eos_token=vocabulary.eos,
        special_tokens=vocabulary.specials,
    )
