"""Twenty streams on eight slots, whose readers stall, pause, let their slots go, leave, and break something;
now and then a step of all of them fails.

Whatever happens around it, each that survives says what it says alone, and at the end nobody holds a page.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from tokenflow_exllama.engine import ExllamaEngine
from tokenflow_exllamav2 import Exl2Config
from tokenflow_exllamav2.config import PAGE
from tokenflow_exllamav2.stepper import Exl2Stepper

from plugins.exllama_common.tests.faults import FailingSteps
from tokenflow.api import Dry, Mirostat, Sampling, SequenceRequest, StepLoop, serving
from tokenflow.testing.fakes import Recorder, company, record

from .rig.model import load_rig

STREAMS, SLOTS, CACHE = 20, 8, 12 * PAGE
"""The cache is less than eight of the longer ones need."""
Alone = tuple[SequenceRequest, Recorder]
FATES = ("reads", "reads", "stalls", "pauses", "leaves", "breaks")


def requests() -> list[SequenceRequest]:
    """What the streams ask for: prompts that are alike at the beginning, of all lengths, in all manners."""
    drawn = random.Random(5)
    whole = drawn.choices(range(256), k=700)
    samplings = (
        Sampling(temperature=0),
        Sampling(seed=1),
        Sampling(seed=2, mirostat=Mirostat(tau=3.0)),
        Sampling(seed=3, dry=Dry(multiplier=1.0)),
        Sampling(seed=4, banned_strings=("a b", "e", "k")),
    )
    return [
        SequenceRequest(
            prompt=tuple(whole[: drawn.choice((1, 30, 250, 256, 300, 520, 700))]),
            max_tokens=drawn.choice((1, 5, 20, 40)),
            sampling=samplings[n % len(samplings)],
            logprobs=2 if n % 3 == 0 else None,
            stop=("mi",) if n % 4 == 0 else (),
        )
        for n in range(STREAMS)
    ]


class Trial:
    """One evening with the engine.

    Args:
        alone: each request with what it gives by itself.
    """

    def __init__(self, engine: ExllamaEngine, stepper: Exl2Stepper, alone: list[Alone], seed: int) -> None:
        self.engine = engine
        self.stepper = stepper
        self.alone = alone
        self.drawn = random.Random(seed)
        self.fates = self.drawn.choices(FATES, k=STREAMS)

    async def run(self) -> None:
        recorders = []
        async with company(self.engine) as group, trio.open_nursery() as readers:
            for fate, (request, _) in zip(self.fates, self.alone, strict=True):
                recorder = Recorder(window=self.drawn.choice((1, 3, 64)), follow=fate in ("reads", "breaks"))
                recorders.append(group.start(request, recorder))
                readers.start_soon(getattr(self, f"_{fate}"), recorder)
                if self.drawn.random() < 0.5:
                    await trio.sleep(self.drawn.random() * 0.01)
            for recorder in recorders:
                await recorder.returned.wait()
        for fate, recorder, (_, wanted) in zip(self.fates, recorders, self.alone, strict=True):
            self._check(fate, recorder, wanted)
        stats = await self.engine.stats()
        assert (stats.slots_used, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)
        batch = self.stepper.batch
        assert not (batch.jobs or batch.parked or batch.shelved or batch.active_jobs)
        assert sorted(page.page_index for page in batch.unreferenced_pages.values()) == list(range(batch.max_pages))

    def _check(self, fate: str, recorder: Recorder, wanted: Recorder) -> None:
        if recorder.finished is not None:
            assert recorder.text == wanted.text
            assert (recorder.tokens, recorder.finished) == (wanted.tokens, wanted.finished)
            assert _logprobs(recorder) == _logprobs(wanted)
        else:
            assert fate in ("leaves", "breaks"), recorder.error
            assert wanted.text.startswith(recorder.text)
        assert (recorder.error is None) or fate == "breaks", recorder.error

    async def _reads(self, recorder: Recorder) -> None:
        pass

    async def _stalls(self, recorder: Recorder) -> None:
        while not recorder.returned.is_set():
            await trio.sleep(self.drawn.random() * 0.02)
            recorder.accept(self.drawn.randrange(1, 4))

    async def _pauses(self, recorder: Recorder) -> None:
        """Now and then its slot goes to others, too."""
        recorder.catch_up()
        for _ in range(3):
            await trio.sleep(self.drawn.random() * 0.02)
            recorder.send.pause()
            if self.drawn.random() < 0.5:
                recorder.send.give_up_slot()
            await trio.sleep(self.drawn.random() * 0.03)
            recorder.send.take_slot()
            recorder.send.resume()

    async def _leaves(self, recorder: Recorder) -> None:
        await self._stall_for(recorder, self.drawn.random() * 0.05)
        recorder.scope.cancel()

    async def _breaks(self, recorder: Recorder) -> None:
        """A fault in its own part of a step, wherever it is then."""
        await trio.sleep(self.drawn.random() * 0.05)
        for job in [*self.stepper.batch.jobs, *self.stepper.batch.shelved]:
            if job.owner.send is recorder.send:
                job.rng = None

    async def _stall_for(self, recorder: Recorder, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._stalls(recorder)


def _logprobs(recorder: Recorder) -> list[tuple[str, float]]:
    return [(one.token, round(one.logprob, 4)) for delta in recorder.deltas for one in delta.logprobs]


class Evening:
    """The engine on virtual time, a millisecond a step, and what each request gives by itself."""

    def __init__(self, directory: Path, **options: Any) -> None:
        config = Exl2Config(model=str(directory), slots=SLOTS, context_length=1024, cache_tokens=CACHE, **options)
        self.stepper = Exl2Stepper(config, load_rig)
        self.alone: list[Alone] = []

    async def trials(self, seeds: range) -> None:
        async def pace(loop: StepLoop) -> None:
            await trio.sleep(0.001)

        loop = StepLoop(self.stepper)
        async with serving(loop, pace=pace):
            engine = ExllamaEngine(loop, self.stepper)
            for request in requests():
                if "banned_strings" not in engine.info.capabilities:
                    request = _without_bans(request)
                self.alone.append((request, await record(engine, request)))
                self.stepper.batch.reset_page_table()
            failing = FailingSteps(self.stepper, random.Random(seeds.start))
            for seed in seeds:
                try:
                    await Trial(engine, self.stepper, self.alone, seed).run()
                    assert failing.started_over == failing.count
                except BaseException as exc:
                    exc.add_note(f"seed {seed}")
                    raise


def _without_bans(request: SequenceRequest) -> SequenceRequest:
    return replace(request, sampling=replace(request.sampling, banned_strings=None))


async def test_two_evenings(directory: Path, autojump_clock: trio.testing.MockClock) -> None:
    await Evening(directory).trials(range(2))


@pytest.mark.stress
@pytest.mark.parametrize("options", [{}, {"draft_model": "another"}, {"ngram_draft": True}], ids=str)
async def test_many_evenings(
    directory: Path, autojump_clock: trio.testing.MockClock, share: Callable[[int], int], options: dict[str, Any]
) -> None:
    await Evening(directory, **options).trials(range(share(200)))
