"""From a configuration to a model in GPU memory, or to one line that says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenflow_exllama.gpus import GB, check_memory, free_bytes, give_back, import_on_gpu
from tokenflow_exllama.models import (
    chat_templates,
    check_same_tokens,
    lora_directory,
    missing_directories,
    model_directory,
    one_line,
    read_json,
    weights_bytes,
)
from tokenflow_exllama.progress import GivenUp, Progress
from tokenflow_exllama.vocabulary import BytewiseTokenizer, ExllamaVocabulary

from tokenflow.api import (
    EngineInfo,
    Send,
    Sequence,
    SequenceRequest,
    StartupError,
    warn_beyond_training,
    warn_of_small_cache,
)
from tokenflow_exllamav2.config import PAGE, Exl2Config

logger = logging.getLogger("tokenflow.exllamav2")

VERSION = "0.3.2"
DEFAULT_CONTEXT = 8192
CACHE_BITS = {"FP16": 16.0, "Q8": 8.5, "Q6": 6.5, "Q4": 4.5}
"""Of one number in the cache, with its share of the scales."""
ROWS = 8
"""Tokens of one sequence that the generator can evaluate at once: one, and those that were guessed after it."""
_NOT_READ = {
    "exl3": 'use `engine = "exllamav3"`',
    **dict.fromkeys(("awq", "bitsandbytes", "fp8", "hqq"), "exllamav2 reads EXL2, GPTQ and FP16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to decode, and what is known about it."""

    info: EngineInfo
    vocabulary: ExllamaVocabulary
    samplers: Any
    batch: Any
    unload: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """Bytes of the GPUs, before anything is loaded."""

    weights: int
    cache: int
    cache_tokens: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tokens, as the library wants to know them."""

    context: int
    """Of prompt and completion, as is promised."""
    longest: int
    """Positions that the model is set up for."""
    cache: int
    chunk: int

    @classmethod
    def of(cls, config: Exl2Config, trained: int) -> Shape:
        """Args: trained: tokens that the model was trained for."""
        context = config.context_length or min(trained, DEFAULT_CONTEXT)
        cache = _pages(config.cache_tokens or 2 * context)
        context = min(context, cache - config.guesses)
        chunk = max(min(config.chunk_size // PAGE * PAGE, cache), _pages(ROWS * config.slots))
        longest = max(_pages(context + config.guesses), chunk)
        # While the library loads, it tries a chunk on the cache, and writes behind its end if there is no room for it.
        return cls(context=context, longest=longest, cache=max(cache, chunk), chunk=chunk)


def _pages(tokens: int) -> int:
    """Rounded up to whole pages."""
    return -(-tokens // PAGE) * PAGE


def load(config: Exl2Config, given_up: Callable[[], bool]) -> Loaded:
    """Load and warm up. In the thread that will decode.

    Args:
        given_up: asked before each layer.

    Raises:
        StartupError: with the path, what is wrong with it, and the way out.
        GivenUp: `given_up()`.
    """
    directories = [_directory(path) for path in (config.model, config.draft_model) if path is not None]
    for path in config.loras:
        lora_directory(path)  # now, and not after the minutes that a model takes
    check_same_tokens(*directories)
    library = import_on_gpu("exllamav2", VERSION)
    settings = [_settings(library, directory) for directory in directories]
    _stretch(settings[0], config)
    trained = int(settings[0].max_seq_len * (config.rope_scale or 1))
    shape = Shape.of(config, trained)
    if config.rope_alpha is None:  # that stretches it too, nobody knows how far
        warn_beyond_training(logger, directories[0], config.context_length, trained)
    warn_of_small_cache(logger, directories[0], config.context_length, min(trained, DEFAULT_CONTEXT), shape.context)
    for each in settings:
        _fit(each, shape)
        each.no_flash_attn = each.no_flash_attn or _is_before_ampere(config.gpu_split)
    memory = _Memory(
        weights=sum(map(weights_bytes, directories)),
        cache=sum(_cache_bytes(config, shape, each) for each in settings),
        cache_tokens=shape.cache,
        free=free_bytes(),
    )
    check_memory(str(directories[0]), **vars(memory))
    models: list[Any] = []
    try:
        for each in reversed(settings):  # the larger one gets what is left
            models.insert(0, library.ExLlamaV2(each))
        how = [config, replace(config, tensor_parallel=False)][: len(models)]  # a small one gains nothing by it
        caches = [_read(library, shape, *each, given_up) for each in reversed([*zip(how, models, strict=True)])]
        guessing = list(zip(models[1:], caches[:-1], strict=True))
        tokenizer = library.ExLlamaV2Tokenizer(settings[0])
        return assemble(config, shape, settings[0], tokenizer, models[0], caches[-1], *guessing)
    except BaseException as exc:
        for model in models:
            model.unload()
        if isinstance(exc, Exception) and not isinstance(exc, StartupError | GivenUp):
            raise StartupError(f"{directories[0]}: {_why(exc, memory)}.") from exc
        raise


def assemble(
    config: Exl2Config,
    shape: Shape,
    settings: Any,
    tokenizer: Any,
    model: Any,
    cache: Any,
    draft: tuple[Any, Any] = (None, None),
) -> Loaded:
    """Put a generator on a model that is in memory, and warm it up.

    Args:
        settings: the library's, of this model's directory.
        tokenizer: the library's.
        draft: the model that guesses ahead, and its cache.
    """
    from exllamav2 import attn

    from tokenflow_exllamav2.batch import Batch
    from tokenflow_exllamav2.sampling import Samplers

    directory = Path(settings.model_dir)
    vocabulary = ExllamaVocabulary(tokenizer, tokenizer.tokenizer_model.hf_tokenizer, ends(directory, tokenizer))
    bytewise = BytewiseTokenizer(tokenizer, vocabulary)
    paged = attn.has_flash_attn_with_paged and not settings.no_flash_attn
    if not paged and config.slots > 1:
        logger.warning("No flash-attn 2.5.7 or newer for this model and GPU: one slot instead of %d.", config.slots)
    batch = Batch(
        model=model,
        cache=cache,
        tokenizer=bytewise,
        max_batch_size=config.slots if paged else 1,
        max_chunk_size=shape.chunk,
        max_q_size=ROWS,
        draft_model=draft[0],
        draft_cache=draft[1],
        num_draft_tokens=config.draft_tokens,
        use_ngram_draft=config.ngram_draft,
        paged=paged,
    )
    batch.set_loras(_loras(config, model))
    info = _info(config, shape, directory, vocabulary, batch.max_batch_size)
    samplers = Samplers(bytewise, vocabulary.size, batch.padded_vocab_size)
    _warm_up(batch, vocabulary, samplers, config.guesses)

    models = [each for each in (model, draft[0]) if each is not None]  # their caches are the batch's

    def unload() -> None:
        """Give the GPUs' memory back, to the driver: the next one to load asks it what is free."""
        for each in models:
            each.unload()
        give_back()

    return Loaded(info=info, vocabulary=vocabulary, samplers=samplers, batch=batch, unload=unload)


