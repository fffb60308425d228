"""A client far away: its body comes as fast as the network carries it.

How much a client may send at once is the kernel's to find out, from how the server reads. Beside a server of five lines
that only reads, over the same network in the same run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Thread

import pytest

from tests.e2e.conftest import serving

OURS, THEIRS = "10.213.8.1", "10.213.8.2"
DELAY_S = 0.02
"""One way."""
BODY = 3_000_000
RATIO = 1.5
CONFIG = f"""
[[auth.keys]]
name = "far"
sha256 = "{sha256(b"far").hexdigest()}"
[models.m]
engine = "synthetic"
"""
SENDS = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
began = time.monotonic()
sock.sendall(sys.stdin.buffer.read())
answer = sock.recv(4096)
print(time.monotonic() - began, answer[9:12].decode())
"""


@contextmanager
def long_way() -> Iterator[str]:
    """A namespace that is far away; where there can be none, the test is skipped."""
    name = f"tf-far-{os.getpid()}"
    if os.geteuid() != 0 or not shutil.which("ip") or not os.path.exists("/dev/net/tun"):
        pytest.skip(
            "NOT TESTED: a long way is laid by root alone, with `ip` (apt-get install iproute2) and /dev/net/tun"
        )
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"NOT TESTED: no network namespace to be had: {made.stderr.strip()}")
    command = [sys.executable, "-m", "tests.e2e.long_way", name, OURS, THEIRS, str(DELAY_S)]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as way:
            assert way.stdout is not None and way.stderr is not None
            try:
                if way.stdout.readline() != "up\n":
                    pytest.skip(f"NOT TESTED: no long way to be had: {way.stderr.read().strip()}")
                yield name
            finally:
                way.kill()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def sent(far: str, port: int) -> tuple[float, str]:
    """Seconds until a large body is answered, and the status."""
    head = f"POST /v1/tokenize HTTP/1.1\r\nHost: {OURS}\r\nAuthorization: Bearer far\r\nContent-Length: {BODY}\r\n\r\n"
    command = ["ip", "netns", "exec", far, sys.executable, "-c", SENDS, OURS, str(port)]
    done = subprocess.run(command, input=head.encode() + b"x" * BODY, capture_output=True, check=True, timeout=60)
    seconds, status = done.stdout.split()
    return float(seconds), status.decode()


@contextmanager
def only_reads() -> Iterator[int]:
    """A server that reads as much, and answers; its port."""

    def run() -> None:
        for _ in range(2):
            client, _ = listener.accept()
            with client:
                left = BODY
                while left > 0:
                    left -= len(client.recv(65536))
                client.sendall(b"HTTP/1.1 400 \r\n\r\n")

    with socket.create_server((OURS, 0)) as listener:
        thread = Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_a_large_body_comes_as_fast_as_the_network_carries_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with long_way() as far, serving(tmp_path, CONFIG, "--host", OURS) as server, only_reads() as plain:
        times = {"plain": [], "ours": []}
        for _ in range(2):
            for name, port in ("plain", plain), ("ours", server.port):
                seconds, status = sent(far, port)
                assert status == "400"  # it is no JSON, and has been read to its end
                times[name].append(round(seconds, 3))
    ratio = round(min(times["ours"]) / min(times["plain"]), 2)
    figures = {"test": "long way", "bytes": BODY, "round_trip_s": 2 * DELAY_S, "s": times, "ratio": ratio}
    with capsys.disabled():
        print("\n" + json.dumps(figures))
    assert ratio <= RATIO
