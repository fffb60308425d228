"""The load client against servers whose counts are known: what it reports must be what was sent."""

from __future__ import annotations

import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest

from bench.load import load

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the load client is built with gcc")

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":" harbor"}}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
FOR_ONE = ("--warm", "0", "--seconds", "5", "--patience", "5")

Serve = Callable[[socket.socket], None]


def chunks(data: bytes, size: int) -> bytes:
    """`data` in chunks of at most `size`, and the last one."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@contextmanager
def server(serve: Serve) -> Iterator[int]:
    """Serve each connection in a thread; the port."""

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads.append(threading.Thread(target=handle, args=(connection,)))
            threads[-1].start()

    def handle(connection: socket.socket) -> None:
        with closing(connection), suppress(ConnectionError):  # the client leaves in the middle, with a reset
            serve(connection)

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()


def request(connection: socket.socket) -> bytes:
    """One whole request; empty at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith((b"}", b"\r\n\r\n")):
        if not (more := connection.recv(65536)):
            return b""
        data += more
    return data


def measure(serve: Serve, *options: str, measuring: threading.Event | None = None) -> dict[str, Any]:
    """What the client says of the whole of what `serve` sends."""
    with server(serve) as port, load(port, "/v1/chat/completions", {"stream": True}, *options) as client:
        opened = client.phase("open")
        client.phase("measuring")
        if measuring is not None:
            measuring.set()
        return opened | client.phase("measured")


def measure_after_opening(serve: Serve, *options: str) -> dict[str, Any]:
    """The same, where `serve` says only what comes once the client is measuring."""
    measuring = threading.Event()

    def whole(connection: socket.socket) -> None:
        assert request(connection).startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        connection.sendall(HEAD + b"%x\r\n%b\r\n" % (len(ROLE), ROLE))
        assert measuring.wait(10)
        serve(connection)

    return measure(whole, *options, measuring=measuring)


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_exact_however_the_bytes_are_cut(seed: int) -> None:
    events = (
        TOKEN * 37 + b": ping\n\n" + b"id: tf-1:38\n" + TOKEN + b"event: x\r\n" + TOKEN.replace(b"\n", b"\r\n")
    ) * 5
    draw = random.Random(seed)
    data = chunks(events + FINISH + DONE, [1, 7, 1000, 10**6][seed])

    def serve(connection: socket.socket) -> None:
        at = 0
        while at < len(data):
            size = draw.choice([1, 5, 50, 5000])
            connection.sendall(data[at : at + size])
            at += size

    said = measure_after_opening(serve, *FOR_ONE)
    assert said["opened"] == 1
    assert (said["tokens"], said["events"], said["pings"]) == (5 * 39, 5 * 39 + 2, 5)
    assert (said["requests"], said["closed"], said["errors"]) == (1, 1, 0)
    assert said["bytes"] == len(data)


def test_each_stream_is_counted_by_itself_and_those_that_end_are_missed() -> None:
    draw = iter([3, 1, 2])
    lock = threading.Lock()

    def serve(connection: socket.socket) -> None:
        with lock:
            tokens = next(draw)
        connection.sendall(b"%x\r\n%b\r\n" % (len(TOKEN) * tokens, TOKEN * tokens))

    said = measure_after_opening(serve, "--streams", "3", *FOR_ONE)
    assert (said["opened"], said["tokens"], said["tokens_least"], said["tokens_most"]) == (3, 6, 1, 3)
    assert (said["closed"], said["requests"], said["errors"]) == (3, 0, 0)


def test_gaps_are_those_between_the_tokens_of_one_stream() -> None:
    piece = b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN)
    times = []

    def serve(connection: socket.socket) -> None:
        for pause in (0, 0.1, 0.1, 0.3):
            time.sleep(pause)
            times.append(time.monotonic())
            connection.sendall(piece * 2 if pause == 0.3 else piece)

    gaps = measure_after_opening(serve, *FOR_ONE)["gap_ms"]
    sent = sorted([0.0, *(1000 * (after - before) for before, after in pairwise(times))])  # 0, 100, 100, 300
    assert gaps["p50"] == pytest.approx(sent[2], abs=40)
    assert gaps["p99"] == pytest.approx(sent[3], abs=40)
    assert gaps["max"] == pytest.approx(sent[3], abs=40)


def test_a_connection_that_is_kept_asks_again_and_times_the_first_token() -> None:
    answers = []

    def serve(connection: socket.socket) -> None:
        while request(connection):
            connection.sendall(HEAD)
            time.sleep(0.02)
            connection.sendall(chunks(ROLE + TOKEN * 2 + FINISH + DONE, 100))
            answers.append(time.monotonic())

    said = measure(serve, "--repeat", "--warm", "0.1", "--seconds", "0.4")
    assert said["errors"] == said["closed"] == 0
    assert 5 <= said["requests"] <= len(answers) <= 25
    assert abs(said["tokens"] - 2 * said["requests"]) <= 2  # one answer may be cut by the end
    assert said["ttft_ms"]["p50"] == pytest.approx(22, abs=10)


def test_a_refusal_is_an_error_and_no_stream(capfd: pytest.CaptureFixture[str]) -> None:
    def serve(connection: socket.socket) -> None:
        request(connection)
        connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")

    said = measure(serve, *FOR_ONE)
    assert (said["opened"], said["errors"], said["closed"]) == (0, 1, 1)
    assert "503 Service Unavailable" in capfd.readouterr().err


def test_an_error_event_is_an_error() -> None:
    body = chunks(b'data: {"error":{"message":"no"}}\n\n' + DONE, 1000)
    said = measure_after_opening(lambda connection: connection.sendall(body), *FOR_ONE)
    assert (said["errors"], said["tokens"], said["events"]) == (1, 0, 2)


@pytest.mark.parametrize("size", [1, 11, 10**6])
def test_websocket_frames_are_counted_and_pings_answered(size: int) -> None:
    def frame(opcode: int, payload: bytes) -> bytes:
        n = len(payload)
        return bytes([0x80 | opcode]) + (bytes([n]) if n < 126 else b"\x7e" + n.to_bytes(2, "big")) + payload

    text = b'{"id":"a","n":1,"index":0,"delta":{"content":" harbor"}}'
    data = frame(1, text) * 20 + frame(9, b"ab") + frame(1, text.replace(b" harbor", b" harbor" * 30)) + frame(8, b"")
    asked, ponged, measuring = [], [], threading.Event()

    def serve(connection: socket.socket) -> None:
        assert request(connection).startswith(b"GET /v1/chat/completions HTTP/1.1\r\n")
        connection.sendall(SWITCH)
        asked.append(connection.recv(65536))
        connection.sendall(frame(1, b'{"id":"a","n":0}'))
        assert measuring.wait(10)
        for at in range(0, len(data), size):
            connection.sendall(data[at : at + size])
        ponged.append(connection.recv(100))

    said = measure(serve, "--websocket", *FOR_ONE, measuring=measuring)
    assert asked == [b'\x81\x90\0\0\0\0{"stream": true}']
    assert ponged == [b"\x8a\x82\0\0\0\0ab"]
    assert (said["tokens"], said["events"], said["pings"]) == (21, 21, 1)
    assert (said["closed"], said["errors"]) == (1, 0)
