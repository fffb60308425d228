"""Thousands of slow connections beside a hundred good streams, which must not notice: `slowhttptest` against a server.

A third each of heads that drip, bodies that drip, and readers that take a few bytes at a time. The good ones open a
stream, time its first token, read on a while and leave. What they see beside the slow ones is compared with what they
saw before, in the same run; the server's memory is read when the slow ones are all there, and again after that. Then
each slow one must be cut off in its time.

The program's connections all drip at the same moment, which no crowd of strangers does: so it runs many times, each at
a moment of its own, and with the least priority, for strangers have machines of their own.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.e2e.conftest import Serve, Server
from tests.e2e.leaving import in_ms
from tests.e2e.wire import COMPLETIONS, completion, connect, directive, metric

SLOW = 5000
GOOD = 100
WATCHED_S = 20.0
INTERVAL_S = 5
"""A slow one sends, or reads, a little so often."""
CROWDS = 8
"""Of each kind, each dripping at its own moment."""
PER_S = 8
"""Connections that each crowd opens."""
RATIO = 1.5
GROWTH_MIB = 4.0
PROGRAM = shutil.which("slowhttptest") or ""
KEPT = completion("hello", max_tokens=600, stream=True, stream_options={"on_disconnect": "continue"})
"""What the slow readers read: an ended stream, more than a socket holds, and no work of the engine's."""
CONFIG = """
[server]
max_connections = 8000
header_timeout_s = {patience_s}
body_timeout_s = {patience_s}
[limits]
max_waiting = 4000
[stream]
stall_s = {patience_s}
[models.m]
engine = "synthetic"
directives = true
slots = 400
[sinks.prometheus]
"""

pytestmark = pytest.mark.stress


@pytest.mark.skipif(not PROGRAM, reason="NOT TESTED: there is no slowhttptest on this machine (apt-get install it)")
async def test_good_streams_do_not_notice_5000_slow_connections(
    serve: Serve, tmp_path: Path, share: Callable[[int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    slow = share(SLOW)
    patience_s = 45.0 + slow / (3 * CROWDS * PER_S)  # all are there at once, for as long as it is watched
    with serve(CONFIG.format(patience_s=patience_s)) as server:
        async with connect(server.port) as wire:
            kept = (await wire.open(COMPLETIONS, KEPT))["x-request-id"]
            await wire.body()
        await good_streams(server, 5.0)  # warm
        undisturbed = await good_streams(server, WATCHED_S)
        async with slow_connections(server, tmp_path, slow, f"{server.url}/v1/streams/{kept}"):
            with trio.fail_after(180):
                while await metric(server.port, "tokenflow_open_connections") < 0.95 * slow:
                    await trio.sleep(0.25)
            await good_streams(server, 5.0)
            there = resident_mib(server)
            beside = await good_streams(server, WATCHED_S)
            growth = resident_mib(server) - there
            held = await metric(server.port, "tokenflow_open_connections")
            with trio.fail_after(2 * patience_s):
                while await metric(server.port, "tokenflow_open_connections") > 0.01 * slow + 10:
                    await trio.sleep(0.25)
        assert "Traceback" not in server.log
    ttft = {"undisturbed": in_ms(undisturbed), "beside": in_ms(beside)}
    ratio = round(ttft["beside"]["p99"] / ttft["undisturbed"]["p99"], 2)
    figures = {"test": "slow connections", "slow": slow, "held_at_the_end": int(held), "good": GOOD, "ttft_ms": ttft}
    with capsys.disabled():
        print(
            "\n" + json.dumps(figures | {"p99_ratio": ratio, "rss_mib": round(there), "growth_mib": round(growth, 1)})
        )
    assert held >= 0.95 * slow
    assert growth < GROWTH_MIB
    assert ratio <= RATIO


async def good_streams(server: Server, seconds: float) -> list[float]:
    """The times to the first token that a hundred clients see, each asking again and again."""
    times: list[float] = []

    async def one(delay_s: float) -> None:
        await trio.sleep(delay_s)
        while True:
            async with connect(server.port) as wire:
                began = trio.current_time()
                await wire.open(COMPLETIONS, completion(directive(tokens_per_s=5), max_tokens=400))
                await wire.until(1)
                times.append(trio.current_time() - began)
                await trio.sleep(3)

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for n in range(GOOD):
                nursery.start_soon(one, n * 3 / GOOD)
    return times


@asynccontextmanager
async def slow_connections(server: Server, folder: Path, count: int, kept: str) -> AsyncIterator[None]:
    """As many, of three kinds, for as long as the block lasts."""
    interval = str(INTERVAL_S)
    kinds = [
        ["-H", "-i", interval, "-u", kept],
        ["-B", "-i", interval, "-s", "4096", "-t", "POST", "-u", server.url + COMPLETIONS],
        ["-X", "-n", interval, "-w", "512", "-y", "1024", "-z", "32", "-m", "text/event-stream", "-u", kept],
    ]
    each = str(math.ceil(count / (CROWDS * len(kinds))))
    crowd = ["nice", "-n", "19", PROGRAM, "-c", each, "-r", str(PER_S), "-l", "300", "-p", "300"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for kind in kinds * CROWDS:
            processes.append(
                subprocess.Popen(  # noqa: ASYNC220  # it returns at once
                    [*crowd, *kind], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
            await trio.sleep(INTERVAL_S / (CROWDS * len(kinds)))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def resident_mib(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
