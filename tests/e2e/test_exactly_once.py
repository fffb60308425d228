"""Exactly once: clients that are cut at random moments until they have the whole, through a proxy that cuts.

Each client has a plan of cuts of its own (a seed each): FIN, RST, or the proxy's side dying, after a random number of
bytes. Whatever its connections went through, its application sees every record once and in order, the text is the
uninterrupted one, and the engine generated each token once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest
import trio
from tokenflow_synthetic import generate

from tests.cutproxy import Cut, cutting
from tests.e2e.conftest import Server, serving
from tests.e2e.wire import ask, eventually
from tokenflow.client import Client

TOKENS = 80
AT_ONCE = 10
CONFIG = """
[replay]
grace_s = 60

[limits]
max_waiting = 64

[models.m]
engine = "synthetic"
slots = 16
tokens_per_s = 400

[sinks.prometheus]

[sinks.ledger]
path = "ledger.jsonl"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("once"), CONFIG) as server:
        yield server


def plan(seed: int) -> list[Cut]:
    """Up to six cuts, the first after the first id: before it there is nothing to come back to."""
    dice = random.Random(seed)
    cuts = [Cut(dice.randrange(700, 6000), dice.choice(["fin", "rst", "fin", "rst", "die"])) for _ in range(6)]
    return cuts[: dice.randrange(1, 7)]


async def client(server: Server, seed: int, connections: list[int]) -> None:
    prompt = f"client {seed}"
    async with cutting(server.port, plan(seed)) as proxy:
        # A peer that has died says nothing: silence is what tells, so it is short here.
        url = f"http://127.0.0.1:{proxy.port}"
        async with (
            Client(url, patience_s=30, silence_s=0.5) as api,
            api.completions(prompt, model="m", max_tokens=TOKENS) as stream,
        ):
            seen = [(delta.n, delta.text) async for delta in stream]
        connections.append(len(proxy.log))
    assert [n for n, _ in seen] == list(range(1, TOKENS + 1)), seed
    assert "".join(text for _, text in seen) == generate(prompt, TOKENS), seed


async def run(server: Server, seeds: range) -> list[int]:
    """All clients, some at once; how many connections each needed."""
    connections: list[int] = []
    limit = trio.CapacityLimiter(AT_ONCE)

    async def one(seed: int) -> None:
        async with limit:
            await client(server, seed, connections)

    async with trio.open_nursery() as nursery:
        for seed in seeds:
            nursery.start_soon(one, seed)
    return connections


def generated(server: Server) -> list[int]:
    """Tokens by stream, as the ledger has them."""
    lines = (server.folder / "ledger.jsonl").read_text().splitlines()
    return [json.loads(line)["generated_tokens"] for line in lines]


async def check(server: Server, count: int, start: int) -> None:
    before = len(generated(server)) if (server.folder / "ledger.jsonl").exists() else 0
    connections = await run(server, range(start, start + count))
    made = await eventually(lambda: found if len(found := generated(server)[before:]) >= count else [])
    assert made == [TOKENS] * count, "one stream a client, and each token generated once"
    text = (await ask(server.port, "GET", "/metrics")).body.decode()
    assert 'tokenflow_active_streams{model="m"} 0.0' in text
    print(json.dumps({"test": "exactly once", "clients": count, "connections": sum(connections), "seed": start}))


async def test_ten_clients(server: Server) -> None:
    await check(server, 10, 1000)


@pytest.mark.stress
async def test_two_hundred_clients(server: Server, share: Callable[[int], int]) -> None:
    await check(server, share(200), 0)
