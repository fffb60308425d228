"""The library's generator, with jobs that pause.

A job is in one of five places:

    active    in the generator's batch
    pending   the generator will take it up as soon as there are pages for it
    parked    out of the batch, with its pages: going on costs nothing
    shelved   out of the batch, without pages: going on costs what of them has been taken by others since
    gone

Whoever is parked gives its pages up when somebody else finds none, the longest parked first.

What the library would do wrong is kept from it here: it counts parked jobs as its own, or it would tidy its page table
once the last active one has ended, and find pages that somebody still holds; and it never has more than
`max_batch_size` in its batch, since the parked ones count as well when somebody wants to start.
"""

from __future__ import annotations

from typing import Any

import torch
from exllamav3.constants import PAGE_SIZE
from exllamav3.generator import Generator as LibraryGenerator

from tokenflow_exllamav3.job import Exl3Job


class Batch(LibraryGenerator):  # type: ignore[misc]  # the library has no types that mypy could read
    """Takes what a Generator takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.parked: dict[Exl3Job, None] = {}
        self.shelved: set[Exl3Job] = set()
        self.evicted_before = 0
        """What the generator that had the cache before this one counted."""
        super().__init__(*args, **options)

    def num_remaining_jobs(self) -> int:
        return len(self.pending_jobs) + len(self.active_jobs) + len(self.parked)

    @property
    def used_tokens(self) -> int:
        """In pages that some job holds."""
        return len(self.pagetable.referenced_pages) * PAGE_SIZE

    @property
    def evicted_tokens(self) -> int:
        """Counter: in pages that somebody could have reused, and that somebody else got."""
        return self.evicted_before + int(self.pagetable.metrics["evictions_live"]) * PAGE_SIZE

    # --- coming and going -------------------------------------------------------------------------------------------

    def prepare(self, job: Exl3Job) -> None:
        """Get ready to start `job`: hash its prompt, see that it fits.

        Raises:
            AssertionError: it never can, whatever room there is.
        """
        again = job.generator is not None
        job.max_rq_tokens = job.orig_max_rq_tokens  # preparing changes it
        job.prepare_for_queue(self, job.serial_number if again else self.job_serial, rq=again)
        self.job_serial += not again

    @torch.inference_mode()  # as the library's own steps: a recurrent model's state can be touched in no other
    def start(self, job: Exl3Job) -> bool:
        """Make a new or released `job` active, if there is room for it now."""
        for other in [*self.active_jobs, *self.pending_jobs]:
            if other.identifier.parked:
                self.pause(other)  # nobody may have taken a step since
        if job.generator is not self:  # it was released before a failure
            self.prepare(job)
        if len(self.active_jobs) + len(self.parked) + len(self.shelved) >= self.max_batch_size:
            return False
        if self.pending_jobs or not self.make_room(job):
            return False  # those who wait for pages have waited longer
        self.pending_jobs.append(job)
        self.iterate_start_jobs([])
        if job.failure is not None:
            raise job.failure
        if job in self.active_jobs:
            return True
        self.pending_jobs.remove(job)
        return False

    @torch.inference_mode()
    def drop(self, job: Exl3Job) -> None:
        """`job` leaves, wherever it is; what it held is free."""
        if job in self.parked:
            self.unpark(job)
        self.shelved.discard(job)
        self.cancel(job)

    def release(self, job: Exl3Job) -> None:
        """`job` leaves, to come back through `start`."""
        self.pause(job)
        self.shelve(job)
        self.shelved.discard(job)

    def reap_failed_job(self, job: Exl3Job, error: Exception, results: list[dict[str, Any]]) -> None:
        """Where the library contains a failure by itself. Not that of several GPUs at once, see `Exl3Stepper`."""
        super().reap_failed_job(job, error, results)
        job.failure = error
        if self.model.loaded_tp:
            raise error

    @torch.inference_mode()
    def take_over(self, lost: Batch) -> None:
        """The cache was another generator's, which failed in the middle of a step: nobody is lost."""
        lost.filter_pool.shutdown()  # a mask in the making is of a grammar that goes on
        self.evicted_before, self.job_serial = lost.evicted_tokens, lost.job_serial
        for job in [*lost.active_jobs, *lost.pending_jobs, *lost.parked, *lost.shelved]:
            if not job.is_finished and job.failure is None:
                job.generator = self
                job.requeue()
                self.pending_jobs.append(job)
        for job in [*lost.parked, *lost.shelved]:
            self.pause(job)

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, wanted: list[Exl3Job]) -> None:
        """One iteration with those who are wanted, as far as there are pages. What comes of it is in the jobs."""
        may = set(wanted)
        for job in [*self.active_jobs, *self.pending_jobs]:
            if job not in may:
                self.pause(job)
        for job in wanted:
            self.go_on(job)
        self.iterate()

    # --- pausing ----------------------------------------------------------------------------------------------------

    def pause(self, job: Exl3Job) -> None:
        """`job` is to take no part in the next step. Repeatable."""
        if job in self.active_jobs:
            self.active_jobs.remove(job)
            self.parked[job] = None
        elif job in self.pending_jobs:
            self.pending_jobs.remove(job)
            self.shelved.add(job)

    def go_on(self, job: Exl3Job) -> None:
        """`job` is to take part in the next step, if it can have pages. Repeatable."""
        if job in self.parked:
            self.unpark(job)
        elif job in self.shelved:
            self.shelved.remove(job)
            self.pending_jobs.append(job)  # nobody new is in front of it: see `start`
        if job in self.pending_jobs:  # also one that the library sent back for more pages
            self.make_room(job)

    def unpark(self, job: Exl3Job) -> None:
        del self.parked[job]
        self.active_jobs.append(job)

    @torch.inference_mode()
    def shelve(self, job: Exl3Job) -> None:
        """A paused `job` gives its pages up. Repeatable."""
        if job not in self.parked:
            return
        job.deallocate_pages()
        del self.parked[job]
        job.requeue()
        self.shelved.add(job)

    def make_room(self, job: Exl3Job) -> bool:
        """Find pages for `job`, at the cost of who is parked. False: not now."""
        pages = self.pagetable
        staying = {page.phash for other in self.active_jobs for page in other.pages}
        shared_with_parked = (pages.referenced_pages.keys() & set(job.all_unique_hashes)) - staying
        if job.current_new_pages_required() + len(shared_with_parked) > pages.max_pages - len(staying):
            return False  # nobody is shelved in vain
        while job.current_new_pages_required() > pages.num_unreferenced_pages():
            self.shelve(next(iter(self.parked)))
        return True
