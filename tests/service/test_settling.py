"""What a step made is put for every stream and then settled: what a stream knows of itself in between, in mock time."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.http.test_events import Kernel
from tests.service.conftest import open_rig, read_all
from tokenflow.core.types import Attendance, Delta, Event, Finished
from tokenflow.dialects.openai_chat import ChatEncoder
from tokenflow.http.events import EventBody
from tokenflow.service.choice import Choice

together = pytest.mark.parametrize("together", [False, True])


def send(events: list[tuple[Choice, Event]], together: bool) -> None:
    for choice, event in events:
        (choice.put if together else choice.send_nowait)(event)
    for choice, _ in events:
        choice.settle()


async def test_one_that_has_ended_is_not_idle(autojump_clock: MockClock) -> None:
    """Its last delta and its end come together."""
    kept = Attendance(on_disconnect="continue", grace_s=100.0, retention_s=1000.0)
    async with open_rig(slots=2, tokens_per_s=20) as r:
        stream, reader = await r.open(max_tokens=5, attendance=kept)
        await read_all(reader)
        await r.settle()
        assert stream.idle_since is None


@together
async def test_one_that_is_written_to_at_once_and_has_credit_is_not_idle(
    autojump_clock: MockClock, together: bool
) -> None:
    """One choice uses up its credit and the other ends; then the reader takes everything."""
    async with open_rig(slots=2, prefill_ms=1_000_000, stream={"window": 2}) as r:
        stream, reader = await r.open(n=2, max_tokens=50)
        kernel = Kernel()
        sent = aiter(EventBody(reader, ChatEncoder("tf-1", "m", 0, False, 2), 15.0, direct=kernel.direct))
        async with trio.open_nursery() as nursery:
            await anext(sent)
            nursery.start_soon(anext, sent)
            await trio.sleep(1)
            one, two = stream._choices
            send([(one, Delta("a")), (two, Delta("b")), (two, Finished("stop"))], together)
            assert kernel.written
            assert not one.stalled
            assert (stream.phase.value, stream.idle_since) == ("decode", None)
            nursery.cancel_scope.cancel()
        reader.close()


@together
@pytest.mark.parametrize("late", [Delta("c"), Finished("stop")], ids=type)
async def test_a_token_that_came_in_time_keeps_it_alive(autojump_clock: MockClock, late: Event, together: bool) -> None:
    """Also where what came with it is handed out after the deadline."""
    spans = {"idle_timeout_s": 10.0, "prefill_timeout_s": 100.0}
    async with open_rig(slots=2, prefill_ms=1_000_000, timeouts=spans) as r:
        stream, reader = await r.open(n=2, max_tokens=50)
        await trio.sleep(1)
        one, two = stream._choices
        one.send_nowait(Delta("a"))
        autojump_clock.jump(stream.due - trio.current_time() - 0.001)
        (one.put if together else one.send_nowait)(Delta("b"))
        autojump_clock.jump(0.002)
        send([(two, late)], together)
        one.settle()
        called_off = stream._called_off
        reader.close()
        assert not called_off


@together
async def test_silence_after_the_last_token_still_counts(autojump_clock: MockClock, together: bool) -> None:
    """An engine that has said its last word and does not return is given up after `idle_timeout_s`."""
    async with open_rig(prefill_ms=1_000_000, timeouts={"idle_timeout_s": 10.0, "prefill_timeout_s": 100.0}) as r:
        stream, reader = await r.open(max_tokens=5)
        await trio.sleep(1)
        [choice] = stream._choices
        send([(choice, Delta("a")), (choice, Finished("stop"))], together)
        assert stream.due == trio.current_time() + 10.0
        reader.close()
