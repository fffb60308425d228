"""The library's generator, with jobs that pause.

A job that the generator has is in one of three places:

    with pages    it takes part in a step if it is among those who may
    parked        so too, but it may not: going on costs nothing
    shelved       without pages: going on costs what of them has been taken by others since

Whoever is parked gives its pages up when somebody else finds none, the longest parked first. Who wants to go on and
finds no pages is served before anybody new.

The library's own queue stays empty: it would let small newcomers overtake large ones, and start more than there are
slots, since it does not count the parked. It would also tidy the cache once the last active job has ended, and find
pages that somebody still holds; so that is done here, when the last one has gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from time import time
from typing import Any

import torch
from exllamav2.generator import ExLlamaV2DynamicGenerator

from tokenflow_exllamav2.job import Exl2Job

logger = logging.getLogger("tokenflow.exllamav2")


class Batch(ExLlamaV2DynamicGenerator):  # type: ignore[misc]  # the library has no types that mypy could read
    """Takes what a generator takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.jobs: dict[Exl2Job, None] = {}
        """Who has pages."""
        self.parked: dict[Exl2Job, None] = {}
        """Who of them takes no part, the longest parked first."""
        self.shelved: dict[Exl2Job, None] = {}
        self.evicted_tokens = 0
        """Counter: in pages that somebody could have reused, and that somebody else got."""
        super().__init__(*args, **options)

    def num_remaining_jobs(self) -> int:
        return len(self.jobs)

    @property
    def used_tokens(self) -> int:
        """In pages that some job holds."""
        return len(self.referenced_pages) * int(self.page_size)

    # --- coming and going -------------------------------------------------------------------------------------------

    def prepare(self, job: Exl2Job) -> None:
        """Get ready to start `job`: hash its prompt, see that it fits.

        Raises:
            AssertionError: it never can, whatever room there is.
        """
        job.prepare_for_queue(self, self.job_serial)
        job.time_enqueue = time()
        self.job_serial += 1

    def start(self, job: Exl2Job) -> bool:
        """Give a new or released `job` its pages. False: not now."""
        if len(self.jobs) + len(self.shelved) >= self.max_batch_size:
            return False
        for other in [*self.jobs, *self.shelved]:
            if other.owner.parked:  # nobody may have taken a step since
                self.parked.setdefault(other)
        return not self.shelved.keys() - self.parked.keys() and self._give_pages(job)

    def drop(self, job: Exl2Job) -> None:
        """`job` leaves, wherever it is; what it held is free."""
        self.shelved.pop(job, None)
        self._take_pages(job)
        if not self.jobs:
            self._tidy()

    def release(self, job: Exl2Job) -> None:
        """`job` leaves, to come back through `start`."""
        if job in self.jobs:
            self._take_pages(job)
            job.requeue()
        self.shelved.pop(job, None)
        self.parked.pop(job, None)

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, wanted: Sequence[Exl2Job]) -> None:
        """One iteration with those who are wanted, as far as there are pages; one of them, at most, prefills.

        What comes of it is in the jobs.
        """
        self._park_all_but(wanted)
        for job in [job for job in self.shelved if job not in self.parked]:
            if not self._give_pages(job):
                break
            del self.shelved[job]
        here = [job for job in wanted if job in self.jobs]
        prefilling = [job for job in here if not job.is_prefill_done()]
        self.active_jobs = [job for job in here if job not in prefilling[1:]]
        try:
            if self.active_jobs:
                self.iterate()
        finally:
            self.active_jobs = []

    def _park_all_but(self, wanted: Iterable[Exl2Job]) -> None:
        may = set(wanted)
        for job in [*self.jobs, *self.shelved]:
            if job in may:
                self.parked.pop(job, None)
            else:
                self.parked.setdefault(job)

    def iterate_ngram_gen(self, results: list[dict[str, Any]]) -> torch.Tensor | None:
        """Guesses from what was said; none while somebody has said too little for the library to look at."""
        if any(len(job.sequence.sequence_ids) < self.max_ngram for job in self.active_jobs):
            return None
        guesses: torch.Tensor | None = super().iterate_ngram_gen(results)
        return guesses

    def start_over(self) -> None:
        """After a failure in the middle of a step: nothing in the cache is trusted, and nobody is lost."""
        self.reset_page_table()
        for job in [*self.jobs]:
            job.sequence.allocated_pages = []
            job.requeue()
        self.shelved = {**self.jobs, **self.shelved}
        self.jobs.clear()

    # --- pages ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _give_pages(self, job: Exl2Job) -> bool:
        if not self._make_room(job):
            return False
        before = {page.page_index: page.kv_position for page in self.unreferenced_pages.values()}
        job.allocate_pages()
        self.evicted_tokens += sum(max(0, before.get(page.page_index, 0) - page.kv_position) for page in job.pages)
        self.jobs[job] = None
        return True

    def _take_pages(self, job: Exl2Job) -> None:
        if job in self.jobs:
            del self.jobs[job]
            if job.pages:
                job.deallocate_pages()
        self.parked.pop(job, None)

    def _make_room(self, job: Exl2Job) -> bool:
        """Find pages for `job`, at the cost of who is parked. False: not now."""
        if job.current_new_pages_required() <= len(self.unreferenced_pages):
            return True
        staying = {page.phash for other in self.jobs if other not in self.parked for page in other.pages}
        needed = job.sequence.new_unique_pages + sum(name not in staying for name in job.all_unique_hashes)
        if needed > self.max_pages - len(staying):
            return False
        for other in [other for other in self.parked if other in self.jobs]:
            self._shelve(other)
            if job.current_new_pages_required() <= len(self.unreferenced_pages):
                break
        return True

    def _shelve(self, job: Exl2Job) -> None:
        self._take_pages(job)
        job.requeue()
        self.shelved[job] = self.parked[job] = None

    def _tidy(self) -> None:
        try:
            self.defrag_cache()
        except Exception:
            logger.exception("exllamav2 failed to tidy its cache, which begins anew")
            self.reset_page_table()

    def close(self) -> None:
        """The caches go, for the library's models do not take theirs along: whoever asks for numbers may keep this."""
        self.cache = self.draft_cache = self.defrag_buffer = None
        self.sampling_pool.shutdown(wait=False)
        self.filter_pool.shutdown(wait=False)
