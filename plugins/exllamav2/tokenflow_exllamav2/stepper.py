"""The library's generator as a `Stepper`.

* The generator holds nothing back: stop strings and whole characters are the loop's affair, so each token is handed out
  in the step that drew it. Only what may become a banned string is held, and comes in one piece.
* One step is one iteration: a token for everybody who decodes (several, if they were guessed ahead), and a chunk of
  one prompt. That chunk is the longest that anybody who leaves has to wait.
* What fails in one job's own part of a step ends that job. When the step fails as a whole, nothing in the cache is
  trusted any more: everybody begins again from what they have said so far, first each of them in a step alone. Who
  fails alone is the one, and ends; the others go on with the same output. A batch that fails again and again without
  any one to blame is given up, and the engine serves who comes next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenflow_exllama.progress import GivenUp
from tokenflow_exllama.vocabulary import ExllamaVocabulary, before_banned

from tokenflow.api import ContextLengthExceeded, EngineError, EngineInfo, InvalidRequest, Sequence, Step
from tokenflow_exllamav2.config import Exl2Config

if TYPE_CHECKING:  # heavy: imported where the engine is opened
    from tokenflow_exllamav2.batch import Batch
    from tokenflow_exllamav2.job import Exl2Job
    from tokenflow_exllamav2.loading import Loaded

logger = logging.getLogger("tokenflow.exllamav2")

Load = Callable[[Exl2Config, Callable[[], bool]], "Loaded"]
PATIENCE = 3
"""How often the batch may fail before a step of all of it has succeeded."""


def load_model(config: Exl2Config, given_up: Callable[[], bool]) -> Loaded:
    from tokenflow_exllamav2.loading import load

    return load(config, given_up)


class Exl2Stepper:
    """exllamav2 as a `Stepper`.

    Args:
        config: what to load, in `open`.
        load: how; tests have no GPU.
    """

    can_release = True

    def __init__(self, config: Exl2Config, load: Load = load_model) -> None:
        self._config = config
        self._load = load
        self._loaded: Loaded | None = None
        self._given_up = False
        self._suspects: list[Exl2Job] = []
        self._failures = 0
        self._broken: Exception | None = None
        self.info: EngineInfo
        self.vocabulary: ExllamaVocabulary
        self.batch: Batch
        self.prompt_tokens = 0
        """Counter: prompt tokens evaluated."""

    def open(self) -> None:
        try:
            loaded = self._load(self._config, lambda: self._given_up)
        except GivenUp:
            return  # whoever wanted it closes it at once
        self._loaded = loaded
        self.info, self.vocabulary, self.batch = loaded.info, loaded.vocabulary, loaded.batch

    def close(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self.batch.close()
            loaded.unload()

    def interrupt(self, seq: Sequence | None) -> None:
        """Loading can be given up; a step cannot, and need not: it is one chunk at most."""
        if seq is None:
            self._given_up = True

    # --- coming and going -------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> bool:
        if len(self.batch.jobs) + len(self.batch.shelved) >= self.info.slots:
            return False
        job: Exl2Job = seq.data or self._new_job(seq)
        seq.data = job
        if not self.batch.start(job):
            return False
        seq.cached_tokens = job.shared
        return True

    def _new_job(self, seq: Sequence) -> Exl2Job:
        from tokenflow_exllamav2.job import Exl2Job

        assert self._loaded is not None
        request, limit = seq.request, self.info.context_length
        if len(request.prompt) + request.max_tokens > limit:
            raise ContextLengthExceeded(limit=limit, prompt=len(request.prompt), requested=request.max_tokens)
        try:
            self.vocabulary.check(request.prompt)
        except ValueError as exc:
            raise InvalidRequest(str(exc), param="prompt") from exc
        if request.grammar is not None and request.sampling.banned_strings:
            raise InvalidRequest("Banned strings cannot be taken out of a text of a grammar.", param="banned_strings")
        settings = self._loaded.samplers.make(request.sampling)
        job = Exl2Job(seq, self.vocabulary, settings, self._config.guesses)
        try:
            self.batch.prepare(job)
        except AssertionError as exc:  # how the library says no
            raise InvalidRequest(f"The model cannot do this: {exc}.") from exc
        return job

    def release(self, seq: Sequence) -> None:
        self.batch.release(seq.data)

    def remove(self, seq: Sequence) -> None:
        if self._broken is not None:
            raise self._broken
        job: Exl2Job = seq.data
        seq.data = None
        self.batch.drop(job)

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, run: list[Sequence]) -> list[tuple[Sequence, Step]]:
        jobs: list[Exl2Job] = [seq.data for seq in run]
        self._suspects = [job for job in self._suspects if job in jobs]
        together = self._suspects[:1] or jobs
        try:
            self.batch.step(together)
        except Exception as exc:
            self._start_over(together, exc)
        else:
            del self._suspects[:1]
            if not self._suspects and together is jobs:
                self._failures = 0
        steps = []
        for seq, job in zip(run, jobs, strict=True):
            self.prompt_tokens += job.evaluated
            job.evaluated = 0
            if (step := self._made(job)) is not None:
                steps.append((seq, step))
        return steps

    def _start_over(self, jobs: list[Exl2Job], exc: Exception) -> None:
        """The step of these jobs has failed as a whole."""
        assert self._loaded is not None
        logger.exception("exllamav2 failed in a step of %d sequences", len(jobs))
        error = EngineError(f"exllamav2 failed: {type(exc).__name__}: {exc}.")
        self.batch.start_over()
        if not self._loaded.works():
            self._broken = error
        elif len(jobs) == 1:
            jobs[0].failure = error
            return
        elif self._failures < PATIENCE:
            self._failures += 1
            self._suspects = list(jobs)
            return
        self._failures = 0
        raise error from exc

    def _made(self, job: Exl2Job) -> Step | None:
        """What a step made of one sequence. None: nothing, for it prefills, waits for pages, or has its text held."""
        if job.failure is not None:
            error = job.failure
            return Step(error=error if isinstance(error, EngineError | InvalidRequest) else _failed(error))
        tokens, logprobs = job.said, tuple(job.logprobs)
        if not tokens:
            return None
        job.said, job.logprobs = [], []
        pieces = [self.vocabulary.pieces[token] or job.shown.get(token, b"") for token in tokens]
        text = b"".join(pieces)
        if job.ended == "stop_token":
            return Step(len(tokens), text, "stop", logprobs[:-1])
        if job.ended != "max_new_tokens":
            return Step(len(tokens), text, None if job.ended is None else "stop", logprobs)
        # The library ends a job before it looks for banned strings: one may have come whole with the last token.
        certain = before_banned(text, job.owner.request.sampling.banned_strings)
        while logprobs and len(text) > len(certain):
            text, logprobs = text.removesuffix(pieces.pop()), logprobs[:-1]
        return Step(len(tokens), certain, "length", logprobs)


def _failed(exc: Exception) -> EngineError:
    error = EngineError(f"exllamav2 failed in this sequence: {type(exc).__name__}: {exc}.")
    error.__cause__ = exc
    return error
