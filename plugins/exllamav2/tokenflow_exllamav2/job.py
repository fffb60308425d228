"""One sequence as the library's generator has it.

What the library leaves open is settled here, where it calls its jobs:

* An exception in a job's own part of a step (its prompt's chunk, its sampler) would leave the generator in the middle
  of the batch. Here the job ends as if it had finished, with `failure` set, and the batch goes on.
* What a job says is kept in the job until it is taken, so a failure of the whole batch loses nobody's tokens.
* A job can give its pages up and go on later: it becomes a job whose prompt is all that it has said so far, and keeps
  its random numbers, its sampler's state and the text that is held back.
* A page that a job has filled is not shared with a job that has one of the same name and has not filled it yet, which
  the library asserts; nor, while it says more, with anybody, if a banned string may take tokens out of it again, which
  the library forgets.
* Going back before a banned string, the library forgets to take back the token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

import torch
from exllamav2.generator import ExLlamaV2DynamicJob
from exllamav2.generator.dynamic import _randomhash, _tensor_hash_checksum
from tokenflow_exllama.vocabulary import ExllamaVocabulary, bytewise_cases

from tokenflow.api import Matcher, Sequence, TokenLogprob
from tokenflow_exllamav2.sampling import Ranking, forget_repetitions

T = TypeVar("T")

_NOTHING = (torch.zeros((1, 1), dtype=torch.long), None, None, None, None)
"""What is drawn for a job that has failed."""
_HELD = ("held_text", "held_tokens", "held_k_tokens", "held_k_probs", "held_probs", "held_logits", "full_completion")


class Exl2Job(ExLlamaV2DynamicJob):  # type: ignore[misc]  # the library has no types that mypy could read
    """The job of one sequence, not yet prepared for any generator.

    Args:
        owner: the sequence.
        settings: its sampler's.
        guesses: how many tokens the generator guesses ahead; the library ends a job so many too early.
    """

    def __init__(self, owner: Sequence, vocabulary: ExllamaVocabulary, settings: Any, guesses: int) -> None:
        request = owner.request
        seed = request.sampling.seed
        banned = {form for text in request.sampling.banned_strings or () for form in bytewise_cases(text)}
        super().__init__(
            input_ids=torch.tensor([request.prompt], dtype=torch.long),
            max_new_tokens=request.max_tokens + guesses,
            # Until then what ends is ruled out; but where a grammar ends, nothing else is left.
            min_new_tokens=request.max_tokens if request.ignore_eos and owner.matcher is None else 0,
            gen_settings=settings,
            seed=None if seed is None else seed % (1 << 64),  # of an integer's sign `random` takes no notice
            stop_conditions=sorted(vocabulary.ends),
            banned_strings=sorted(banned),
        )
        self.owner = owner
        self.shown = vocabulary.shown(request.shown)
        """Control tokens that have a text here."""
        self._vocabulary = vocabulary
        self._alternatives = request.logprobs
        self._ranking: Ranking | None = None
        self._held_logprobs: list[TokenLogprob] = []
        self._begun = False
        self.failure: Exception | None = None
        self.evaluated = 0
        """Prompt tokens that were run through the model, and not yet counted by whoever counts them."""
        self.said: list[int] = []
        """Tokens that are certain and have not been taken yet."""
        self.logprobs: list[TokenLogprob] = []
        """Of each of them, where asked for."""
        self.ended: str | None = None
        """Why it has: `stop_token` (then that token is the last one said), `end_filter` (its grammar's), or
        `max_new_tokens`."""

    @property
    def sequence(self) -> Any:
        return self.sequences[0]

    @property
    def pages(self) -> list[Any]:
        return self.sequence.allocated_pages or []

    @property
    def shared(self) -> int:
        """Prompt tokens that it need not evaluate itself: pages that are there, or that another job is just filling."""
        size, count = self.generator.page_size, 0
        for page in self.pages[: len(self.sequence.page_hashes)]:
            if page.kv_position < size and page.ref_count < 2:
                break
            count += size
        return count

    # --- its own part of a step, which may fail ---------------------------------------------------------------------

    def prefill(self, results: list[dict[str, Any]]) -> None:
        before = self._computed
        self._alone(lambda: super(Exl2Job, self).prefill(results))
        self.evaluated += self._computed - before

    @property
    def _computed(self) -> int:
        return int(self.sequence.kv_position - self.cached_pages * self.generator.page_size - self.cached_tokens)

    def receive_logits(self, logits: torch.Tensor) -> tuple[Any, ...]:
        return self._alone(lambda: self._draw(logits)) or _NOTHING

    def _draw(self, logits: torch.Tensor) -> tuple[Any, ...]:
        if self._alternatives is not None:  # now, for the sampler changes them
            self._ranking = Ranking(logits, self._alternatives, self._vocabulary.size)
        if self.owner.matcher is not None:
            known = logits[..., : self._vocabulary.size]  # fewer, if the model lacks some of its tokenizer's tokens
            known.masked_fill_(self._ruled_out(self.owner.matcher)[: known.shape[-1]], -inf)
        drawn: tuple[Any, ...] = super().receive_logits(logits)
        return drawn

    def _ruled_out(self, matcher: Matcher) -> torch.Tensor:
        """Of each token, whether the grammar has no place for it here."""
        mask = torch.frombuffer(bytearray(matcher.mask()), dtype=torch.uint8) == 0
        if matcher.ended:  # only the mask has shown that nothing can follow
            mask[sorted(self._vocabulary.ends)] = False
        return mask[: self._vocabulary.size]

    def receive_sample(
        self,
        logits: Any,
        next_token: Any,
        next_k_tokens: Any,
        next_k_probs: Any,
        next_prob: Any,
        filter_eos: Any,
        results: list[dict[str, Any]],
        first_sample_in_sd_batch: bool = True,
    ) -> tuple[bool, Any]:
        own: list[dict[str, Any]] = []

        def receive() -> tuple[bool, Any]:
            if self._ranking is not None:
                self._held_logprobs.append(self._ranking.of(int(next_token), self._vocabulary))
            drawn = (next_token, next_k_tokens, next_k_probs, next_prob, self._ends_grammar(int(next_token)))
            take = super(Exl2Job, self).receive_sample
            received = self._filling(lambda: take(logits, *drawn, own, first_sample_in_sd_batch))
            self._keep(own[0])
            return received

        self.evaluated += not self._begun  # a prompt's last token has no part in its prefill
        self._begun = True
        return self._alone(receive) or (True, next_token)  # "it has ended": its pages go back with all those who end

    def _ends_grammar(self, token: int) -> bool:
        """Nothing can follow it."""
        matcher = self.owner.matcher
        if matcher is None or token in self._vocabulary.ends:
            return False
        matcher.accept(token)
        return matcher.ended

    def _alone(self, act: Callable[[], T]) -> T | None:
        if self.failure is None:
            try:
                return act()
            except Exception as exc:
                self.failure = exc
                self._spoil()
        return None

    def _spoil(self) -> None:
        """Nobody may trust what is in its pages: it may have been in the middle of writing them."""
        for page in self.pages:
            if page.ref_count == 1:
                self._rename(page)
                page.kv_position, page.prev_hash, page.can_revert = 0, None, False

    # --- what it says -----------------------------------------------------------------------------------------------

    def _keep(self, result: dict[str, Any]) -> None:
        said = result["held"] if result.get("eos_reason") == "stop_token" else result
        tokens = said["token_ids"][0].tolist() if "token_ids" in said else []
        if "suppressed_tokens" in result:  # it went back before them; the text did, and the sampler should
            back = result["suppressed_tokens"].shape[-1]
            del tokens[len(tokens) - back :]
            del self._held_logprobs[len(self._held_logprobs) - back :]
            forget_repetitions(self.gen_settings)
        self.said += tokens
        self.logprobs += self._held_logprobs[: len(tokens)]
        del self._held_logprobs[: len(tokens)]
        if result["eos"]:
            self.ended = result["eos_reason"]

    # --- its pages --------------------------------------------------------------------------------------------------

    def _filling(self, take: Callable[[], T]) -> T:
        """Take a token. Where it fills a page, see to the names of that page and of any other that should have it."""
        sequence, size = self.sequence, self.generator.page_size
        at = sequence.kv_position
        index = at // size
        if (at + 1 - self._held_back) // size <= index or not self.generator.paged:
            return take()
        name = self._name(index, sequence.allocated_pages[index - 1].phash if index else None)
        other = self.generator.referenced_pages.get(name)
        if other is not None and (other.kv_position < size or self.banned_strings):
            self._rename(other)
        taken = take()
        if self.banned_strings:
            self._rename(self.pages[index])
            if other is not None:
                self._rename(other, name)
        return taken

    @property
    def _held_back(self) -> int:
        """Tokens that may be taken back."""
        return self.checkpoint["offset"] if self.checkpoint else 0

    def _name(self, index: int, before: bytes | None) -> bytes:
        """Of a page's content and of all before it."""
        size = self.generator.page_size
        name: bytes = _tensor_hash_checksum(
            self.sequence.sequence_ids.torch_slice(index * size, (index + 1) * size), before
        )
        return name

    def _rename(self, page: Any, name: bytes | None = None) -> None:
        """Without a name: so that nobody finds it."""
        del self.generator.referenced_pages[page.phash]
        page.phash = name or _randomhash()
        self.generator.referenced_pages[page.phash] = page

    def deallocate_pages(self) -> None:
        """Give the pages back, by names that others will look for."""
        if self.banned_strings and self.failure is None and self.generator.paged:
            self._name_pages()
        super().deallocate_pages()

    def _name_pages(self) -> None:
        generator, name = self.generator, None
        certain = (len(self.sequence.sequence_ids) - 1 - self._held_back) // generator.page_size
        for index, page in enumerate(self.pages[:certain]):
            before, name = name, self._name(index, name)
            if page.phash == name or page.ref_count > 1 or page.kv_position < generator.page_size:
                continue
            if name not in generator.referenced_pages:
                if name in generator.unreferenced_pages:
                    generator.unreferenced_pages[name].clear()
                self._rename(page, name)
                page.prev_hash = before

    def requeue(self) -> None:
        """Become a job whose prompt is all that it has said so far. Its pages must have been given back."""
        sequence, most = self.sequence, self.max_new_tokens
        held = {name: getattr(self, name) for name in _HELD}
        self.max_new_tokens -= self.new_tokens
        self.prepare_for_queue(self.generator, self.serial_number)
        self.max_new_tokens = most
        vars(self).update(held)
        sequence.kv_position, sequence.block_index_tensor, sequence.prefill_complete = 0, None, False
        self._set_apart()

    def _set_apart(self) -> None:
        """Pages of tokens that may be taken back are shared with nobody."""
        sequence = self.sequence
        certain = (len(sequence.sequence_ids) - 1 - self._held_back) // self.generator.page_size
        sequence.new_unique_pages += len(sequence.page_hashes) - certain
        del sequence.page_hashes[certain:]
        self.all_unique_hashes = list(sequence.page_hashes)
