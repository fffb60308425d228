"""What the synthetic engine promises beyond the contract: pinned texts, pace, and planned faults."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random
from typing import Any

import pytest
import trio
from tokenflow_synthetic import SyntheticConfig, SyntheticEngine, generate, open_in_task, open_synthetic
from tokenflow_synthetic.config import plan
from tokenflow_synthetic.vocabulary import SPECIAL, VOCABULARY, WORDS, tokenize
from trio.testing import MockClock

from tokenflow.api import EngineError, EngineStuck, Finished, InvalidRequest, Sampling, SequenceRequest
from tokenflow.testing.clocks import pinned
from tokenflow.testing.fakes import Recorder, company, record

STEP_S = 0.01


async def ask(engine: SyntheticEngine, text: str = "Once upon a time", **fields: Any) -> SequenceRequest:
    fields.setdefault("max_tokens", 8)
    return SequenceRequest(prompt=tuple(await engine.tokenize(text)), **fields)


def directive(**keys: Any) -> str:
    return json.dumps({"synthetic": keys}) + " and then?"


# --- texts ----------------------------------------------------------------------------------------------------------


def test_the_texts_are_pinned() -> None:
    """They must never change: clients' tests may rely on them."""
    assert generate("Once upon a time", 5) == " circle ridge bell boat glacier"
    assert generate("Once upon a time", 5, seed=1) == " stone night finch gravel topaz"
    assert generate("", 3) == EMPTY_PROMPT
    assert generate("Once upon a time", 0) == ""


EMPTY_PROMPT = " ash linen thorn"


def test_another_process_says_the_same() -> None:
    code = "from tokenflow_synthetic import generate; print(generate('hash seeds differ', 90))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.removesuffix("\n") == generate("hash seeds differ", 90)


def test_the_vocabulary_is_whole() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 256 + 3 + 256


async def test_the_engine_says_what_generate_says(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig()) as engine:
        assert (await record(engine, await ask(engine, max_tokens=200))).text == generate("Once upon a time", 200)
        seeded = await ask(engine, max_tokens=70, sampling=Sampling(seed=5))
        assert (await record(engine, seeded)).text == generate("Once upon a time", 70, seed=5)
        both = [await ask(engine, index=index) for index in (0, 1)]
        assert (await record(engine, both[0])).text == (await record(engine, both[1])).text, "no index in the hash"


async def test_words_are_tokens(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig()) as engine:
        text = generate("x", 40)
        assert len(await engine.tokenize(text)) == 40
        assert len(await engine.tokenize("<|im_end|>", special=True)) == 1


def test_of_all_tokens_the_longest_is_taken() -> None:
    random = Random(1)
    parts = [*WORDS[:60], *SPECIAL, " ", "a", "s", "|", "<", "é", "\n", " Acorn", " sto"]
    for special in (False, True):
        known = [text for text in VOCABULARY if len(text) > 1 and (special or text.decode() not in SPECIAL)]
        for _ in range(500):
            text = "".join(random.choices(parts, k=random.randrange(12)))
            left, expected = text.encode(), []
            while left:
                token = max((word for word in known if left.startswith(word)), key=len, default=left[:1])
                expected.append(VOCABULARY.index(token))
                left = left[len(token) :]
            assert tokenize(text, special=special) == expected, text


@pytest.mark.parametrize("one_byte", [False, True])
async def test_it_says_a_given_text_and_stops(one_byte: bool, autojump_clock: MockClock) -> None:
    text = "Ein Fluß, 河, 🌊."
    async with open_in_task(SyntheticConfig(text=text, one_byte=one_byte)) as engine:
        recorder = await record(engine, await ask(engine, max_tokens=100))
        assert (recorder.text, recorder.finished) == (text, Finished("stop"))
        again = await record(engine, await ask(engine, max_tokens=100, ignore_eos=True))
        assert again.tokens == 100
        assert again.text.startswith(text + text)


async def test_several_tokens_a_step(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig(tokens_per_step=3)) as engine:
        recorder = await record(engine, await ask(engine, max_tokens=8))
        assert [delta.tokens for delta in recorder.deltas] == [3, 3, 2]
        assert recorder.text == generate("Once upon a time", 8)


# --- pace -----------------------------------------------------------------------------------------------------------


async def test_prefill_and_rate_take_their_time(autojump_clock: MockClock) -> None:
    config = SyntheticConfig(prefill_ms=500, prefill_tokens_per_s=16, tokens_per_s=10)
    async with open_in_task(config, step_s=STEP_S) as engine:
        times: list[float] = []
        begin = trio.current_time()
        await record(engine, await ask(engine), Recorder(on_event=lambda event: times.append(trio.current_time())))
        first, second, *_, last = (time - begin for time in times[1:-1])
        assert first == pytest.approx(0.5 + 1.0, abs=3 * STEP_S)
        assert second - first == pytest.approx(0.1, abs=3 * STEP_S)
        assert last - first == pytest.approx(0.7, abs=3 * STEP_S)


