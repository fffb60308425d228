"""A network that is cut in two: the client is neither gone nor there, and no FIN or RST will ever come.

The client runs in a network namespace of the test's own, behind a pair of virtual interfaces; the cut takes one of
them down. Where something is written, tokens or heartbeats, its acknowledgement is missed; where nothing is, an answer
in one piece, the kernel's own probe is not answered. Either way within a heartbeat and `stall_s`, which is
TCP_USER_TIMEOUT.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import trio

from tests.e2e.conftest import serving
from tests.e2e.leaving import Ledger
from tests.e2e.wire import completion, directive

HEARTBEAT_S, STALL_S, MARGIN_S = 1.0, 1.0, 0.25
SERVER, CLIENT = "10.213.7.1", "10.213.7.2"
NAMES = {"streaming": "victim", "silent": "hog", "whole": "probe"}
"""What each client's key is called in the ledger."""
BODIES = {
    "streaming": completion(directive(tokens_per_s=20), max_tokens=4000, stream=True),
    "silent": completion(directive(hang_at=1), max_tokens=4000, stream=True),
    "whole": completion(directive(tokens_per_s=20), max_tokens=4000),
}
KEY = """
[[auth.keys]]
name = "{}"
sha256 = "{}"
"""
CONFIG = f"""
{"".join(KEY.format(name, sha256(name.encode()).hexdigest()) for name in NAMES.values())}
[stream]
heartbeat_s = {HEARTBEAT_S}
stall_s = {STALL_S}
[models.m]
engine = "synthetic"
directives = true
slots = 8
[sinks.ledger]
path = "ledger.jsonl"
"""
READS = """
import selectors, socket, sys
ready = selectors.DefaultSelector()
for packet in sys.stdin.read().split():
    sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    sock.sendall(bytes.fromhex(packet))
    ready.register(sock, selectors.EVENT_READ)
print("sent", flush=True)
while True:
    for key, _ in ready.select():
        key.fileobj.recv(65536)
"""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def namespace() -> Iterator[str]:
    """A network namespace with one end of a pair of interfaces; where there can be none, the test is skipped."""
    name, ours, theirs = f"tf-{os.getpid()}", f"tfs{os.getpid() % 10**6}", f"tfc{os.getpid() % 10**6}"
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("NOT TESTED: a network is cut by root alone, with `ip` (apt-get install iproute2)")
    try:
        ip("netns", "add", name)
    except OSError as exc:
        pytest.skip(f"NOT TESTED: no network namespace to be had: {exc}")
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("address", "add", f"{SERVER}/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "address", "add", f"{CLIENT}/30", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        yield name
    finally:
        ip("netns", "delete", name)


@pytest.mark.stress
async def test_a_network_that_is_cut_is_missed_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with namespace() as name, serving(tmp_path / "server", CONFIG, "--host", SERVER) as server:
        packets = [packet(BODIES[state], key).hex() for state, key in NAMES.items()]
        command = ["ip", "netns", "exec", name, sys.executable, "-c", READS, SERVER, str(server.port)]
        with subprocess.Popen(  # noqa: ASYNC220  # it returns at once
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdin is not None and client.stdout is not None
            client.stdin.write(" ".join(packets))
            client.stdin.close()
            await trio.to_thread.run_sync(client.stdout.readline)
            await trio.sleep(2 * HEARTBEAT_S)  # all have begun, and a heartbeat has come through
            began = trio.current_time()
            ip("-n", name, "link", "set", f"tfc{os.getpid() % 10**6}", "down")
            ledger, missed = Ledger(server.folder / "ledger.jsonl"), {}

            async def miss(state: str, role: str) -> None:
                record = await ledger.next(role)
                missed[state] = round(trio.current_time() - began, 3)
                assert (record["reason"], record["by"]) == ("disconnected", "client"), record

            async with trio.open_nursery() as nursery:
                for state, role in NAMES.items():
                    nursery.start_soon(miss, state, role)
            client.kill()
        with capsys.disabled():
            print("\n" + json.dumps({"test": "partition", "missed_after_s": missed}))
    assert max(missed.values()) <= HEARTBEAT_S + STALL_S + MARGIN_S


def packet(body: object, key: str) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {SERVER}\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
