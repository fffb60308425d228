"""Order, number and independence of sequences."""

from __future__ import annotations

import pytest
import trio

from tokenflow.api import Delta, Engine, EngineStats, Finished, SequenceRequest, Started
from tokenflow.testing.conformance.base import Kit, eventually, live, need
from tokenflow.testing.fakes import Recorder, company, record
from tokenflow.testing.instruments import LongestStep

COUNTERS = ("prompt_tokens", "generated_tokens", "steps", "kv_tokens_evicted")


def check_whole(recorder: Recorder, request: SequenceRequest) -> None:
    """A sequence that ended well."""
    assert recorder.events[0] == Started(len(request.prompt), recorder.started.cached_tokens if recorder.started else 0)
    assert all(isinstance(event, Delta) for event in recorder.events[1:-1])
    assert isinstance(recorder.events[-1], Finished)
    assert recorder.finished is not None
    assert recorder.finished.reason in ("stop", "length")
    if recorder.finished.reason == "length" or request.ignore_eos:
        assert recorder.tokens == request.max_tokens
    assert recorder.at_return == len(recorder.events), "something came after generate had returned"


class Events(Kit):
    @live
    async def test_started_then_deltas_then_one_finished(self, engine: Engine) -> None:
        """The events are Started, deltas, and one Finished, which is the last."""
        request = await self.request(engine)
        check_whole(await record(engine, request), request)

    @live
    async def test_max_tokens_is_exact(self, engine: Engine) -> None:
        """max_tokens is exact, and the reason is `length`."""
        for n in (1, 2, 7):
            recorder = await record(engine, await self.request(engine, max_tokens=n))
            assert (recorder.tokens, recorder.finished) == (n, Finished("length"))

    @live
    async def test_the_same_again(self, engine: Engine) -> None:
        """The same greedy request gives the same text."""
        request = await self.request(engine)
        assert (await record(engine, request)).text == (await record(engine, request)).text

    @live
    async def test_many_at_once(self, engine: Engine) -> None:
        """Twice as many sequences as slots all end well, and each says what it says alone."""
        request = await self.request(engine)
        alone = await record(engine, request)
        async with company(engine) as group:
            recorders = [group.start(request) for _ in range(2 * engine.info.slots)]
            for recorder in recorders:
                await recorder.returned.wait()
                assert recorder.error is None
                check_whole(recorder, request)
                assert recorder.text == alone.text or not self.exact_in_company

    @live
    async def test_first_come_first_served(self, engine: Engine) -> None:
        """Who waits for a slot gets it in order of arrival."""
        order: list[int] = []
        async with company(engine) as group:
            held = await self.hold_slots(engine, group, engine.info.slots)
            queue: list[Recorder] = []
            for n in range(4):

                def note(event: object, n: int = n) -> None:
                    if isinstance(event, Started):
                        order.append(n)

                queue.append(group.start(await self.request(engine), Recorder(on_event=note)))
                await eventually(lambda n=n: self._waiting(engine, n + 1))  # type: ignore[misc]
            assert order == []
            held[0].scope.cancel()
            for recorder in queue:
                await recorder.returned.wait()
        assert order == [0, 1, 2, 3]

    async def _waiting(self, engine: Engine, n: int) -> bool:
        return (await engine.stats()).waiting == n

    @live
    async def test_a_bad_request_ends_alone(self, engine: Engine) -> None:
        """A prompt token outside the vocabulary is refused; the other sequences go on."""
        if not engine.info.vocab_size:
            pytest.skip("the engine does not say how large its vocabulary is")
        async with company(engine) as group:
            good = group.start(await self.request(engine))
            bad = group.start(SequenceRequest(prompt=(engine.info.vocab_size + 7,), max_tokens=4))
            await bad.returned.wait()
            await good.returned.wait()
        assert bad.error is not None
        assert not bad.deltas
        assert good.finished is not None
        assert (await engine.stats()).slots_used == 0

    @live
    async def test_a_failing_reader_ends_alone(self, engine: Engine) -> None:
        """What the stream raises on an event ends that sequence; the others go on, and the slot is free."""

        def fail(event: object) -> None:
            if isinstance(event, Delta):
                raise ZeroDivisionError

        async with company(engine) as group:
            good = group.start(await self.request(engine))
            bad = group.start(await self.request(engine), Recorder(on_event=fail))
            await bad.returned.wait()
            await good.returned.wait()
        assert isinstance(bad.error, ZeroDivisionError)
        assert len(bad.deltas) == 1
        assert good.finished is not None
        assert (await engine.stats()).slots_used == 0

    @live
    async def test_counters_only_rise(self, engine: Engine) -> None:
        """Counters never fall, and count what was generated; a quiet engine holds nothing."""
        seen: list[EngineStats] = [await engine.stats()]
        for _ in range(3):
            recorder = await record(engine, await self.request(engine))
            seen.append(await engine.stats())
            assert seen[-1].generated_tokens - seen[-2].generated_tokens == recorder.tokens
            assert (seen[-1].slots_used, seen[-1].waiting, seen[-1].paused) == (0, 0, 0)
            for name in COUNTERS:
                assert getattr(seen[-1], name) >= getattr(seen[-2], name), name
        assert seen[-1].slots == engine.info.slots

    @live
    async def test_the_event_loop_is_not_held_up(self, engine: Engine) -> None:
        """No task step takes long, neither in prefill nor in decoding nor at a cancel."""
        for _ in range(3):  # a busy machine may hold up a step; an engine that blocks does it each time
            timer = LongestStep()
            trio.lowlevel.add_instrument(timer)
            async with company(engine) as group:
                victim = group.start(await self.long_request(engine))
                await victim.wait_started()
                victim.scope.cancel()
                await record(engine, await self.long_request(engine))
            trio.lowlevel.remove_instrument(timer)
            if timer.longest_s <= self.max_block_s:
                return
        raise AssertionError(f"a step of {timer.task} held the event loop for {timer.longest_s:.3f} s")

    @live
    async def test_logprobs(self, engine: Engine) -> None:
        """Each token has its log-probability and k alternatives, the likeliest first."""
        need(engine, "logprobs")
        k = min(3, engine.info.max_logprobs)
        recorder = await record(engine, await self.request(engine, logprobs=k))
        logprobs = [logprob for delta in recorder.deltas for logprob in delta.logprobs]
        assert len(logprobs) == recorder.tokens
        assert b"".join(logprob.bytes for logprob in logprobs).decode(errors="replace").startswith(recorder.text)
        for logprob in logprobs:
            assert logprob.logprob <= 0
            assert len(logprob.top) == k
            tops = [top.logprob for top in logprob.top]
            assert tops == sorted(tops, reverse=True)

    @live
    async def test_no_logprobs_unless_asked(self, engine: Engine) -> None:
        """Without the wish there are none."""
        recorder = await record(engine, await self.request(engine))
        assert not any(delta.logprobs for delta in recorder.deltas)
