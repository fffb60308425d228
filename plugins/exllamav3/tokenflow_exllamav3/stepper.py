"""The library's generator as a `Stepper`: who may run is in its batch, who may not is parked beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenflow_exllama.stepper import ExllamaStepper

from tokenflow.api import EngineError, Sequence, Step
from tokenflow_exllamav3.config import Exl3Config
from tokenflow_exllamav3.loading import Loaded, load
from tokenflow_exllamav3.results import step_of

if TYPE_CHECKING:  # heavy: imported where the engine is opened
    from tokenflow_exllamav3.batch import Batch
    from tokenflow_exllamav3.job import Exl3Job

Load = Callable[[Exl3Config, Callable[[], bool]], Loaded]


class Exl3Stepper(ExllamaStepper[Exl3Config, Loaded, "Exl3Job"]):
    """exllamav3 as a `Stepper`."""

    library = "exllamav3"
    batch: Batch

    def __init__(self, config: Exl3Config, load: Load = load) -> None:
        super().__init__(config, load)

    def _first_batch(self, loaded: Loaded) -> Batch:
        from tokenflow_exllamav3.job import Jobs

        self._jobs = Jobs(loaded.tokenizer, loaded.vocabulary, self._config.reserve_tokens)
        batch: Batch = loaded.new_batch()
        return batch

    def _make_job(self, seq: Sequence, loaded: Loaded) -> Exl3Job:
        return self._jobs.make(seq.request, owner=seq, matcher=seq.matcher)

    def _start_over(self, loaded: Loaded) -> None:
        """With a new generator over the same cache: the library's own way.

        Not if the GPUs work on each layer together, each in a process of its own: one that failed has left the others
        in the middle of it, and what they answer late would be taken for the answer to what is asked next.
        """
        if loaded.main.model.loaded_tp:
            raise EngineError("the processes of its GPUs may be out of step")
        lost = self.batch
        lost.close()
        self.batch = loaded.new_batch()
        self.batch.take_over(lost)

    def _made(self, job: Exl3Job) -> Step | None:
        results, job.results = job.results, []
        return step_of(results, job.identifier.request, self.vocabulary)
