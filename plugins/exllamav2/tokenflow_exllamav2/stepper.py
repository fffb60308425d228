"""The library's generator as a `Stepper`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenflow_exllama.stepper import ExllamaStepper
from tokenflow_exllama.vocabulary import before_banned

from tokenflow.api import Sequence, Step
from tokenflow_exllamav2.config import Exl2Config

if TYPE_CHECKING:  # heavy: imported where the engine is opened
    from tokenflow_exllamav2.batch import Batch
    from tokenflow_exllamav2.job import Exl2Job
    from tokenflow_exllamav2.loading import Loaded

Load = Callable[[Exl2Config, Callable[[], bool]], "Loaded"]


def load_model(config: Exl2Config, given_up: Callable[[], bool]) -> Loaded:
    from tokenflow_exllamav2.loading import load

    return load(config, given_up)


class Exl2Stepper(ExllamaStepper[Exl2Config, "Loaded", "Exl2Job"]):
    """exllamav2 as a `Stepper`."""

    library = "exllamav2"
    batch: Batch

    def __init__(self, config: Exl2Config, load: Load = load_model) -> None:
        super().__init__(config, load)

    def _first_batch(self, loaded: Loaded) -> Batch:
        batch: Batch = loaded.batch
        return batch

    def _make_job(self, seq: Sequence, loaded: Loaded) -> Exl2Job:
        from tokenflow_exllamav2.job import Exl2Job

        settings = loaded.samplers.make(seq.request.sampling)
        return Exl2Job(seq, self.vocabulary, settings, self._config.guesses)

    def _start_over(self, loaded: Loaded) -> None:
        self.batch.start_over()

    def _made(self, job: Exl2Job) -> Step | None:
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
