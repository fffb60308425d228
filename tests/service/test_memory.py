"""Memory, as it is accounted and as it is: detached streams with full logs stay within what is configured."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.e2e.wire import directive
from tests.service.conftest import STEP_S, open_rig
from tokenflow.core.types import Attendance

STREAMS, TOTAL = 120, 2_000_000
CONTINUE = Attendance(on_disconnect="continue", grace_s=300.0, retention_s=300.0)


async def test_detached_streams_with_full_logs_stay_within_the_total(autojump_clock: MockClock) -> None:
    async with open_rig(slots=8, limits={"max_waiting": STREAMS}, replay={"total_bytes": TOTAL}) as r:
        await r.whole(max_tokens=5)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for i in range(STREAMS):
            _, reader = await r.open(f"prompt {i}", max_tokens=200, attendance=CONTINUE)
            reader.close()
        while r.service.live_streams:
            await trio.sleep(STEP_S * 10)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gauges = await r.service.gauges()
        assert TOTAL * 0.8 < gauges.replay_bytes <= TOTAL, "it is full, and what went over is evicted"
        assert gauges.replay_records_evicted > 0
        per_stream = 6_000  # a stream's own objects: its tasks, sends and log, whatever that holds
        assert held - before <= gauges.replay_bytes * 1.1 + per_stream * STREAMS
        await trio.sleep(301)
        assert (await r.service.gauges()).kept_streams == (await r.service.gauges()).replay_bytes == 0


@pytest.mark.parametrize("plan", [{}, {"raise_at": 1}, {"raise_in_add": True}, {"break_at": 1}])
async def test_what_is_kept_of_an_ended_stream_has_nothing_of_its_request(
    autojump_clock: MockClock, plan: dict[str, Any]
) -> None:
    """Errors among it: the frames that an exception came through hold everything that was in them."""
    prompt = "a long prompt " * 100 + directive(**plan)
    async with open_rig(slots=8, limits={"max_waiting": STREAMS}, context_length=5000) as r:
        held = []
        for count in (5, 40):
            for _ in range(count):
                _, reader = await r.open(prompt, max_tokens=3, attendance=CONTINUE)
                reader.close()
            while r.service.live_streams:
                await trio.sleep(STEP_S * 10)
            r.sink.events.clear()
            r.engine.stepper.forget()
            gc.collect()
            if not held:
                tracemalloc.start()
            held.append(tracemalloc.get_traced_memory()[0] - (await r.service.gauges()).replay_bytes)
        tracemalloc.stop()
        assert held[1] <= held[0], "all of it is accounted"


async def test_streams_that_come_and_go_leave_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "tokenflow")  # a line a stream would be kept by the test's own capture
    async with open_rig(slots=8) as r:
        for _ in range(20):
            await r.whole(max_tokens=5)
        await r.settle()
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(300):
            await r.whole(max_tokens=5)
        await r.settle()
        r.sink.events.clear()
        r.engine.stepper.forget()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # Trio prunes its heap of deadlines only when a thousand are stale, 270 bytes each; 300 streams' own are more.
        # Their ids are remembered, 150 bytes each.
        assert after - before < 300_000 + 300 * 150
