"""Twenty streams on eight slots, and too few pages for them; they leave, pause, stall, give up their slots and fail,
and now and then so does a step of all of them.

Whoever gets to its end has said what it says alone, whoever does not has said a beginning of it, and nothing is left.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import trio
import trio.testing
from tokenflow_exllama.engine import ExllamaEngine
from tokenflow_exllamav3 import Exl3Config
from tokenflow_exllamav3.config import PAGE
from tokenflow_exllamav3.job import Exl3Job
from tokenflow_exllamav3.stepper import Exl3Stepper

from plugins.exllama_common.tests.faults import FailingSteps
from plugins.exllama_common.tests.table import GREEDY, Table
from tokenflow.api import Dry, Sampling, SequenceRequest, StepLoop, serving
from tokenflow.testing.fakes import Recorder, company
from tokenflow.testing.instruments import ordered_by

from .rig.model import hash_load

SLOTS, STREAMS, SEEDS = 8, 20, 200
USUAL: dict[str, Any] = {"model": "rig", "slots": SLOTS, "context_length": 1024, "chunk_size": 256}
CONFIGS = [
    Exl3Config(**USUAL, cache_tokens=12 * PAGE),
    Exl3Config(**USUAL, cache_tokens=16 * PAGE, reserve_tokens=PAGE),
    Exl3Config(**USUAL, cache_tokens=16 * PAGE, draft_model="rig", draft_tokens=3),
    Exl3Config(**USUAL, cache_tokens=12 * PAGE, ngram_match=1, draft_tokens=2),
]


def new_stepper(config: Exl3Config) -> Exl3Stepper:
    stepper = Exl3Stepper(config, hash_load)
    stepper.open()
    return stepper


@cache
def repertoire() -> list[tuple[SequenceRequest, bytes]]:
    """What may be asked for, and what is said to it by who is alone."""
    table = Table(new_stepper(CONFIGS[0]))
    samplings = [
        GREEDY,
        Sampling(seed=5),
        Sampling(seed=6, top_p=0.9, repetition_penalty=1.3, dry=Dry(multiplier=1.0)),
        Sampling(seed=7, banned_strings=(" ba", "du ", " ko", "mi")),
    ]
    rng = random.Random(0)
    asked = []
    for n in range(24):
        prompt = table.prompt(rng.choice((20, 240, 500, 600)), seed=n % 5)  # some are alike
        request = table.request(prompt, rng.randint(20, 60), sampling=samplings[n % 4], ignore_eos=bool(n % 3))
        asked.append((request, table.alone(**fields_of(request)).data))
    table.stepper.close()
    return asked


def fields_of(request: SequenceRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("prompt", "max_tokens", "sampling", "ignore_eos")}


class Broken:
    reqs_past_ids = False

    def forward(self, *args: Any, **options: Any) -> None:
        raise ZeroDivisionError("a fault of the test's")


class Crowd:
    """One evening with a crowd.

    Args:
        seed: of all that happens.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.stepper = Exl3Stepper(CONFIGS[seed % len(CONFIGS)], hash_load)
        self.loop = StepLoop(self.stepper)
        self.asked = self.rng.sample(repertoire(), STREAMS)
        self.broken: set[Exl3Job] = set()

    async def run(self) -> None:
        async with serving(self.loop, pace=self.pace):
            engine = ExllamaEngine(self.loop, self.stepper)
            failing = FailingSteps(self.stepper, self.rng)
            async with company(engine) as group, trio.open_nursery() as nursery:
                recorders = []
                for request, _ in self.asked:
                    recorders.append(group.start(request, Recorder(window=self.rng.randint(1, 12), follow=False)))
                    nursery.start_soon(self.attend, recorders[-1])
                    await trio.sleep(self.rng.uniform(0, 3))
                for recorder in recorders:
                    await recorder.returned.wait()
                nursery.cancel_scope.cancel()
            self.check(recorders)
            assert failing.started_over == failing.count

    async def pace(self, loop: StepLoop) -> None:
        """Between two steps: time passes, somebody's sampler may break, and the library's own books are checked."""
        await trio.sleep(1)
        batch = self.stepper.batch
        if batch.active_jobs and self.rng.random() < 0.02:
            job = self.rng.choice(batch.active_jobs)
            job.sampler = Broken()
            self.broken.add(job)
        if self.rng.random() < 0.05:
            batch.pagetable.validate_pagetable([*batch.active_jobs, *batch.parked])
        assert len(batch.active_jobs) + len(batch.parked) + len(batch.shelved) + len(batch.pending_jobs) <= SLOTS

    async def attend(self, recorder: Recorder) -> None:
        """A reader with moods."""
        rng = self.rng
        while not recorder.returned.is_set():
            await trio.sleep(rng.expovariate(0.5))
            mood = rng.random()
            if mood < 0.02:
                recorder.scope.cancel()
            elif mood < 0.1:
                recorder.send.pause()
                await trio.sleep(rng.uniform(0, 60))
                recorder.send.resume()
            elif mood < 0.2:
                recorder.send.give_up_slot()
                await trio.sleep(rng.uniform(0, 20))
                recorder.send.take_slot()
            elif mood < 0.7:
                recorder.accept(rng.randint(1, 12))

    def check(self, recorders: list[Recorder]) -> None:
        for recorder, (request, wanted) in zip(recorders, self.asked, strict=True):
            text = wanted.decode(errors="replace")
            if recorder.finished is not None:
                assert recorder.text == text
            else:
                assert recorder.error is not None or recorder.scope.cancelled_caught
                assert text.startswith(recorder.text)
            assert recorder.tokens <= request.max_tokens
        failed = [recorder for recorder in recorders if recorder.error is not None]
        assert len(failed) <= len(self.broken), "somebody failed for somebody else's fault"
        batch = self.stepper.batch
        assert batch.used_tokens == 0
        assert not batch.num_remaining_jobs() and not batch.shelved
        assert self.loop.held == self.loop.waiting == 0
        batch.pagetable.validate_pagetable([])


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    """A record of a failure keeps its frames, and they the jobs."""
    caplog.set_level(logging.CRITICAL, "tokenflow.exllamav3")


def test_a_crowd() -> None:
    play(2)


@pytest.mark.stress
def test_two_hundred_crowds(share: Callable[[int], int]) -> None:
    for seed in range(share(SEEDS)):
        play(seed)


def play(seed: int) -> None:
    with ordered_by(seed):
        trio.run(Crowd(seed).run, clock=trio.testing.MockClock(autojump_threshold=0))
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Exl3Job], "jobs are left behind"
