"""Case 4: three times as many streams as slots, all aborted at random moments, then one more: no slot is ever lost.

A real server with the synthetic engine, fast enough that a round's streams are in every phase when they are aborted:
not yet parsed, waiting, prefilling, decoding. After each round active and waiting fall to 0 within a second, and a new
stream has its slot at once and says all that it should. At the end as many streams as there are slots decode side by
side, and the ledger has a record of every stream that was ever admitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from random import Random
from time import monotonic

import pytest
import trio
from tokenflow_synthetic import generate

from tests.e2e.leaving import WAYS, Watched, in_ms, serving_watched

SLOTS = 4
OPTIONS = f"slots = {SLOTS}\nprefill_ms = 10\ntokens_per_s = 200\n"
LONGEST_S = 0.06
"""By then the first have long been decoding, and the last still wait."""
EMPTY_S = 1.0
AT_ONCE_S = 0.25


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with serving_watched(tmp_path_factory.mktemp("slots"), "synthetic", OPTIONS) as watched:
        yield watched


async def test_case_4_no_slot_is_lost(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    await abort_often(watched, 5, capsys)


@pytest.mark.stress
async def test_case_4_no_slot_is_lost_in_1000_rounds(
    watched: Watched, share: Callable[[int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    await abort_often(watched, share(1000), capsys)


async def abort_often(watched: Watched, rounds: int, capsys: pytest.CaptureFixture[str]) -> None:
    random = Random("slots")
    emptied, slot_after = [], []
    for i in range(rounds):
        emptied.append(await abort_all(watched, random))
        slot_after.append(await one_more(watched, f"round {i}"))
    figures = {"test": "slots", "rounds": rounds, "seed": "slots", "streams_each": 3 * SLOTS}
    with capsys.disabled():
        print("\n" + json.dumps(figures | {"empty_ms": in_ms(emptied), "next_slot_ms": in_ms(slot_after)}))
    assert max(emptied) <= EMPTY_S
    assert max(slot_after) <= AT_ONCE_S
    await all_slots_at_once(watched)
    await books_are_right(watched)


async def abort_all(watched: Watched, random: Random) -> float:
    """One round; seconds until nothing is active or waiting any more."""
    async with trio.open_nursery() as nursery:
        for _ in range(3 * SLOTS):
            stay_s, how, streaming = random.uniform(0, LONGEST_S), random.choice(WAYS), random.random() < 0.5
            nursery.start_soon(partial(abort, watched, stay_s, how, streaming=streaming))
    began = monotonic()
    await watched.page(lambda page: not (page["gauges"]["active"] or page["gauges"]["waiting"]))
    return monotonic() - began


async def abort(watched: Watched, stay_s: float, how: str, *, streaming: bool) -> None:
    async with watched.connect() as client:
        await client.complete("victim", {"prompt": "Abort me", "max_tokens": 5000, "stream": streaming})
        await trio.sleep(stay_s)
        client.leave(how)


async def one_more(watched: Watched, prompt: str) -> float:
    """A whole answer; seconds from asking for it to its slot."""
    async with watched.connect() as client:
        began = monotonic()
        await client.complete("probe", {"prompt": prompt, "max_tokens": 2})
        answer = await client.answer()
    assert answer["choices"][0]["text"] == generate(prompt, 2)
    seen = (await watched.page())["sequences"][answer["id"]]
    return seen["added"] - began


async def all_slots_at_once(watched: Watched) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(SLOTS):
            client = await stack.enter_async_context(watched.connect())
            await client.complete("hog", {"prompt": "One of all", "max_tokens": 5000, "stream": True})
            await client.head()
            await client.read(2)
        gauges = (await watched.page())["gauges"]
        assert (gauges["active"], gauges["slots_used"], gauges["waiting"]) == (SLOTS, SLOTS, 0)
    await watched.page(lambda page: page["gauges"]["active"] == 0)


async def books_are_right(watched: Watched) -> None:
    """Every token that the engine made is in the record of a stream, and every sequence has left its slot."""
    gauges = (await watched.page())["gauges"]
    await watched.ledger.has_all(gauges["generated_tokens"])
    page = await watched.page()
    assert (page["gauges"]["slots_used"], page["gauges"]["kv_tokens_used"]) == (0, 0)
    assert all(seen["removed"] for seen in page["sequences"].values())
