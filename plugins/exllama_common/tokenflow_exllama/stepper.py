"""A library's generator as a `Stepper`; each plugin adds how its jobs are made, and what they have said.

* The generator holds nothing back: stop strings and whole characters are the loop's affair, so each token is handed out
  in the step that drew it. Only what may become a banned string is held, and comes in one piece.
* One step is one iteration: a token for everybody who decodes (several, if they were guessed ahead), and a chunk of
  somebody's prompt. That chunk is the longest that anybody who leaves has to wait.
* What fails in one job's own part of a step ends that job. When the step fails as a whole, nothing in the cache is
  trusted any more: everybody begins again from what they have said so far, first each of them in steps alone. Who
  fails alone is the one, and ends; the others go on with the same output. A batch that fails again and again without
  any one to blame is given up, and the engine serves who comes next. If a GPU is gone, the engine ends, even if that
  came out in one job's own part.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, Protocol, TypeVar

from tokenflow.api import ContextLengthExceeded, EngineError, EngineInfo, InvalidRequest, Sequence, Step
from tokenflow_exllama.gpus import gpus_work
from tokenflow_exllama.progress import GivenUp
from tokenflow_exllama.vocabulary import ExllamaVocabulary

PATIENCE = 3
"""How often the batch may fail before a step of all of it has succeeded."""


class Job(Protocol):
    """One sequence as the library's generator has it."""

    failure: Exception | None
    """What went wrong in its own part of a step: it has ended."""
    evaluated: int
    """Prompt tokens that were run through the model, and not yet counted by whoever counts them."""

    @property
    def shared(self) -> int:
        """Prompt tokens that it need not evaluate itself."""
        ...

    def is_prefill_done(self) -> bool: ...


J = TypeVar("J", bound=Job)


class Batch(Protocol[J]):
    """The library's generator, with jobs that pause."""

    max_total_tokens: int

    @property
    def used_tokens(self) -> int:
        """In pages that some job holds."""
        ...

    @property
    def evicted_tokens(self) -> int:
        """Counter: in pages that somebody could have reused, and that somebody else got."""
        ...

    def prepare(self, job: J) -> None:
        """Get ready to start a new `job`. AssertionError: it never can, whatever room there is."""
        ...

    def start(self, job: J) -> bool:
        """Give a new or released `job` its place. False: not now."""
        ...

    def release(self, job: J) -> None:
        """`job` leaves, to come back through `start`."""
        ...

    def drop(self, job: J) -> None:
        """`job` leaves, wherever it is; what it held is free."""
        ...

    def step(self, wanted: list[J]) -> None:
        """One iteration with those who are wanted, as far as there are pages. What comes of it is in the jobs."""
        ...

    def close(self) -> None: ...