def ends(directory: Path, tokenizer: Any) -> set[int]:
    """Tokens that end a sequence, wherever the model's files name them."""
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (path := directory / name).is_file():
            value = read_json(path).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value}
    return {token for token in found if token is not None}


def _info(config: Exl2Config, shape: Shape, directory: Path, vocabulary: ExllamaVocabulary, slots: int) -> EngineInfo:
    from tokenflow_exllamav2.sampling import CAPABILITIES, MAX_LOGPROBS

    templates = chat_templates(directory)
    extras = {"logprobs", "ignore_eos", "prefix_cache"}
    # What was guessed goes on behind a banned string that was taken back: the library mixes the two up.
    without = {"banned_strings"} if config.guesses else set()
    return EngineInfo(
        model=directory.name,
        context_length=shape.context,
        slots=slots,
        vocab_size=vocabulary.size,
        capabilities=(CAPABILITIES | extras) - without,
        max_logprobs=MAX_LOGPROBS,
        chat_template=templates.get("default"),
        chat_templates=templates,
        bos_token=vocabulary.bos,
        add_bos=vocabulary.adds_bos,
        eos_token=vocabulary.eos,
        special_tokens=vocabulary.specials,
    )


def _warm_up(batch: Any, vocabulary: ExllamaVocabulary, samplers: Any, guesses: int) -> None:
    """A few tokens, so that kernels are compiled and tuned before the first request waits for it."""
    from tokenflow_exllamav2.job import Exl2Job

    request = SequenceRequest(prompt=(0,) * 8, max_tokens=8, ignore_eos=True)
    seq = Sequence(request, Send(lambda event: None, window=1))
    job = Exl2Job(seq, vocabulary, samplers.make(request.sampling), guesses)
    batch.prepare(job)
    batch.start(job)
    while job.ended is None and job.failure is None:
        batch.step([job])
    batch.drop(job)
    batch.reset_page_table()
    if job.failure is not None:
        raise job.failure


