"""One sequence as the library's generator has it.

What the library leaves open is settled here, where it calls its jobs:

* An exception in a job's own part of a step (its sampler, its mask) would leave the generator in the middle of the
  batch. Here the job ends as if it had finished, with `failure` set, and the batch goes on.
* What a job says is kept in the job until it is taken, so a failure of the whole batch loses nobody's tokens.
* A page that a job has filled is not shared while another job has one of the same content that it has not filled yet.
* Draws are numbered, so that they can be taken back.
* Text that may become a banned string is held, with what it takes to go back; a requeue forgets that. So before a job
  gives its pages up, `take_back_hold` undoes what is held: the same tokens are drawn again when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from random import randrange
from typing import Any, TypeVar

import torch
from exllamav3.constants import PAGE_SIZE
from exllamav3.generator import Job as LibraryJob
from exllamav3.generator.pagetable import random_hash, tensor_hash_checksum
from tokenflow_exllama.vocabulary import BytewiseTokenizer, ExllamaVocabulary, bytewise_cases

from tokenflow.api import Matcher, SequenceRequest
from tokenflow_exllamav3.guide import Guide
from tokenflow_exllamav3.sampling import Samplers

T = TypeVar("T")


class Jobs:
    """Makes a job of each request, not yet prepared for any generator.

    Args:
        tokenizer: what the generator has.
        vocabulary: of the model.
        reserve_tokens: they ask for cache this far ahead, and again later; None: for all at once.
    """

    def __init__(self, tokenizer: BytewiseTokenizer, vocabulary: ExllamaVocabulary, reserve_tokens: int | None) -> None:
        self._samplers = Samplers(tokenizer, vocabulary.size)
        self._ends = sorted(vocabulary.ends)
        self._reserve_tokens = reserve_tokens

    def make(self, request: SequenceRequest, owner: Any, matcher: Matcher | None = None) -> Exl3Job:
        """`owner` comes back with each of its results, as the job's `identifier`."""
        sampling = request.sampling
        banned = sorted({form for text in sampling.banned_strings or () for form in bytewise_cases(text)})
        job = Exl3Job(
            input_ids=torch.tensor([request.prompt], dtype=torch.long),
            max_new_tokens=request.max_tokens,
            # Until then, what ends it is ruled out; but where a grammar ends, nothing else is left.
            min_new_tokens=request.max_tokens if request.ignore_eos and matcher is None else 0,
            filters=[] if matcher is None else [Guide(matcher, frozenset(self._ends))],
            sampler=self._samplers.make(sampling),
            stop_conditions=self._ends,
            return_top_tokens=request.logprobs or 0,
            return_probs=request.logprobs is not None,
            identifier=owner,
            banned_strings=banned,
            # When it sends a job back for more, the library looks for no banned string and forgets what it held.
            max_rq_tokens=None if banned else self._reserve_tokens,
        )
        job.rng = Draws(randrange(1 << 63) if sampling.seed is None else sampling.seed)
        job.results = []
        return job


class Draws:
    """The random numbers of one job, each a hash of the seed and its own number; as much `random.Random` as is asked.

    Args:
        seed: any integer.
    """

    def __init__(self, seed: int) -> None:
        self._seed = str(seed).encode()
        self.count = 0

    def randint(self, low: int, high: int) -> int:
        digest = blake2b(self.count.to_bytes(8), key=blake2b(self._seed).digest(), digest_size=8).digest()
        self.count += 1
        return low + int.from_bytes(digest) % (high - low + 1)

    def getstate(self) -> int:
        return self.count

    def setstate(self, state: int) -> None:
        self.count = state