class Loaded(Protocol):
    """A model that is ready to decode."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def vocabulary(self) -> ExllamaVocabulary: ...
    @property
    def unload(self) -> Callable[[], None]: ...


C = TypeVar("C")
L = TypeVar("L", bound=Loaded)


class ExllamaStepper(ABC, Generic[C, L, J]):
    """One of the libraries as a `Stepper`.

    Args:
        config: what to load, in `open`.
        load: how; tests have no GPU.
    """

    library: ClassVar[str]
    can_release = True

    def __init__(self, config: C, load: Callable[[C, Callable[[], bool]], L]) -> None:
        self._config = config
        self._load = load
        self._loaded: L | None = None
        self._given_up = False
        self._suspects: list[J] = []
        self._failures = 0
        self._broken: Exception | None = None
        self._logger = logging.getLogger(f"tokenflow.{self.library}")
        self.info: EngineInfo
        self.vocabulary: ExllamaVocabulary
        self.batch: Batch[J]
        self.prompt_tokens = 0
        """Counter: prompt tokens evaluated."""

    def open(self) -> None:
        try:
            loaded = self._load(self._config, lambda: self._given_up)
        except GivenUp:
            return  # whoever wanted it closes it at once
        self._loaded = loaded
        self.info, self.vocabulary = loaded.info, loaded.vocabulary
        self.batch = self._first_batch(loaded)

    def close(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            try:
                self.batch.close()
                loaded.unload()
            except Exception:  # what it ended for is what its host is to hear
                self._logger.exception("%s cannot give its memory back", self.library)

    def interrupt(self, seq: Sequence | None) -> None:
        """Loading can be given up; a step cannot, and need not: it is one chunk at most."""
        if seq is None:
            self._given_up = True

    # --- what each library has of its own ---------------------------------------------------------------------------

    @abstractmethod
    def _first_batch(self, loaded: L) -> Batch[J]: ...

    @abstractmethod
    def _make_job(self, seq: Sequence, loaded: L) -> J:
        """Not yet prepared for any generator."""

    @abstractmethod
    def _start_over(self, loaded: L) -> None:
        """After a failure in the middle of a step: nothing in the cache is trusted, and nobody is lost.

        What it raises says that the library cannot go on.
        """

    @abstractmethod
    def _made(self, job: J) -> Step | None:
        """What a step made of one sequence. None: nothing, for it prefills, waits for pages, or has its text held."""

    # --- coming and going -------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> bool:
        job: J = seq.data or self._new_job(seq)
        seq.data = job
        try:
            if not self.batch.start(job):
                return False
        except Exception as exc:
            raise self._for_people(exc) from exc
        seq.cached_tokens = job.shared
        return True

    def _new_job(self, seq: Sequence) -> J:
        assert self._loaded is not None
        request, limit = seq.request, self.info.context_length
        if len(request.prompt) + request.max_tokens > limit:
            raise ContextLengthExceeded(limit=limit, prompt=len(request.prompt), requested=request.max_tokens)
        try:
            self.vocabulary.check(request.prompt)
        except ValueError as exc:
            raise InvalidRequest(str(exc), param="prompt") from exc
        if seq.matcher is not None and request.sampling.banned_strings:
            raise InvalidRequest("Banned strings cannot be taken out of a text of a grammar.", param="banned_strings")
        job = self._make_job(seq, self._loaded)
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
        job: J = seq.data
        seq.data = None
        self.batch.drop(job)

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, run: list[Sequence]) -> list[tuple[Sequence, Step]]:
        jobs: list[J] = [seq.data for seq in run]
        self._suspects = [job for job in self._suspects if job in jobs]
        together = self._suspects[:1] or jobs
        try:
            self.batch.step(together)
        except Exception as exc:
            self._has_failed(together, exc)
        else:
            if together is jobs:
                self._failures = 0
            elif together[0].is_prefill_done():  # its next token was a part of this step, too
                del self._suspects[0]
        failed = next((job.failure for job in jobs if job.failure is not None), None)
        if failed is not None and not gpus_work():
            self._broken = EngineError(f"{self.library} failed for good: {type(failed).__name__}: {failed}.")
            raise self._broken from failed
        steps = []
        for seq, job in zip(run, jobs, strict=True):
            self.prompt_tokens += job.evaluated
            job.evaluated = 0
            step = self._made(job) if job.failure is None else Step(error=self._for_people(job.failure))
            if step is not None:
                steps.append((seq, step))
        return steps

    def _has_failed(self, jobs: list[J], exc: Exception) -> None:
        """The step of these jobs has, as a whole."""
        assert self._loaded is not None
        self._logger.exception("%s failed in a step of %d sequences", self.library, len(jobs))
        error = EngineError(f"{self.library} failed: {type(exc).__name__}: {exc}.")
        try:
            self._start_over(self._loaded)
            if not gpus_work():
                raise exc
        except Exception as why:
            self._logger.exception("%s cannot be set up again", self.library)
            self._broken = EngineError(f"{self.library} failed for good: {type(why).__name__}: {why}.")
        else:
            if len(jobs) == 1:
                jobs[0].failure = error
                return
            if self._failures < PATIENCE:
                self._failures += 1
                self._suspects = list(jobs)
                return
        self._failures = 0
        raise error from exc

    def _for_people(self, exc: Exception) -> Exception:
        """One sequence's failure, as its reader may see it."""
        if isinstance(exc, EngineError | InvalidRequest):
            return exc
        error = EngineError(f"{self.library} failed in this sequence: {type(exc).__name__}: {exc}.")
        error.__cause__ = exc
        return error
