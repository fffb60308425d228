"""The library's generator as a `Stepper`: who may run is in its batch, who may not is parked beside it.

* The generator holds nothing back: stop strings and whole characters are the loop's affair, so each token is handed out
  in the step that drew it. Only what may become a banned string is held, and comes in one piece.
* One step is one `iterate()`: a token for everybody who decodes (several, if they were guessed ahead), and a chunk of
  somebody's prompt. That chunk is the longest that anybody who leaves has to wait.
* When the library fails as a whole, everybody in the batch fails. The next ones get a new generator over the same
  cache; if that cannot be made, the GPU is not to be trusted, and the engine ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tokenflow_exllama.progress import GivenUp
from tokenflow_exllama.vocabulary import ExllamaVocabulary

from tokenflow.api import ContextLengthExceeded, EngineError, EngineInfo, InvalidRequest, Sequence, Step
from tokenflow_exllamav3.config import Exl3Config
from tokenflow_exllamav3.loading import Loaded, load
from tokenflow_exllamav3.results import step_of

if TYPE_CHECKING:  # heavy: imported where the engine is opened
    from tokenflow_exllamav3.batch import Batch
    from tokenflow_exllamav3.job import Exl3Job

logger = logging.getLogger("tokenflow.exllamav3")

Load = Callable[[Exl3Config, Callable[[], bool]], Loaded]


class Exl3Stepper:
    """exllamav3 as a `Stepper`.

    Args:
        config: what to load, in `open`.
        load: how; tests have no GPU.
    """

    can_release = True

    def __init__(self, config: Exl3Config, load: Load = load) -> None:
        self._config = config
        self._load = load
        self._loaded: Loaded | None = None
        self._given_up = False
        self._broken: Exception | None = None
        self.info: EngineInfo
        self.vocabulary: ExllamaVocabulary
        self.batch: Batch
        self.prompt_tokens = 0
        """Counter: prompt tokens evaluated."""

    def open(self) -> None:
        try:
            loaded = self._loaded = self._load(self._config, lambda: self._given_up)
        except GivenUp:
            return  # whoever gave it up waits for nothing more
        from tokenflow_exllamav3.job import Jobs

        self.info = loaded.info
        self.vocabulary = loaded.vocabulary
        self._jobs = Jobs(loaded.tokenizer, loaded.vocabulary, self._config.reserve_tokens)
        self.batch = loaded.new_batch()

    def close(self) -> None:
        if self._loaded is not None:
            self.batch.close()
            self._loaded.unload()
            self._loaded = None

    # --- coming and going -------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> bool:
        job: Exl3Job = seq.data or self._new_job(seq)
        if job.generator is not self.batch:
            self._prepare(job)
            seq.data = job
        for other in [*self.batch.active_jobs, *self.batch.pending_jobs]:
            if other.identifier.parked:
                self.batch.pause(other)  # nobody may have taken a step since
        if not self.batch.start(job):
            return False
        seq.cached_tokens = job.shared
        return True

    def _new_job(self, seq: Sequence) -> Exl3Job:
        request, limit = seq.request, self.info.context_length
        if len(request.prompt) + request.max_tokens > limit:
            raise ContextLengthExceeded(limit=limit, prompt=len(request.prompt), requested=request.max_tokens)
        try:
            self.vocabulary.check(request.prompt)
        except ValueError as exc:
            raise InvalidRequest(str(exc), param="prompt") from exc
        if seq.matcher is not None and request.sampling.banned_strings:
            raise InvalidRequest("Banned strings cannot be taken out of a text of a grammar.", param="banned_strings")
        return self._jobs.make(request, owner=seq, matcher=seq.matcher)

    def _prepare(self, job: Exl3Job) -> None:
        try:
            self.batch.prepare(job)
        except AssertionError as exc:  # how the library says no
            raise InvalidRequest(f"The model cannot do this: {exc}.") from exc

    def release(self, seq: Sequence) -> None:
        self.batch.pause(seq.data)
        self.batch.shelve(seq.data)
        self.batch.shelved.discard(seq.data)  # it comes back through `add`

    def remove(self, seq: Sequence) -> None:
        if self._broken is not None:
            raise self._broken
        job: Exl3Job = seq.data
        seq.data = None
        if job.generator is self.batch:
            self.batch.drop(job)

    def interrupt(self, seq: Sequence | None) -> None:
        """Loading can be given up; a step cannot, and need not: it is one chunk at most."""
        if seq is None:
            self._given_up = True

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, run: list[Sequence]) -> Iterable[tuple[Sequence, Step]]:
        try:
            results = self._iterate([seq.data for seq in run])
        except Exception as exc:
            self._start_over()
            raise EngineError(f"exllamav3 failed: {type(exc).__name__}: {exc}.") from exc
        for seq in run:
            self.prompt_tokens += seq.data.evaluated
            seq.data.evaluated = 0
        by_sequence: dict[Sequence, list[dict[str, Any]]] = {}
        for result in results:
            by_sequence.setdefault(result["job"].identifier, []).append(result)
        steps = ((seq, step_of(own, seq.request, self.vocabulary)) for seq, own in by_sequence.items())
        return [(seq, step) for seq, step in steps if step is not None]

    def _iterate(self, wanted: list[Exl3Job]) -> list[dict[str, Any]]:
        batch = self.batch
        may = set(wanted)
        for job in [*batch.active_jobs, *batch.pending_jobs]:
            if job not in may:
                batch.pause(job)
        for job in wanted:
            batch.go_on(job)
        results: list[dict[str, Any]] = batch.iterate()
        return results

    def _start_over(self) -> None:
        """A new generator over the same cache. The old one's jobs are lost, and its pages are free."""
        try:
            lost = self.batch
            lost.close()
            self.batch = self._loaded.new_batch()
            self.batch.evicted_before = lost.evicted_tokens
        except Exception as exc:
            logger.exception("exllamav3 cannot be set up again")
            self._broken = EngineError(f"exllamav3 failed for good: {type(exc).__name__}: {exc}.")
