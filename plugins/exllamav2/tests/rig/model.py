"""A model without weights. Its next token's logits are a hash of all tokens so far, read back through the page table.

So whatever goes wrong with pages (a token lost, a page swapped, a sequence mixed up with another) changes the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenflow_exllamav2.config import PAGE, Exl2Config
from tokenflow_exllamav2.loading import Loaded, Shape, assemble

from plugins.exllama_common.tests import tokens

from .library import import_exllamav2

TRAINED = 4096
FIRST_SYLLABLE = 256
SYLLABLES = 2 * len(tokens.SYLLABLES)
CANDIDATES = 8
"""Tokens that are at all likely to come next."""


class HashCache:
    """One number a token: its id, plus one. 0 was never written."""

    batch_size = 1

    def __init__(self, size: int) -> None:
        self.max_seq_len = size
        self.current_seq_len = 0
        self.tokens = torch.zeros((1, size, 1, 1), dtype=torch.int32)
        self.flat = self.tokens.view(-1).numpy()

    def all_tensors(self) -> list[torch.Tensor]:
        return [self.tokens]

    def copy_states(self, target: HashCache, start: int, count: int, to: int, *rest: int) -> None:
        target.flat[to : to + count] = self.flat[start : start + count].copy()


class HashModel:
    """Takes the calls that the generator makes.

    Args:
        settings: as of the library's configuration.
        astray: in 256 tokens so many are others than a model of the same settings would say: a draft model's guesses.
    """

    def __init__(self, settings: Any, astray: int = 0) -> None:
        self.config = settings
        self._astray = astray
        self.decoded: list[int] = []
        """Of each decoding step, how many sequences were in it."""
        self.prefilled: list[int] = []
        """Of each piece of a prompt, how many tokens it had."""
        self.evaluated = 0
        """Tokens of prompts, or of sequences that lost their pages."""
        self.before: Callable[[str, torch.Tensor], None] = lambda what, ids: None
        """Called at each pass, with "prefill" or "decode" and its tokens: where a test lets it fail."""

    def forward_chunk(
        self,
        input_ids: torch.Tensor,
        attn_params: Any,
        cache: HashCache,
        preprocess_only: bool = False,
        loras: Any = None,
        indexed_embeddings: Any = None,
    ) -> dict[str, torch.Tensor]:
        self.before("prefill" if preprocess_only else "decode", input_ids)
        self.evaluated += input_ids.numel() * preprocess_only
        (self.prefilled if preprocess_only and len(input_ids[0]) > 1 else self.decoded).append(
            input_ids.shape[preprocess_only]
        )
        places = _places(input_ids, attn_params, cache)
        rows = [self._forward(row.numpy(), *place, cache, preprocess_only) for row, place in places]
        return {"logits": torch.from_numpy(np.stack(rows))} if not preprocess_only else {}

    def _forward(
        self, ids: np.ndarray, pages: np.ndarray, past: int, size: int, cache: HashCache, preprocess_only: bool
    ) -> np.ndarray:
        length = past + len(ids)
        where = (pages[: -(-length // size), None] * size + np.arange(size)).ravel()
        cache.flat[where[past:length]] = ids + 1
        context = cache.flat[where[:length]]
        positions = () if preprocess_only else range(past + 1, length + 1)
        return np.stack([self._logits(context[:at]) for at in positions]) if positions else context

    def _logits(self, context: np.ndarray) -> np.ndarray:
        assert (context > 0).all(), "a token that was never written"
        digest = np.frombuffer(blake2b(context.tobytes(), digest_size=2 * CANDIDATES + 2).digest(), dtype=np.uint16)
        logits = np.full(-(-self.config.vocab_size // 32) * 32, -10.0, dtype=np.float32)  # padded, as the library's
        likely = digest[:CANDIDATES].astype(int) % self.config.vocab_size
        syllables = FIRST_SYLLABLE + likely % SYLLABLES
        likely = np.where(digest[:CANDIDATES] < 1 << 13, likely, syllables)  # one in eight is any token
        if digest[CANDIDATES] % 256 < self._astray:
            likely = likely[::-1]
        logits[likely[::-1]] = 4.0 - 0.5 * np.arange(CANDIDATES)[::-1]  # of two that are the same, the likelier counts
        return logits

    def unload(self) -> None:
        self.config = None


def _places(input_ids: torch.Tensor, params: Any, cache: HashCache) -> Any:
    """Of each row: its ids; its pages, what was there before it, and the size of a page."""
    for at, row in enumerate(input_ids):
        if params.paged:
            yield row, (params.block_index[at].numpy(), int(params.cache_seqlens[at]), params.page_size)
        else:
            yield row, (np.zeros(1, dtype=int), params.past_len, cache.max_seq_len)


def write_directory(directory: Path) -> Path:
    """A model's directory, as far as it is looked at without a GPU."""
    directory.mkdir(exist_ok=True)
    tokens.write(directory)
    names = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in names}
    (directory / "config.json").write_text(
        json.dumps({"eos_token_id": ids["<|end|>"], "bos_token_id": ids["<|begin|>"]})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<|end|>"], ids["<|im_end|>"]]}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def settings_of(directory: Path, shape: Shape) -> Any:
    known = json.loads((directory / "config.json").read_text())
    size = 1 + max(t["id"] for t in json.loads((directory / "tokenizer.json").read_text())["added_tokens"])
    return SimpleNamespace(
        model_dir=str(directory),
        vocab_size=size,
        pad_token_id=None,
        no_flash_attn=False,
        max_seq_len=shape.longest,
        max_input_len=shape.chunk,
        max_batch_size=1,
        arch=SimpleNamespace(lm=SimpleNamespace(mrope=False)),
        **known,
    )


def load_rig(config: Exl2Config, given_up: Callable[[], bool], *, paged: bool = True, astray: int = 64) -> Loaded:
    """As `loading.load`, with a model that needs no GPU. Any `draft_model` is one that is often right."""
    library = import_exllamav2()
    torch.set_num_threads(1)
    shape = Shape.of(config, TRAINED)
    settings = settings_of(Path(config.model), shape)
    settings.no_flash_attn = not paged
    model, cache = HashModel(settings), HashCache(shape.cache)
    guessing = [(HashModel(settings, astray), HashCache(shape.cache))] if config.draft_model else []
    return assemble(config, shape, settings, library.ExLlamaV2Tokenizer(settings), model, cache, *guessing)


__all__ = ["PAGE", "HashCache", "HashModel", "load_rig", "write_directory"]