async def test_who_waits_delays_nobody(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig(directives=True), step_s=STEP_S) as engine, company(engine) as group:
        slow = group.start(await ask(engine, directive(prefill_ms=60_000)))
        await slow.wait_started()
        begin = trio.current_time()
        await record(engine, await ask(engine))
        assert trio.current_time() - begin < 20 * STEP_S
        await slow.returned.wait()
        assert trio.current_time() - begin == pytest.approx(60, abs=1)


async def test_a_long_prefill_in_a_thread_ends_at_once(mock_clock: MockClock) -> None:
    """Mock time stands still: the engine's own clock runs, but nobody waits for a minute."""
    async with open_synthetic(SyntheticConfig(prefill_ms=60_000)) as engine, company(engine) as group:
        victim = group.start(await ask(engine))
        await victim.wait_started()
        victim.scope.cancel()
        await victim.returned.wait()
        assert victim.scope.cancelled_caught
        assert (await engine.stats()).slots_used == 0


# --- counts ---------------------------------------------------------------------------------------------------------


async def test_it_counts_what_it_makes(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig()) as engine:
        await record(engine, await ask(engine, id="a", max_tokens=3))
        await record(engine, await ask(engine, id="b", max_tokens=4))
        await record(engine, await ask(engine, id="a", max_tokens=5))
        assert engine.stepper.made == {"a": 8, "b": 4}
        stats = await engine.stats()
        assert (stats.generated_tokens, stats.prompt_tokens, stats.kv_tokens_used) == (12, 48, 0)


# --- planned faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3])
async def test_one_of_three_fails(after: int, autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig(directives=True)) as engine, company(engine) as group:
        good, bad, fine = [group.start(await ask(engine, text)) for text in ("a", directive(raise_at=after), "b")]
        for recorder in (good, bad, fine):
            await recorder.returned.wait()
        assert (bad.tokens, bad.finished) == (after, None)
        assert isinstance(bad.error, EngineError)
        assert good.finished == fine.finished == Finished("length")


async def test_a_refusal_has_no_event(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig(raise_in_add=True)) as engine:
        recorder = Recorder()
        with pytest.raises(EngineError):
            await record(engine, await ask(engine), recorder)
        assert recorder.events == []


async def test_a_broken_step_fails_all_and_the_engine_lives(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig(directives=True)) as engine, company(engine) as group:
        other, bad = group.start(await ask(engine)), group.start(await ask(engine, directive(break_at=2)))
        for recorder in (other, bad):
            await recorder.returned.wait()
            assert isinstance(recorder.error, EngineError)
        assert (await record(engine, await ask(engine))).finished is not None


async def test_who_hangs_hangs_alone(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig(directives=True)) as engine, company(engine) as group:
        hung = group.start(await ask(engine, directive(hang_at=2)))
        assert (await record(engine, await ask(engine))).finished is not None
        await trio.sleep(100)
        assert hung.tokens == 2
        assert not hung.returned.is_set()
        hung.scope.cancel()
        await hung.returned.wait()
        assert (await engine.stats()).slots_used == 0


async def test_a_wedged_engine_lets_its_callers_go(autojump_clock: MockClock) -> None:
    pin = pinned(autojump_clock)
    async with open_synthetic(SyntheticConfig(directives=True)) as engine, company(engine) as group:
        engine.loop.on_busy = pin
        wedged = group.start(await ask(engine, directive(wedge_at=2)))
        await wedged.wait_deltas(2)
        while not engine.loop.step_age_s:
            await trio.lowlevel.checkpoint()
        wedged.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        autojump_clock.jump(engine.loop.grace_s + 1)
        await wedged.returned.wait()
        assert isinstance(wedged.error, EngineStuck)
        engine.stepper.unwedge.set()


@pytest.mark.parametrize(
    "keys",
    [{"raise": 1}, {"raise_at": -1}, {"raise_at": "x"}, {"raise_at": True}, {"tokens_per_s": 0}, {"one_byte": 1}],
)
def test_a_directive_that_does_not_hold_is_the_askers_fault(keys: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        plan(SyntheticConfig(directives=True), directive(**keys))


def test_directives_are_off_unless_allowed() -> None:
    config = SyntheticConfig()
    assert plan(config, directive(raise_at=1)) is config
    allowed = SyntheticConfig(directives=True)
    assert plan(allowed, "no directive") is allowed
    assert plan(allowed, "user: " + directive(raise_at=1) + directive(stop_at=2)).raise_at is None
    with pytest.raises(InvalidRequest):
        plan(allowed, '{"synthetic": {')


async def test_stop_by_itself(autojump_clock: MockClock) -> None:
    async with open_in_task(SyntheticConfig(stop_at=3)) as engine:
        recorder = await record(engine, await ask(engine))
        assert (recorder.text, recorder.finished) == (generate("Once upon a time", 3), Finished("stop"))
        assert (await record(engine, await ask(engine, ignore_eos=True))).tokens == 8