class Exl3Job(LibraryJob):  # type: ignore[misc]  # the library has no types that mypy could read
    """A job that fails alone and can be taken back to before what it holds.

    A requeue runs `__init__` again, so what is to outlive it is set by the class or by who made the job.
    """

    failure: Exception | None = None
    evaluated = 0
    """Prompt tokens that were run through the model, and not yet counted by whoever counts them."""
    results: list[dict[str, Any]]
    """What it has said and nobody has taken yet, as the library tells it."""
    _begun = False

    @property
    def sequence(self) -> Any:
        return self.sequences[0]

    @property
    def pages(self) -> list[Any]:
        return self.sequence.allocated_pages or []

    # --- its own part of a step, which may fail ---------------------------------------------------------------------

    def prepare_logit_mask(self) -> None:
        self._alone(super().prepare_logit_mask)

    def prepare_sampling_past_ids(self) -> None:
        self._alone(super().prepare_sampling_past_ids)

    def receive_logits(self, logits: torch.Tensor) -> tuple[Any, ...]:
        drawn = self._alone(lambda: super(Exl3Job, self).receive_logits(logits))
        return drawn or (torch.zeros((1, 1), dtype=torch.long), None, None, None)

    def receive_sample(self, logits: Any, next_token: Any, *sample: Any) -> tuple[bool, Any, bool]:
        sample = (*sample[:3], self.results, *sample[4:])
        self.evaluated += not self._begun  # a prompt's last token has no part in its prefill
        self._begun = True
        taken = self._alone(lambda: super(Exl3Job, self).receive_sample(logits, next_token, *sample))
        return taken or (True, next_token, False)  # "it has ended": its pages go back with those of all who end

    def _alone(self, act: Callable[[], T]) -> T | None:
        if self.failure is None:
            try:
                return act()
            except Exception as exc:
                self.failure = exc
        return None

    # --- accounting -------------------------------------------------------------------------------------------------

    def prefill(self, results: list[dict[str, Any]], chunk_size: int | None = None) -> None:
        before = self._position - self._from_cache
        super().prefill(results, chunk_size)
        self.evaluated += self._position - self._from_cache - before

    @property
    def _position(self) -> int:
        return int(self.sequence.kv_position)

    @property
    def _from_cache(self) -> int:
        return int(self.cached_pages * PAGE_SIZE + self.cached_tokens)

    @property
    def shared(self) -> int:
        """Prompt tokens that it need not evaluate itself: pages that are there, or that another job is just filling.

        Of a recurrent model they are of no use beyond its last state that was kept.
        """
        if self.generator.recurrent_cache is not None:
            return self._from_cache
        count = 0
        for page in self.pages[: len(self.sequence.page_hashes)]:
            if page.kv_position < PAGE_SIZE and page.ref_count < 2:
                break
            count += PAGE_SIZE
        return count

    # --- pages ------------------------------------------------------------------------------------------------------

    def hash_completed_page(self, seq: Any, page_idx: int) -> None:
        """The library shares another job's page of the same content in its place, if there is one, and asserts that
        it is full; but that one's prompt may not be through yet. Then the other page is not to be found.
        """
        before = seq.allocated_pages[page_idx - 1].phash if page_idx else None
        ids = seq.sequence_ids.torch_slice(page_idx * PAGE_SIZE, (page_idx + 1) * PAGE_SIZE)
        other = self.pagetable.referenced_pages.get(tensor_hash_checksum(ids, before))
        if other is not None and other.kv_position < PAGE_SIZE:
            del self.pagetable.referenced_pages[other.phash]
            other.phash = random_hash()
            self.pagetable.referenced_pages[other.phash] = other
        super().hash_completed_page(seq, page_idx)

    # --- giving pages up --------------------------------------------------------------------------------------------

    def requeue(self) -> None:
        """Become a job whose prompt is all that it has said so far. Its pages must have been given back."""
        ruled_out = self.take_back_hold()
        self.prepare_for_requeue()
        if ruled_out:
            self.checkpoint = self._checkpoint(ruled_out)

    def take_back_hold(self) -> list[int]:
        """Undo the tokens that are held since a banned string may have begun.

        Returns:
            Tokens that cannot come next, since a banned string began with them.
        """
        hold = self.checkpoint
        if hold is None:
            return []
        ruled_out = list(hold["explored_tokens"])
        taken_back = hold["offset"]
        if taken_back:
            ruled_out.pop()  # the first one held: nothing is decided about it
            sequence = self.sequence
            sequence.sequence_ids.truncate(len(sequence.sequence_ids) - taken_back)
            self.new_tokens -= taken_back
            self.rng.count -= taken_back
            for name in ("held_text", "held_tokens", "held_probs", "held_k_tokens", "held_k_probs", "held_logits"):
                setattr(self, name, hold[name])
        self.checkpoint = None
        return ruled_out

    def _checkpoint(self, ruled_out: list[int]) -> dict[str, Any]:
        """As the library leaves it after going back: nothing held, some tokens ruled out."""
        held = ("held_tokens", "held_probs", "held_k_tokens", "held_k_probs", "held_logits")
        empty = {name: getattr(self, name).slice(0, 0) for name in held}
        return {"offset": 0, "held_text": "", "explored_tokens": ruled_out, "deferred_pages": [], **empty}
