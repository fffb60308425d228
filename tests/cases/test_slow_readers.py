"""Case 11: clients that read a byte a second, beside one that reads as it should."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
import trio
from tokenflow_synthetic import generate

from tests.cases.conftest import ledger
from tests.e2e.conftest import Server, serving
from tests.e2e.wire import COMPLETIONS, completion, eventually, metric, stream, until_metric

SLOW, WINDOW = 20, 64
TOKENS_PER_S = 1000
RECORD_BYTES = 6000
"""More than a record with twenty alternatives takes."""
CONFIG = f"""
[stream]
window = {WINDOW}
stall_s = 3

[models.m]
engine = "synthetic"
slots = {SLOW + 1}
tokens_per_s = {TOKENS_PER_S}
context_length = 100_000

[sinks.prometheus]
[sinks.ledger]
path = "ledger.jsonl"
"""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("slow"), CONFIG) as server:
        yield server


async def read_a_byte_a_second(port: int, task_status: trio.TaskStatus[str]) -> None:
    """Until the server has had enough of it."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with sock:
        await sock.connect(("127.0.0.1", port))
        body = json.dumps(completion("slow", stream=True, max_tokens=50_000, logprobs=20)).encode()
        await sock.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % COMPLETIONS.encode())
        await sock.send(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head = await sock.recv(1000)
        task_status.started(head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode())
        while await sock.recv(1):
            await trio.sleep(1)


async def a_normal_client(port: int) -> float:
    """Seconds for 300 tokens."""
    began = trio.current_time()
    streamed = await stream(port, COMPLETIONS, completion("normal", max_tokens=300))
    assert streamed.text == generate("normal", 300)
    return trio.current_time() - began


async def test_case_11_a_byte_a_second(server: Server) -> None:
    port = server.port
    alone_s = min([await a_normal_client(port) for _ in range(3)])
    async with trio.open_nursery() as nursery:
        slow = [await nursery.start(read_a_byte_a_second, port) for _ in range(SLOW)]
        await until_metric(port, SLOW, "tokenflow_paused_sequences", within_s=10)
        assert min([await a_normal_client(port) for _ in range(3)]) <= 1.5 * alone_s, "it is not disturbed"
        made = await metric(port, "tokenflow_engine_generated_tokens_total")
        assert await metric(port, "tokenflow_replay_bytes") <= SLOW * (WINDOW + 1) * RECORD_BYTES
        await eventually(lambda: all(ledger(server, id) for id in slow), within_s=10)
        assert await metric(port, "tokenflow_engine_generated_tokens_total") == made, "and they made nothing more"
        nursery.cancel_scope.cancel()
    for id in slow:
        [record] = ledger(server, id)
        assert (record["reason"], record["by"], record["phase"]) == ("disconnected", "client", "decode")
