"""A day on the mock clock, in seconds: thousands of streams of every kind come and go, and nothing of them stays."""

from __future__ import annotations

import gc
import json
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from statistics import linear_regression

import pytest
import trio
from tokenflow_synthetic import open_in_task
from trio.testing import MockClock

from tests.service.conftest import Rig, open_rig, read_all
from tokenflow.core.types import Attendance

DAY_S = 86_400.0
STREAMS = 600
KINDS = ("reads", "leaves", "pauses", "comes back", "continues", "is cancelled", "waits in vain")
SLOPE_MIB_PER_H = 1.0


@pytest.mark.stress
async def test_a_day_leaves_nothing(autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]) -> None:
    random, kinds = Random("a day"), Counter[str]()
    engine = partial(open_in_task, step_s=0.2)  # virtual seconds are free, steps are not
    held: list[tuple[float, float]] = []
    async with (
        open_rig(slots=4, replay={"retention_s": 60.0}, open_engine=engine) as rig,
        trio.open_nursery() as nursery,
    ):
        began, tasks = trio.current_time(), trio.lowlevel.current_statistics().tasks_living
        for n in range(STREAMS):
            kind = random.choice(KINDS)
            kinds[kind] += 1
            nursery.start_soon(live, rig, kind, Random(f"a day {n}"))
            await trio.sleep_until(began + n * DAY_S / STREAMS)
            if n % 60 == 59:
                rig.sink.events.clear()  # the test's own memory
                gc.collect()
                held.append(((trio.current_time() - began) / 3600, resident_mib()))
        await rig.settle()
        gauges = await rig.service.gauges()
        admission = rig.service.model("").admission
        await trio.sleep(120.0)
        assert rig.service.streams("-") == []
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert (admission.free, admission.waiting) == (4, 0)
    slope = linear_regression(*zip(*held[2:], strict=True)).slope
    figures = {"test": "a day", "virtual_s": DAY_S, "streams": dict(kinds), "slope_mib_per_virtual_h": round(slope, 4)}
    with capsys.disabled():
        print("\n" + json.dumps(figures | {"generated": gauges.models[0].generated_tokens}))
    assert slope < SLOPE_MIB_PER_H


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


async def live(rig: Rig, kind: str, random: Random) -> None:
    attendances = {
        "comes back": Attendance(on_disconnect="pause", grace_s=30.0, retention_s=60.0),
        "continues": Attendance(on_disconnect="continue", grace_s=30.0, retention_s=60.0),
    }
    wishes = {"attendance": attendances[kind]} if kind in attendances else {}
    if kind == "waits in vain":
        wishes["timeouts"] = {"idle_timeout_s": 5.0}
        prompt = '{"synthetic": {"hang_at": 3}}'
    else:
        prompt = f"prompt {random.random()}"
    stream, reader = await rig.open(prompt, max_tokens=random.randrange(1, 30), **wishes)
    if kind in ("reads", "waits in vain"):
        await read_all(reader)
        return
    records = await reader.read()
    reader.ack(records[-1].n)
    if kind == "pauses":
        stream.pause()
        await trio.sleep(random.uniform(0, 20))
        stream.resume()
        await read_all(reader)
    elif kind == "is cancelled":
        stream.cancel("client")
        await read_all(reader)
    else:
        reader.close()
        if kind == "comes back":
            await trio.sleep(random.uniform(0, 20))
            await read_all(stream.attach(records[-1].n))
