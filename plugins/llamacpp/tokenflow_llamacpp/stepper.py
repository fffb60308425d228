"""Continuous batching on one llama.cpp context.

Each step decodes one batch: the next token of every sequence that is decoding, and prompt tokens with what room there
is, first come first served. While somebody decodes, prompts get `prefill_chunk` tokens a step, so that a long prompt
does not hold up the others; while nobody does, the whole batch. Logits are asked for where a token will be drawn, and
nowhere else.

* A paused sequence is one that is not in the batch. It costs nothing.
* Interrupting sets a flag that llama.cpp polls between the operations of a decode. It ends the whole batch's step, and
  leaves some of its tokens in the cache: every row is set back to where it was, and the next step does it again. The
  flag may come at any moment, also between two steps. So a step first clears it, then leaves out who is cancelled:
  `cancelled` is written before the flag, so a flag that was cleared unseen has already had its effect.
* A step that was asked to end, whether it still could or not, is followed by one of `prefill_chunk` tokens: the loop
  interrupts no two in a row, and who leaves during the second must not wait for a whole batch.
* Recurrent and hybrid models cannot be set back, so they are not interrupted, and have no prefix cache.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenflow.api import ContextLengthExceeded, EngineError, EngineInfo, FinishReason, InvalidRequest, Sequence, Step
from tokenflow_llamacpp.config import LlamaConfig
from tokenflow_llamacpp.guide import Guide
from tokenflow_llamacpp.loading import Loaded, load
from tokenflow_llamacpp.sampling import Sampler, Samplers, token_logprob
from tokenflow_llamacpp.slots import Slot, Slots
from tokenflow_llamacpp.vocabulary import LlamaVocabulary

logger = logging.getLogger("tokenflow.llamacpp")

_END = Step(1, b"", "stop")


class Job:
    """What a sequence is to this stepper."""

    __slots__ = ("drawn", "logprobs", "sampler", "shown", "slot", "todo")

    def __init__(
        self, slot: Slot, todo: list[int], sampler: Sampler, logprobs: int | None, shown: dict[int, bytes]
    ) -> None:
        self.slot = slot
        self.todo = todo
        """Tokens to evaluate: of the prompt, later those drawn last: one, or more where a grammar left no choice."""
        self.drawn = 0
        """How many at the end of `todo` were drawn."""
        self.sampler = sampler
        self.logprobs = logprobs
        self.shown = shown
        """Control tokens that have a text here."""


Row = tuple[Sequence, int, int | None]
"""A sequence's part of a batch: how many tokens, and where its logits will be."""


