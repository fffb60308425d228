"""`exllamav2`, imported on a machine that has neither its extension nor flash-attn."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from . import extension


def import_exllamav2() -> ModuleType:
    """The library, with paged mode switched on. Repeatable."""
    if "exllamav2" not in sys.modules:
        stand_ins = {"flash_attn": _flash_attn(), "flash_attn_2_cuda": ModuleType("flash_attn_2_cuda")}
        sys.modules.update(stand_ins, exllamav2_ext=extension.module())
        os.environ["EXLLAMA_NO_SDPA"] = ""  # else it imports torch's compiler, which takes seconds
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that there is no GPU
            import_module("exllamav2.generator")
        del os.environ["EXLLAMA_NO_SDPA"]
        for name in stand_ins:  # nobody else is to take it for the real one
            del sys.modules[name]
    return sys.modules["exllamav2"]


def _flash_attn() -> ModuleType:
    def flash_attn_func(q: Any, k: Any, v: Any, window_size: Any = (-1, -1), softcap: float = 0.0) -> None:
        raise NotImplementedError("the rig's model has no attention")

    stand_in: Any = ModuleType("flash_attn")
    stand_in.__version__ = "2.8.3"
    stand_in.flash_attn_func = stand_in.flash_attn_varlen_func = stand_in.flash_attn_with_kvcache = flash_attn_func
    result: ModuleType = stand_in
    return result
