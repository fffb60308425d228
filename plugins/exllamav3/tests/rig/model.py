"""A model that reads its context back through the page table, so that a wrong page is a wrong token.

Its cache has one number a position: the token that was written there. The logits at a position are a stretch of fixed
noise, chosen by a hash of all tokens up to it as they are read out of the pages. So whatever goes wrong with pages, a
lost token or a mix of two sequences, changes what is said from then on. Nothing else does: neither the batch's shape
nor the order of steps.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from exllamav3 import Cache, Tokenizer
from exllamav3.cache.recurrent_util import advance_recurrent_states
from tokenflow_exllamav3.config import PAGE, Exl3Config
from tokenflow_exllamav3.loading import DEFAULT_DRAFT, Loaded, Part, cache_tokens, engine_info, read_vocabulary

from plugins.exllama_common.tests import tokens

TRAINED_FOR = 4096
_NOISE = np.random.default_rng(7).normal(scale=2.0, size=1 << 18).astype(np.float32)


class HashState:
    """What a recurrent model keeps of one sequence beside its pages: here, all tokens that it was shown.

    What was just guessed can be taken back (`rewind`); else it must begin anew, or at a copy that was kept.
    """

    checkpoint_size = 1

    def __init__(
        self, cache: HashCache, slot: int, position: int, clear: bool = True, stashed: dict[str, Any] | None = None
    ) -> None:
        self.slot, self.position, self.last_history = slot, position, 0
        self._cache = cache
        assert clear or stashed is not None
        cache.seen[slot] = [] if stashed is None else [*stashed["seen"]]
        assert len(cache.seen[slot]) == position

    def free(self) -> None:
        self._cache.seen[self.slot] = [-1]  # whoever goes on from it says something else
        self._cache.release_state(self)

    def rewind(self, tokens: int) -> None:
        assert 0 <= tokens <= self.last_history
        seen = self._cache.seen[self.slot]
        del seen[len(seen) - tokens :]
        self.position, self.last_history = self.position - tokens, 0

    def rollback_capacity(self) -> int:
        return 0

    def post_advance(self) -> None:
        pass

    def stash(self) -> dict[str, Any]:
        assert self.last_history == 0, "what was guessed is not settled"
        return {"seen": tuple(self._cache.seen[self.slot]), "position": self.position, "checkpoint_size": 1}


class HashCache:
    """What `Cache` is to the generator: one number a token.

    Args:
        slots: for how many sequences of a recurrent model.
        guesses: how many tokens a step may guess.
    """

    initialized = True
    recurrent_state_cls = HashState
    get_new_state = Cache.get_new_state
    new_from_stashed = Cache.new_from_stashed
    release_state = Cache.release_state
    reset_states = Cache.reset_states

    def __init__(self, tokens: int, model: HashModel, slots: int = 0, guesses: int = 0) -> None:
        self.max_num_tokens = tokens
        self.model = model
        self.num_slots, self.max_history = slots, guesses
        self.free_list = deque(range(slots))
        self.seen: list[list[int]] = [[] for _ in range(slots)]
        self.told = torch.full((tokens // PAGE, PAGE), -1, dtype=torch.int32)
        self.layers: dict[Any, Any] = {}

    def get_all_tensors(self) -> list[torch.Tensor]:
        return [self.told]

    def copy_page(self, target: HashCache, source: int, to: int, tokens: int) -> None:
        target.told[to, :tokens].copy_(self.told[source, :tokens])


class HashModel:
    """What `Model` is to the generator.

    Args:
        vocabulary: how many tokens there are.
        likely: ids of tokens that are likelier than others, so that its text can be read.
        wrong_every: as a draft model it guesses wrongly once in so many tokens; 0: never.
        recurrent: what it says depends on a state, too, and not only on its pages.
    """

    loaded_tp = False
    output_device = torch.device("cpu")

    def __init__(self, settings: Any, likely: list[int], *, wrong_every: int = 0, recurrent: bool = False) -> None:
        self.config = settings
        self.caps: dict[str, Any] = {}
        if recurrent:
            self.caps = {"recurrent_states": True, "default_recurrent_checkpoint_interval": 2 * PAGE}
        self.draft_verifier_params: dict[str, Any] = {}
        self.wrong_every = wrong_every
        self.evaluated = 0
        """Tokens of prompts, or of sequences that lost their pages."""
        self.decoded: list[int] = []
        """Rows of each decoding step."""
        self.before: Callable[[str, torch.Tensor], None] = lambda what, ids: None
        """Called at each pass, with "prefill" or "decode" and its tokens: where a test lets it fail."""
        self._likely = np.zeros(-(-settings.vocab_size // 32) * 32, dtype=np.float32)  # padded, as real heads are
        self._likely[likely] = 4.0

    def get_cache_layers(self) -> list[Any]:
        return []

    def prefetch_tokens(self, ids: list[int]) -> None:
        pass

    def unload(self) -> None:
        pass

    def prefill(self, input_ids: torch.Tensor, params: dict[str, Any]) -> None:
        self.before("prefill", input_ids)
        self.evaluated += input_ids.numel()
        for row, ids in enumerate(input_ids.numpy()):
            self._write(ids, row, params)
            self._see(ids, row, params)
        advance_recurrent_states(input_ids, params, self)

    def forward(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        self.before("decode", input_ids)
        self.decoded.append(len(input_ids))
        logits = []
        for row, ids in enumerate(input_ids.numpy()):
            context, seen = self._write(ids, row, params), self._see(ids, row, params)
            if seen is not None and not np.array_equal(context, seen):
                context = np.concatenate((context, seen, context))  # it says something else
            logits.append([self._logits(context[: len(context) - left]) for left in reversed(range(len(ids)))])
        advance_recurrent_states(input_ids, params, self)
        return torch.from_numpy(np.array(logits))

    def _see(self, ids: np.ndarray[Any, Any], row: int, params: dict[str, Any]) -> np.ndarray[Any, Any] | None:
        """Show the row's state these tokens. Returns all that it has seen, where there is one."""
        states = params.get("recurrent_states")
        if not states:
            return None
        seen = params["cache"].seen[states[row].slot]
        seen += ids.tolist()
        return np.array(seen, dtype=np.int32)

    def _write(self, ids: np.ndarray[Any, Any], row: int, params: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Put tokens into the row's pages; give back all that these say up to there."""
        told = params["cache"].told.numpy()
        begin = int(params["cache_seqlens"][row])
        end = begin + len(ids)
        pages = params["block_table"][row].numpy()[: -(-end // PAGE)]
        at = np.arange(begin, end)
        told[pages[at // PAGE], at % PAGE] = ids
        return told[pages].reshape(-1)[:end]

    def _logits(self, context: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        at = int.from_bytes(blake2b(context.tobytes(), digest_size=8).digest())
        size = len(self._likely)
        logits = _NOISE[(start := at % (len(_NOISE) - size)) : start + size] + self._likely
        if self.wrong_every and at % self.wrong_every == 0:
            return np.roll(logits, 1)
        return logits


@cache
def directory() -> Path:
    """Of the rig's model: no weights, a real tokenizer."""
    path = Path(tempfile.mkdtemp(prefix="exl3-rig-"))
    tokens.write(path)
    return path


def settings(directory: Path) -> SimpleNamespace:
    """What the library's Config is to the tokenizer and the generator."""
    values = SimpleNamespace(
        directory=str(directory),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        eos_token_id_list=[],
        infer_params=None,
        max_position_embeddings=TRAINED_FOR,
    )
    values.vocab_size = Tokenizer(values).actual_vocab_size  # which also finds the ends
    return values


def hash_load(config: Exl3Config, given_up: Callable[[], bool] = lambda: False, *, recurrent: bool = False) -> Loaded:
    """In place of `loading.load`: the same, but for what is loaded."""
    import exllamav3

    library = SimpleNamespace(Tokenizer=exllamav3.Tokenizer)
    main = part(config, recurrent=recurrent)
    draft = None if config.draft_model is None else part(config, wrong_every=3)
    vocabulary, tokenizer = read_vocabulary(library, main)
    info = engine_info(config, main, draft, vocabulary)
    return Loaded(config=config, info=info, vocabulary=vocabulary, tokenizer=tokenizer, main=main, draft=draft)


def part(config: Exl3Config, *, wrong_every: int = 0, recurrent: bool = False) -> Part:
    known = settings(directory())
    likely = [id for id in range(256, known.vocab_size) if id < 256 + 150]
    model = HashModel(known, likely, wrong_every=wrong_every, recurrent=recurrent)
    guesses = config.draft_tokens or DEFAULT_DRAFT
    cache = HashCache(cache_tokens(config, TRAINED_FOR), model, config.slots, guesses)
    return Part(directory=directory(), config=known, model=model, cache=cache)
