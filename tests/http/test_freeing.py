"""What ends is freed as it ends. A cycle would keep a whole connection, with its stream, until a collection finds it;
and collections are made rare when the server starts, for they cost a third of an opening.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CoroutineType, FunctionType, GeneratorType
from typing import Any
from weakref import ref

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.http import hostile
from tests.service.conftest import open_rig
from tokenflow.http.app import create_app
from tokenflow.http.serve import hypercorn_config
from tokenflow.http.transport import Traffic, bind, serve

OURS = ("tokenflow", "hypercorn", "h11", "h2", "hpack", "wsproto", "quart", "quart_trio", "werkzeug", "trio")
RUNNING = (GeneratorType, CoroutineType)
SEARCH = "werkzeug.routing.matcher.StateMachineMatcher.match.<locals>._match"
"""A closure that has itself in it: what the search for a path leaves that is no route's own."""
SEARCHED = {"a wrong path", "target with a percent sign alone"}
STREAM = {"prompt": "a", "max_tokens": 3, "stream": True}
ENDLESS = STREAM | {"max_tokens": 1_000_000}


def asked(body: dict[str, object], path: bytes = b"/v1/completions") -> list[bytes]:
    data = json.dumps(body).encode()
    return [hostile.post(b"Content-Length: %d\r\n" % len(data), data).replace(b"/v1/completions", path)]


REQUESTS = {
    "a stream": asked(STREAM),
    "a stream that is left": asked(ENDLESS),
    "one that can be come back to": asked(
        STREAM | {"stream_options": {"on_disconnect": "pause", "grace_s": 0.05, "retention_s": 0.05}}
    ),
    "an answer in one body": asked(STREAM | {"stream": False}),
    "a wrong field": asked(STREAM | {"n": -1}),
    "a wrong path": asked(STREAM, b"/v1/nothing"),
    "a path with an id": [b"GET /v1/streams/x HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    "no body": [b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    "no HTTP": [b"\x16\x03\x01\x02\r\n\r\n"],
    **{
        f"{protocol}, {n}": packet
        for protocol in ("HTTP/2", "WebSocket")
        for n, packet in enumerate(hostile.GOOD[protocol])
    },
    **hostile.BY_HAND,
}


@contextmanager
def uncollected() -> Iterator[list[str]]:
    """Who made what is unreachable and yet there, of all that the block made."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        # Before Python 3.13 a collection closes what runs first, and then shows nothing of what only that had kept.
        running = [(ref(thing), made_by(thing)) for thing in gc.get_objects() if type(thing) in RUNNING]
        gc.collect()
        found += map(made_by, gc.garbage)
        found += [maker for thing, maker in running if thing() is None]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("about", REQUESTS)
async def test_nothing_waits_for_the_collector(about: str) -> None:
    packet = REQUESTS[about]
    traffic = Traffic()
    listener = bind("127.0.0.1", 0)
    async with open_rig(slots=2) as rig, trio.open_nursery() as nursery:

        async def run(task_status: Any) -> None:
            app, config = create_app(rig.service, traffic), hypercorn_config(rig.service.config)
            await serve(app, config, listeners=[listener], traffic=traffic, task_status=task_status)

        async def once() -> None:
            async with await trio.open_tcp_stream(*listener.getsockname()) as client:
                with suppress(trio.BrokenResourceError):  # it has been cut off
                    for piece in packet:
                        await client.send_all(piece)
                        await wait_all_tasks_blocked(0.005)
            while traffic.connections or rig.service.streams("-"):
                await wait_all_tasks_blocked(0.005)

        await nursery.start(run)
        await once()  # what is made once is there
        with uncollected() as found:
            await once()
        nursery.cancel_scope.cancel()
    left = Counter(name for name in found if name.split(".")[0] in OURS)
    assert left == ({SEARCH: 1} if about in SEARCHED else {})


def made_by(thing: object) -> str:
    """With the module: a function's own name, a running one's, or a thing's class's."""
    if isinstance(thing, RUNNING):
        frame = thing.gi_frame if isinstance(thing, GeneratorType) else thing.cr_frame
        return f"{frame.f_globals['__name__'] if frame else '(ended)'}.{thing.__qualname__}"
    maker = thing if isinstance(thing, FunctionType) else type(thing)
    return f"{maker.__module__}.{maker.__qualname__}"
