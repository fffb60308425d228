"""The GPUs, as PyTorch sees them, or one line that says why it sees none."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType

from tokenflow.api import EngineLost, StartupError
from tokenflow_exllama.models import one_line

logger = logging.getLogger("tokenflow.exllama")

GB = 1 << 30


def import_on_gpu(library: str, version: str) -> ModuleType:
    """The library, on a machine where it can do something. At its first import it may compile for minutes.

    Another version than `version` is warned of: the plugins reach into the libraries' schedulers.

    Raises:
        StartupError: there is no GPU that PyTorch can use, or no library.
        EngineLost: a GPU does nothing any more for this process.
    """
    if find_spec("torch") is None:
        raise StartupError("PyTorch is not installed; install the build of it that fits this machine's CUDA.")
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise StartupError(
            f"PyTorch {torch.__version__} is built without CUDA; install the build that fits this machine's CUDA."
        )
    if not torch.cuda.is_available():
        raise (EngineLost if torch.cuda.is_initialized() else StartupError)(
            "PyTorch sees no GPU; see what `nvidia-smi` says, and whether CUDA_VISIBLE_DEVICES hides them."
        )
    if (why := _failure()) is not None:
        raise EngineLost(
            f"PyTorch cannot use a GPU ({why}); if it has failed since this process began, no engine in here can use "
            "it again: start the server anew."
        )
    if find_spec(library) is None:
        raise StartupError(f"{library} is not installed; `pip install {library}=={version}` beside PyTorch.")
    try:
        found = metadata.version(library).partition("+")[0]  # what follows says which CUDA it was built for
        if found != version:
            logger.warning("%s %s is installed; this was written for %s and tested with it", library, found, version)
        return import_module(library)
    except Exception as exc:
        raise StartupError(f"{library} does not load ({one_line(exc)}); install it anew, beside its PyTorch.") from exc


def give_back() -> None:
    """What nobody has any more goes back to the driver: PyTorch keeps it for itself, and it cannot be seen as free.

    Models, caches and the traceback of a failure refer to each other, so most of it is found only by a collection.
    """
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def free_bytes(split_gb: Sequence[float] | None = None) -> int:
    """What the GPUs have free, each no more than its part of the split."""
    import torch

    give_back()  # an engine of this process may have ended just now
    free = [int(torch.cuda.mem_get_info(gpu)[0]) for gpu in range(torch.cuda.device_count())]
    if split_gb is None:
        return sum(free)
    return sum(min(has, int(may * GB)) for has, may in zip(free, split_gb, strict=False))


def gpus_work() -> bool:
    """They still do what they are asked to; also if there are none."""
    import torch

    return not torch.cuda.is_available() or _failure() is None


def _failure() -> str | None:
    """Why one of the GPUs cannot be used, in CUDA's words. Each has its own: the others know nothing of it."""
    import torch

    try:
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)
    except Exception as exc:
        return one_line(
            RuntimeError(str(exc).strip().partition("\n")[0])
        )  # what follows is for whoever debugs a kernel
    return None


def check_memory(subject: str, *, weights: int, cache: int, cache_tokens: int, free: int) -> None:
    """StartupError if weights and cache alone are more than what is free. All but the tokens in bytes."""
    if weights + cache > free:
        raise StartupError(
            f"{subject}: needs {(weights + cache) / GB:.1f} GB of GPU memory ({weights / GB:.1f} for weights, "
            f"{cache / GB:.1f} for a cache of {cache_tokens} tokens) and some to work with, but {free / GB:.1f} GB are "
            "free; lower `cache_tokens`, keep the cache in fewer bits, or choose a smaller model."
        )
