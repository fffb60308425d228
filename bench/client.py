"""A load client that is not the bottleneck: blocking sockets and a selector, one pass over the bytes."""

from __future__ import annotations

import json
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Streamed:
    """What one stream looked like from outside. Seconds, from the moment that its request was sent."""

    first_s: float = 0.0
    """The first event with content."""
    last_s: float = 0.0
    """The end of the response."""
    events: int = 0
    """Events with content."""
    raw: bytearray = field(default_factory=bytearray)


def stream(port: int, path: str, bodies: list[dict[str, Any]]) -> list[Streamed]:
    """Send all requests at once, each on a connection of its own, and read every answer to its end."""
    selector = selectors.DefaultSelector()
    results = [Streamed() for _ in bodies]
    began = time.perf_counter()
    for body, result in zip(bodies, results, strict=True):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(_request(path, body))
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, result)
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(65536)  # type: ignore[union-attr]  # a socket: nothing else is registered
            _take(key.data, data, time.perf_counter() - began)
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return results


def _take(result: Streamed, data: bytes, now: float) -> None:
    seen = data.count(b'"content":"') - data.count(b'"content":""') + data.count(b'"text":"')
    if seen and not result.events:
        result.first_s = now
    result.events += seen
    result.last_s = now
    result.raw += data


def _request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
