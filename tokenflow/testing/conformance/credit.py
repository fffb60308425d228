"""The reader sets the pace: an engine sends no more than `limit` deltas, and who may send nothing delays nobody."""

from __future__ import annotations

from functools import partial

import pytest

from tokenflow.api import Engine, Released, Resumed, SequenceRequest
from tokenflow.testing.conformance.base import Kit, eventually, live, need
from tokenflow.testing.fakes import Company, Recorder, company, record

WINDOW = 4


def _has_sent(n: int, recorder: Recorder) -> bool:
    return recorder.send.sent >= n


def _has_given_up_since(count: int, recorder: Recorder) -> bool:
    return isinstance(recorder.events[-1], Released) and len(recorder.events) > count


async def _stalled(group: Company, request: SequenceRequest) -> Recorder:
    """One whose reader takes nothing, once it has sent what it may."""
    recorder = group.start(request, Recorder(window=WINDOW, follow=False))
    await recorder.until(lambda recorder: recorder.send.stalled)
    return recorder


class Credit(Kit):
    async def _paused(self, engine: Engine, n: int) -> bool:
        return (await engine.stats()).paused == n

    async def _waits(self, engine: Engine) -> bool:
        return (await engine.stats()).waiting == 1

    @live
    async def test_no_more_than_the_limit(self, engine: Engine) -> None:
        """Without a reader exactly `limit` deltas come; then the sequence holds its slot and waits."""
        need(engine, "pause")
        async with company(engine) as group:
            slow = await _stalled(group, await self.request(engine))
            await eventually(lambda: self._paused(engine, 1))
            assert slow.send.sent == WINDOW
            assert (await engine.stats()).slots_used == 1
            for more in (1, 2):
                target = slow.send.limit + more
                slow.accept(more)
                await slow.until(partial(_has_sent, target))
                await eventually(lambda: self._paused(engine, 1))
                assert slow.send.sent == target
            slow.scope.cancel()
            await slow.returned.wait()

    @live
    async def test_others_go_on(self, engine: Engine) -> None:
        """While one sequence has no credit, the others run to their end, and it gets nothing."""
        need(engine, "pause")
        if engine.info.slots < 2:
            pytest.skip("the engine has one slot")
        async with company(engine) as group:
            slow = await _stalled(group, await self.request(engine))
            fast = [await record(engine, await self.request(engine)) for _ in range(2)]
            assert all(recorder.finished for recorder in fast)
            assert slow.send.sent == WINDOW
            slow.catch_up()
            await slow.returned.wait()
        assert slow.finished is not None

    @live
    async def test_a_stall_changes_nothing(self, engine: Engine) -> None:
        """A sequence that was stalled again and again says what it says undisturbed."""
        need(engine, "pause")
        request = await self.request(engine)
        undisturbed = await record(engine, request)
        async with company(engine) as group:
            slow = group.start(request, Recorder(window=1, follow=False))
            while slow.finished is None:
                await slow.until(lambda recorder: recorder.send.stalled or recorder.finished)
                slow.accept(1)
            await slow.returned.wait()
        assert slow.text == undisturbed.text
        assert slow.tokens == undisturbed.tokens

    @live
    async def test_pause_and_resume(self, engine: Engine) -> None:
        """Pause takes all credit; at most what is under way still comes. Resume goes on as if nothing had been."""
        need(engine, "pause")
        request = await self.request(engine)
        undisturbed = await record(engine, request)
        pauses: list[int] = []

        def pause(event: object) -> None:
            if len(recorder.deltas) == 3 and not pauses:
                pauses.append(recorder.send.sent)
                recorder.send.pause()

        recorder = Recorder(window=WINDOW, on_event=pause)
        async with company(engine) as group:
            group.start(request, recorder)
            await recorder.until(lambda recorder: pauses)
            await eventually(lambda: self._paused(engine, 1))
            assert recorder.send.sent <= pauses[0] + min(self.tokens_in_flight, WINDOW)
            recorder.send.resume()
            await recorder.returned.wait()
        assert recorder.text == undisturbed.text

    @live
    async def test_giving_up_the_slot(self, engine: Engine) -> None:
        """Asked to, a parked sequence frees its slot for others, and goes on later as if nothing had been."""
        need(engine, "pause", "release")
        request = await self.request(engine)
        undisturbed = await record(engine, request)
        async with company(engine) as group:
            slow = await _stalled(group, request)
            slow.send.give_up_slot()
            await slow.until(lambda recorder: isinstance(recorder.events[-1], Released))
            assert (await engine.stats()).slots_used == 0
            assert (await record(engine, await self.request(engine, "Something else"))).finished is not None
            assert slow.send.sent == WINDOW
            slow.send.take_slot()
            slow.catch_up()
            await slow.returned.wait()
        assert any(isinstance(event, Resumed) for event in slow.events)
        assert (slow.text, slow.tokens) == (undisturbed.text, undisturbed.tokens)

    @live
    async def test_giving_up_the_slot_again(self, engine: Engine) -> None:
        """Called back and asked again, it answers again, whether it has had a slot in between or waits for one."""
        need(engine, "pause", "release")
        request = await self.request(engine)
        undisturbed = await record(engine, request)
        async with company(engine) as group:
            slow = await _stalled(group, request)
            slow.accept(1)
            for _ in range(3):
                count = len(slow.events)
                slow.send.take_slot()
                slow.send.give_up_slot()
                await slow.until(partial(_has_given_up_since, count))
            held = await self.hold_slots(engine, group, engine.info.slots)
            slow.accept(1)  # it may have used what it had
            slow.send.take_slot()
            await eventually(lambda: self._waits(engine))
            count = len(slow.events)
            slow.send.give_up_slot()
            await slow.until(partial(_has_given_up_since, count))
            for recorder in held:
                recorder.scope.cancel()
            slow.send.take_slot()
            slow.catch_up()
            await slow.returned.wait()
        assert (slow.text, slow.tokens) == (undisturbed.text, undisturbed.tokens)

    @live
    async def test_a_cancel_without_its_slot(self, engine: Engine) -> None:
        """Who gave its slot up can be cancelled, or called back before it was gone."""
        need(engine, "pause", "release")
        async with company(engine) as group:
            slow = await _stalled(group, await self.request(engine))
            for _ in range(3):
                slow.send.give_up_slot()
                slow.send.take_slot()
            slow.send.give_up_slot()
            await slow.until(lambda recorder: isinstance(recorder.events[-1], Released))
            slow.scope.cancel()
            await slow.returned.wait()
            assert slow.error is None
        assert (await record(engine, await self.request(engine))).finished is not None

    @live
    async def test_a_cancel_while_stalled(self, engine: Engine) -> None:
        """Who waits for credit can be cancelled; the slot is free when generate returns."""
        need(engine, "pause")
        async with company(engine) as group:
            held = await self.hold_slots(engine, group, engine.info.slots)
            await eventually(lambda: self._paused(engine, len(held)))
            held[0].scope.cancel()
            await held[0].returned.wait()
            assert (await engine.stats()).slots_used == engine.info.slots - 1
            assert (await record(engine, await self.request(engine))).finished is not None
