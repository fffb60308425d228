"""`GET /_debug/generated` says what the engine made, and is there only when it is asked for."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from tests.service.conftest import open_rig
from tokenflow.http.app import create_app


async def test_it_counts_what_the_engine_made(autojump_clock: MockClock) -> None:
    async with open_rig(server={"debug": True}, tokens_per_s=10) as r:
        client = create_app(r.service).test_client()
        assert await (await client.get("/_debug/generated")).get_json() == {"last": 0, "total": 0, "last_stream": None}
        await r.whole(max_tokens=5)
        stream, reader = await r.open(max_tokens=100)
        await trio.sleep(1)
        reader.close()
        await r.settle()
        said = await (await client.get("/_debug/generated")).get_json()
        assert said["last_stream"] == stream.identity.id
        assert said["last"] == r.sink.ended(stream.identity.id).generated_tokens > 8
        assert said["total"] == 5 + said["last"]


async def test_it_is_not_there_otherwise(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        answer = await create_app(r.service).test_client().get("/_debug/generated")
        assert answer.status_code == 404
