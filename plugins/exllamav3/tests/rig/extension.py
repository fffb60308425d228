"""Stands in for `exllamav3_ext`: the functions that scheduling and sampling call, on CPU tensors.

`install` puts it where the library looks for its compiled part, and takes pinned memory and waiting for a GPU out of
the two modules that ask for them. It must come before the first import of exllamav3.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor


def install() -> None:
    """Make exllamav3 importable here. Repeatable."""
    if "exllamav3.ext" in sys.modules:
        return
    os.environ["EXL3_FUSED_SAMPLER"] = "0"  # the fused kernel's steps one by one, as the library itself checks it
    module = ModuleType("exllamav3.ext")
    module.exllamav3_ext = Extension("exllamav3_ext")  # type: ignore[attr-defined]
    sys.modules["exllamav3.ext"] = module
    from exllamav3.generator import generator, job

    generator.torch = job.torch = WithoutGpu("torch")


class WithoutGpu(ModuleType):
    """torch, but for memory that a GPU could read, and for waiting for one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    class cuda:
        synchronize = staticmethod(lambda *device: None)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*args, **options)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.zeros(*args, **options)


class Extension(ModuleType):
    """What is not here says its name when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any) -> Any:
            raise NotImplementedError(f"the rig has no {name}")

        return missing

    # --- pages --------------------------------------------------------------------------------------------------------

    @staticmethod
    def count_match_tensor(one: Tensor, other: Tensor, most: int) -> int:
        """How many tokens two rows have in common at their beginning."""
        size = min(int(most), one.shape[-1], other.shape[-1])
        different = (one[0, :size] != other[0, :size]).nonzero()
        return int(different[0]) if len(different) else max(size, 0)

    @staticmethod
    def cache_rotate(cache: Tensor, rotations: Tensor, buffer: Tensor) -> None:
        """Move pages along cycles: pairs (to, from), where -1 is the buffer."""
        places = rotations.tolist()
        for to, source in zip(places[::2], places[1::2], strict=True):
            (buffer if to < 0 else cache[to]).copy_(buffer if source < 0 else cache[source])

    @staticmethod
    def generator_stage_decode(
        host: Tensor,
        width: int,
        tables: list[Tensor],
        positions: list[int],
        ropes: list[int],
        batch_ids: Tensor | None,
        ids: list[Tensor],
        pages: list[Tensor],
        offsets: list[int],
    ) -> None:
        """Write the rows' page tables and lengths into one buffer; for single tokens also the tokens themselves."""
        rows = len(tables)
        table = host[: rows * width].view(rows, width)
        table.zero_()
        for row, position in enumerate(positions):
            known = tables[row][0][:width]
            table[row, : len(known)] = known
            host[rows * width + row] = position
            if batch_ids is not None:
                token = ids[row][0, position]
                batch_ids[row, 0] = token
                pages[row][0, offsets[row]] = token

    # --- text ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def partial_strings_match(text: Any, offsets: Any, strings: Any) -> int:
        """Where the first of the strings begins; -2: the text ends with a beginning of one; -1: neither."""
        said = bytes(text).decode("utf-32-le")
        cuts = np.frombuffer(bytes(offsets), dtype=np.int32)
        needles = [bytes(strings)[a:b].decode("utf-32-le") for a, b in pairwise(cuts)]
        found = [at for needle in needles if (at := said.find(needle)) >= 0]
        if found:
            return min(found)
        begun = any(said.endswith(needle[:size]) for needle in needles for size in range(1, len(needle)))
        return -2 if begun else -1

    class BC_SAM:
        """Where the longest suffix has occurred before: a plain search for the automaton."""

        longest = 16

        def accept_tensor(self, sequence: Tensor) -> tuple[int, int]:
            ids = sequence[0].tolist()
            for size in range(min(self.longest, len(ids) - 1), 0, -1):
                suffix = ids[-size:]
                for begin in range(len(ids) - size - 1, -1, -1):
                    if ids[begin : begin + size] == suffix:
                        return begin, begin + size
            return 0, 0

    # --- sampling -----------------------------------------------------------------------------------------------------

    @staticmethod
    def gumbel_noise_f16(logits: Tensor, out: Tensor, seed: int) -> None:
        """argmax of the result is a draw from softmax(logits)."""
        out.copy_(logits.float() + _gumbel(logits, seed))

    gumbel_noise_f32 = gumbel_noise_f16

    @staticmethod
    def gumbel_noise_log(probabilities: Tensor, out: Tensor, seed: int) -> None:
        out.copy_(probabilities.log() + _gumbel(probabilities, seed))

    @staticmethod
    def apply_rep_pens(logits: Tensor, out: Tensor, past: Tensor, penalty: float, sustain: int, decay: int) -> None:
        out.copy_(logits)
        seen = past[0, -sustain:].unique()
        values = out[0, seen]
        out[0, seen] = torch.where(values > 0, values / penalty, values * penalty)

    @staticmethod
    def apply_pres_freq_pens(
        logits: Tensor, out: Tensor, past: Tensor, presence: float, frequency: float, sustain: int, decay: int
    ) -> None:
        out.copy_(logits)
        seen, counts = past[0, -sustain:].unique(return_counts=True)
        out[0, seen] -= presence + frequency * counts.float()

    @staticmethod
    def dry_penalty(
        logits: Tensor,
        out: Tensor,
        past: Tensor,
        breakers: Tensor | None,
        longest: Tensor,
        scratch: Tensor,
        multiplier: float,
        base: float,
        allowed: int,
        range_: int,
        max_exponent: int,
        cap: int,
    ) -> None:
        """Each token loses by the longest repetition that it would go on with. After llama.cpp's description of DRY."""
        out.copy_(logits)
        ids = past[0].tolist()[-range_ or None :]
        breaks = set() if breakers is None else set(breakers.nonzero().flatten().tolist())
        lengths: dict[int, int] = {}
        for at in range(1, len(ids)):  # the token at `at` came after what ends before it
            size = 0
            while size < at and ids[at - 1 - size] == ids[-1 - size] and ids[at - 1 - size] not in breaks:
                size += 1
            lengths[ids[at]] = max(lengths.get(ids[at], 0), size)
        for token, size in lengths.items():
            if size >= allowed and token not in breaks:
                exponent = min(size - allowed, max_exponent or size)
                out[0, token] -= multiplier * base**exponent


def _gumbel(like: Tensor, seed: int) -> Tensor:
    noise = np.random.Generator(np.random.Philox(key=seed)).gumbel(size=tuple(like.shape))
    return torch.from_numpy(noise).float()