class LlamaStepper:
    """llama.cpp as a `Stepper`.

    Args:
        config: what to load, in `open`.
    """

    def __init__(self, config: LlamaConfig) -> None:
        self._config = config
        self._context: Any = None
        self._everybody_leaves = False
        self._asked_to_end = False  # the step before, or this one
        self.info: EngineInfo
        self.vocabulary: LlamaVocabulary
        self.slots: Slots
        self.prompt_tokens = 0
        """Counter: prompt tokens evaluated."""
        self.interrupted = 0
        """Counter: steps cut short."""

    def open(self) -> None:
        loaded = self._loaded = load(self._config)
        self.info = loaded.info
        self.vocabulary = loaded.vocabulary
        self._samplers = Samplers(loaded.library, loaded.vocabulary)
        self._batch = loaded.batch
        self._can_cut = loaded.can_cut
        self._most = max(1, min(loaded.batch_tokens // loaded.info.slots, self._config.prefill_chunk))
        self.slots = _slots(loaded)
        self._context = loaded.context
        if not loaded.can_cut:
            logger.warning("%s is recurrent: no prefix cache, and a cancel waits for the step.", loaded.info.model)

    def close(self) -> None:
        context, self._context = self._context, None
        self._samplers.close()
        self._batch.close()
        context.close()
        del self._loaded  # the model goes with the last one who tokenizes

    def add(self, seq: Sequence) -> bool:
        request = seq.request
        total = len(request.prompt) + request.max_tokens
        if total > self.info.context_length:
            raise ContextLengthExceeded(
                limit=self.info.context_length, prompt=len(request.prompt), requested=request.max_tokens
            )
        if not self.slots.has_room(total):
            return False
        if seq.data is not None:
            self._take_up_again(seq, total)
            return True
        try:
            self.vocabulary.check(request.prompt)
        except ValueError as exc:
            raise InvalidRequest(str(exc), param="prompt") from exc
        sampler: Sampler
        if seq.matcher is None:
            sampler = self._samplers.make(request)
        else:
            sampler = Guide(self._samplers, request, seq.matcher, self.vocabulary.ends)
        slot = self.slots.take(request.prompt, total)
        assert slot is not None
        seq.cached_tokens = len(slot.tokens)
        todo = list(request.prompt[len(slot.tokens) :])
        seq.data = Job(slot, todo, sampler, request.logprobs, self.vocabulary.shown(request.shown))
        return True

    can_release = True

    def release(self, seq: Sequence) -> None:
        job: Job = seq.data
        job.todo[:0] = job.slot.tokens  # all of it is to be evaluated again, but for what the slot will still have
        self.slots.release(job.slot)

    def _take_up_again(self, seq: Sequence, total: int) -> None:
        job: Job = seq.data
        slot = self.slots.take(tuple(job.todo), total)
        assert slot is not None
        job.slot = slot
        seq.cached_tokens = len(slot.tokens)
        del job.todo[: len(slot.tokens)]

    def remove(self, seq: Sequence) -> None:
        job: Job = seq.data
        seq.data = None
        self.slots.release(job.slot)
        job.sampler.close()

    def interrupt(self, seq: Sequence | None) -> None:
        context = self._context
        if context is None or not self._can_cut:
            return
        if seq is None:
            self._everybody_leaves = True
        self._asked_to_end = True
        context.cancel = True

    def step(self, run: list[Sequence]) -> list[tuple[Sequence, Step]]:
        self._context.cancel = False
        is_short, self._asked_to_end = self._asked_to_end, False
        if self._everybody_leaves:
            self._everybody_leaves = False
            return []
        rows = self._fill([seq for seq in run if not seq.cancelled], is_short)
        if not rows:
            return []
        try:
            self._context.decode(self._batch)
        except InterruptedError:
            self.interrupted += 1
            self._everybody_leaves = False
            self._asked_to_end = True
            return self._set_back(rows)
        except ValueError as exc:
            return self._set_back(rows) or self._no_room(rows, exc)
        except RuntimeError as exc:
            self.slots.wipe_all()  # nothing is known about the cache any more
            raise EngineError(f"llama.cpp failed to decode: {exc}.") from exc
        return self._draw_all(rows)

    def _fill(self, run: list[Sequence], is_short: bool) -> list[Row]:
        batch = self._batch
        rows: list[Row] = []
        batch.reset()
        add = batch.add
        prefilling = []
        for seq in run:
            job: Job = seq.data
            if len(job.todo) == 1:
                add(job.todo[0], len(job.slot.tokens), job.slot.ids, True)
                rows.append((seq, 1, batch.n_tokens - 1))
            elif len(job.todo) == job.drawn:  # there is room for all of them: see `_most`
                self._fill_prompt(seq, job.drawn, rows)
            else:
                prefilling.append(seq)
        room = self._loaded.batch_tokens - batch.n_tokens
        if rows or is_short:
            room = min(room, self._config.prefill_chunk)
        for seq in prefilling:
            if room <= 0:
                break
            room -= self._fill_prompt(seq, room, rows)
        return rows

    def _fill_prompt(self, seq: Sequence, room: int, rows: list[Row]) -> int:
        job: Job = seq.data
        ids, at, last = job.slot.ids, len(job.slot.tokens), len(job.todo) - 1
        part = job.todo[:room]
        add = self._batch.add
        for offset, token in enumerate(part):
            add(token, at + offset, ids, offset == last)
        rows.append((seq, len(part), self._batch.n_tokens - 1 if len(part) > last else None))
        return len(part)

    def _set_back(self, rows: list[Row]) -> list[tuple[Sequence, Step]]:
        """Undo what a step left; whoever cannot be set back has failed."""
        failed = [seq for seq, _, _ in rows if not self.slots.set_back(seq.data.slot)]
        for seq in failed:
            self.slots.wipe(seq.data.slot)
        return [(seq, Step(error=EngineError("The model's memory could not be set back."))) for seq in failed]

    def _no_room(self, rows: list[Row], cause: Exception) -> list[tuple[Sequence, Step]]:
        """Against the reservations the cache is full: what is only kept goes, then the latest sequence."""
        logger.warning("llama.cpp found no room in its KV cache: %s", cause)
        if self.slots.drop_kept():
            return []
        return [(rows[-1][0], Step(error=EngineError(f"llama.cpp found no room in its KV cache: {cause}.")))]

    def _draw_all(self, rows: list[Row]) -> list[tuple[Sequence, Step]]:
        steps = []
        for seq, count, index in rows:
            job: Job = seq.data
            job.slot.tokens += job.todo[:count]
            del job.todo[:count]
            if index is None:
                self.prompt_tokens += count
                continue
            # One that goes on may have to evaluate its text again, or has it from another's slot.
            self.prompt_tokens += max(0, count - job.drawn)
            try:
                steps += [(seq, step) for step in self._draw(seq, job, index)]
            except Exception as exc:
                steps.append((seq, Step(error=exc)))
        return steps

    def _draw(self, seq: Sequence, job: Job, index: int) -> list[Step]:
        most = 1 if job.logprobs is not None else min(seq.room, self._most)
        tokens = job.sampler.draw(self._context, index, job.slot.tokens, most)
        job.todo += tokens
        job.drawn = len(tokens)
        *others, last = tokens
        steps = [Step(1, self._piece(job, token)) for token in others]
        if last in self.vocabulary.ends:  # where they are ignored they are banned
            return [*steps, _END]
        finish: FinishReason | None = "stop" if job.sampler.ended else None
        if job.logprobs is None:
            return [*steps, Step(1, self._piece(job, last), finish)]
        logits = self._context.get_logits_ith(index)
        logprob = token_logprob(logits, last, job.logprobs, self.vocabulary)
        return [Step(1, self._piece(job, last), finish, (logprob,))]

    def _piece(self, job: Job, token: int) -> bytes:
        return self.vocabulary.pieces[token] or job.shown.get(token, b"")


def _slots(loaded: Loaded) -> Slots:
    return Slots(loaded.context, slots=loaded.info.slots, capacity=loaded.capacity, keep=loaded.keep_prefixes)