# --- the library's own settings, model and cache ----------------------------------------------------------------------


def missing(config: Exl2Config) -> Iterator[tuple[str, str]]:
    """What is wrong with the directories of models and adapters, by the key."""
    yield from missing_directories({"model": config.model, "draft_model": config.draft_model}, _directory)
    for path in config.loras:
        yield from missing_directories({"loras": path}, lora_directory)


def _directory(path: str) -> Path:
    return model_directory(path, kind="EXL2, GPTQ or FP16 model", not_read=_NOT_READ)


def _settings(library: Any, directory: Path) -> Any:
    try:
        settings = library.ExLlamaV2Config(str(directory))
        settings.arch_compat_overrides(quiet=True)
    except Exception as exc:
        raise StartupError(f"{directory}: exllamav2 cannot serve this model ({one_line(exc)}).") from exc
    return settings


def _stretch(settings: Any, config: Exl2Config) -> None:
    if config.rope_scale is not None:
        settings.scale_pos_emb = config.rope_scale
    if config.rope_alpha is not None:
        settings.scale_alpha_value = config.rope_alpha


def _fit(settings: Any, shape: Shape) -> None:
    settings.max_seq_len = shape.longest
    settings.max_input_len = shape.chunk
    settings.max_attention_size = shape.chunk**2


def _is_before_ampere(split: tuple[float, ...] | None) -> bool:
    """One of the GPUs in use is too old for flash-attn; the library is content with one that is not."""
    import torch

    used = [gpu for gpu in range(torch.cuda.device_count()) if split is None or any(split[gpu : gpu + 1])]
    return any(torch.cuda.get_device_capability(gpu)[0] < 8 for gpu in used)


def _cache_bytes(config: Exl2Config, shape: Shape, settings: Any) -> int:
    numbers = 2 * settings.num_hidden_layers * settings.num_key_value_heads * settings.head_dim
    return int(shape.cache * numbers * CACHE_BITS[config.cache_type] / 8)


def _read(library: Any, shape: Shape, config: Exl2Config, model: Any, given_up: Callable[[], bool]) -> Any:
    """Read the model into memory. Returns its cache."""
    kind = getattr(library, "ExLlamaV2Cache" + ("" if config.cache_type == "FP16" else f"_{config.cache_type}"))
    progress = Progress(logger, Path(model.config.model_dir).name, given_up)
    split = None if config.gpu_split is None else list(config.gpu_split)
    if config.tensor_parallel:
        model.load_tp(split, callback=progress, expect_cache_tokens=shape.cache, expect_cache_base=kind)
        return library.ExLlamaV2Cache_TP(model, base=kind, max_seq_len=shape.cache)
    if split is not None:
        model.load(split, callback=progress)
        return kind(model, max_seq_len=shape.cache)
    cache = kind(model, max_seq_len=shape.cache, lazy=True)
    model.load_autosplit(cache, callback=progress)
    return cache


def _loras(config: Exl2Config, model: Any) -> list[Any]:
    loras = []
    for path in config.loras:
        from exllamav2 import ExLlamaV2Lora

        try:
            loras.append(ExLlamaV2Lora.from_directory(model, str(Path(path).expanduser())))
        except Exception as exc:
            raise StartupError(f"{path}: exllamav2 cannot apply this LoRA ({one_line(exc)}).") from exc
    return loras


def _why(exc: Exception, memory: _Memory) -> str:
    if "out of memory" in str(exc).lower() or "insufficient" in str(exc).lower():
        return (
            f"the GPU memory ran out: {memory.weights / GB:.1f} GB of weights, {memory.cache / GB:.1f} for a cache of "
            f"{memory.cache_tokens} tokens and some to work with, but {memory.free / GB:.1f} GB were free; lower "
            "`cache_tokens`, set `cache_type` to Q8 or Q4, or choose a smaller model"
        )
    return f"exllamav2 cannot load this model ({one_line(exc)})"
