"""What of cyllama depends on its release, and what of llama.cpp belongs to the whole process.

cyllama 0.2.18 is the last release for Python 3.11; 0.7 needs 3.12. Nothing here asks for a version: it asks the classes
what they have.
"""

from __future__ import annotations

import atexit
import os
import re
from collections import deque
from pathlib import Path
from threading import get_ident
from typing import Any

from tokenflow.api import BYTE_TOKEN, GPT2_BYTES

# llama.cpp has one log for the process, so there is one place it is kept: the last error lines, each with the thread
# that was in llama.cpp, so that two engines that load at once don't read each other's.
_ERROR_LEVEL = 4
_log: deque[tuple[int, str]] = deque(maxlen=64)


_LOG_PREFIX = re.compile(r"^(\w+: )+(error loading model: )?")


def _keep(level: int, text: str) -> None:
    if level == _ERROR_LEVEL:
        _log.append((get_ident(), text.strip()))


def load_library() -> Any:
    """Import cyllama's llama.cpp, silent, with its backends registered. Repeatable."""
    _bound_spinning()
    import cyllama.llama.llama_cpp as library  # type: ignore[import-untyped]  # it has no types

    # A callback that is set once and never changed: llama.cpp keeps function and argument in two variables, and another
    # engine's thread may be just between reading the one and the other.
    if getattr(library, "_active_log_callback", None) is not _keep:
        library.set_log_callback(_keep)
        atexit.register(library.disable_logging)  # static destructors log, when there is no interpreter any more
        library.ggml_backend_load_all()
        library.llama_backend_init()
    return library


def _bound_spinning() -> None:
    """How OpenMP's threads wait for each other, some hundred times a step; it is read when the library is loaded.

    Measured on two cores, a step of one sequence: without spinning (`passive`) 15 ms, with OpenMP's own unbounded 7 ms,
    but over 100 where another process has a core; 1000 turns, some microseconds, give 7 ms, and 80 beside others.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="1000")


def last_error() -> str:
    """Why llama.cpp failed in this thread, as it logged it, or nothing; forgets what it knows."""
    here = get_ident()
    lines = [line for thread, line in _log if thread == here and line.strip(".")]
    _log.clear()
    # The first line has the cause; those after it say what could not be done for it.
    return _LOG_PREFIX.sub("", lines[0]) if lines else ""


def model_class(library: Any) -> Any:
    """`LlamaModel`, with the `n_vocab` that `LlamaContext.get_logits_ith` of 0.2 looks for on it in vain."""
    base = library.LlamaModel
    if hasattr(base, "n_vocab"):
        return base

    class Model(base):  # type: ignore[misc, valid-type]  # cyllama is untyped
        n_vocab = 0

    return Model


def devices(library: Any) -> list[str]:
    """What this build of llama.cpp computes on, here: `CUDA0 (NVIDIA …)`, `CPU (AMD …)`."""
    return [f"{device['name']} ({device['description']})" for device in get(library, "ggml_backend_dev_info") or ()]


def has_gpu(library: Any) -> bool:
    """Whether layers can be put on one."""
    return bool(get(library, "llama_supports_gpu_offload"))


def load_model(library: Any, path: Path, gpu_layers: int | None) -> Any:
    params = library.LlamaModelParams()
    if gpu_layers is not None:
        params.n_gpu_layers = gpu_layers
    model = model_class(library)(str(path), params, verbose=False)
    if type(model) is not library.LlamaModel:
        model.n_vocab = model.get_vocab().n_vocab
    return model


def add_penalties(chain: Any, vocab_size: int, window: int, penalties: tuple[float, float, float]) -> None:
    """Repetition, frequency, presence. 0.7 asks for the vocabulary's size in front."""
    try:
        chain.add_penalties(window, *penalties)
    except TypeError:
        chain.add_penalties(vocab_size, window, *penalties)


def get(owner: Any, name: str) -> Any:
    """A value that is a property in one release and a method in another."""
    value = getattr(owner, name, None)
    return value() if callable(value) else value


def token_bytes(vocab: Any, token: int) -> bytes:
    """A token's exact bytes, control tokens included.

    0.2's `token_to_piece` is a str, in which the bytes of half a character are lost; the vocabulary's own spelling of
    the token has them, in one of two alphabets.
    """
    if hasattr(vocab, "token_to_bytes"):
        return bytes(vocab.token_to_bytes(token, 0, True))
    piece: str = vocab.token_to_piece(token, 0, True)
    if "\ufffd" not in piece:
        return piece.encode()
    spelling: str = vocab.get_text(token)
    if match := BYTE_TOKEN.fullmatch(spelling):
        return bytes([int(match[1], 16)])
    raw = bytes(GPT2_BYTES.get(char, 0) for char in spelling)
    return raw if raw.decode(errors="replace") == piece else piece.encode()
