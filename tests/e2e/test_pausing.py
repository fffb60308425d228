"""Pausing on the real model: a client that asked for it leaves, and comes back to the same text.

One slot and nobody else, so that every batch has the same shape, disturbed or not: then the texts are equal to the
last character, and the log-probabilities to the last digit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.e2e.leaving import WAYS, Client, Watched, serving_watched
from tokenflow.core.sse import Event, Parser

pytestmark = pytest.mark.model

ASKED: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 32,
    "ignore_eos": True,
    "temperature": 0,
    "logprobs": 2,
    "stream": True,
    "stream_options": {"on_disconnect": "pause", "grace_s": 60},
}
AFTER_TOKENS = 2
"""The step in whose midst the client left, and one that had begun before the server heard of it."""


async def take(client: Client, count: int | None = None) -> list[Event]:
    """So many events, at least, or all."""
    parser, events = Parser(), list[Event]()
    while count is None or len(events) < count:
        piece = await client.piece()
        if piece is None:
            break
        events += parser.feed(piece)
    return events


def said(events: list[Event]) -> list[tuple[str, str]]:
    """Each record by its number, as it was sent, without what tells one stream from another."""
    return [(event.id.rpartition(":")[2], event.data.partition('"choices":')[2]) for event in events]


async def tokens(watched: Watched, id: str) -> list[float]:
    times: list[float] = (await watched.page())["sequences"][id]["tokens"]
    return times


async def test_who_leaves_three_times_reads_what_an_undisturbed_client_does(tmp_path: Path) -> None:
    with serving_watched(tmp_path, "llamacpp", "slots = 1\nprefix_cache = false\n") as watched:
        async with watched.connect() as client:
            await client.complete("victim", ASKED)
            await client.head()
            undisturbed = await take(client)
        events, id = list[Event](), ""
        for how in (*WAYS, None):
            async with watched.connect() as client:
                if id:
                    await client.send("victim", "GET", f"/v1/streams/{id}", Last_Event_ID=events[-1].id)
                else:
                    await client.complete("victim", ASKED)
                await client.head()
                events += await take(client, None if how is None else 8)
                id = events[-1].id.rpartition(":")[0]
                if how is not None:
                    left = client.leave(how)
                    await trio.sleep(0.4)  # more than ten steps, were it not paused
                    made = await tokens(watched, id)
                    assert sum(at > left.monotonic for at in made) <= AFTER_TOKENS
                    await trio.sleep(0.2)
                    assert await tokens(watched, id) == made
        assert said(events) == said(undisturbed)
        assert len(await tokens(watched, id)) == ASKED["max_tokens"], "and nothing was generated twice"
