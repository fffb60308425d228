"""What a hostile client sends: seventy packets made by hand, and any number of others, made of good ones by chance.

A packet is a list of pieces, each sent when the server has been silent for a moment or at once, as the caller likes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from random import Random

import h2.config
import h2.connection

Packet = list[bytes]

HOST = b"Host: localhost\r\n"
BODY = b'{"prompt": "hello", "max_tokens": 3, "stream": true}'
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n%b\r\n"
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)


def request(method: bytes = b"GET", target: bytes = b"/health/live", headers: bytes = HOST, body: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, target, headers, body)


def post(headers: bytes = b"", body: bytes = BODY) -> bytes:
    return request(b"POST", b"/v1/completions", HOST + headers, body)


def ws_frame(opcode: int, payload: bytes = b"", *, flags: int = 0x80, mask: bytes = b"\1\2\3\4") -> bytes:
    size = len(payload)
    length = struct.pack("!B", 0x80 | size) if size < 126 else struct.pack("!BH", 0xFE, size)
    return bytes([flags | opcode]) + length + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(payload))


def h2_frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def h2_open(*headers: tuple[str, str | bytes], end: bool = True) -> bytes:
    """Preface, settings and one request; the library does not look at what it says."""
    config = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    if headers:
        connection.send_headers(1, headers, end_stream=end)
    return connection.data_to_send()


GET = ((":method", "GET"), (":path", "/health/live"), (":scheme", "http"), (":authority", "localhost"))
POST = ((":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "localhost"))
CONNECT = (
    *((":method", "CONNECT"), (":protocol", "websocket"), (":path", "/v1/ws"), (":scheme", "http")),
    *((":authority", "localhost"), ("sec-websocket-version", "13")),
)
RESET = h2_frame(RST, 0, 1, bytes(4))
H2C = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"

BY_HAND: dict[str, Packet] = {
    "TLS to a plain port": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(range(200))],
    "nothing but zeros": [bytes(5000)],
    "newlines without end": [b"\r\n" * 5000],
    "target not ASCII": [request(target=b"/\xc3\xa9\xff")],
    "target with a percent sign alone": [request(target=b"/%zz%")],
    "target that decodes to no UTF-8": [request(target=b"/v1/models/%ff%fe")],
    "target with NUL": [request(target=b"/v1/models/%00")],
    "query that is none": [request(target=b"/stream?%ff=&&==&prompt")],
    "host not ASCII": [request(headers=b"Host: \xff\xfe\r\n")],
    "OPTIONS for all": [request(b"OPTIONS", b"*")],
    "CONNECT": [request(b"CONNECT", b"localhost:80")],
    "target absolute": [request(target=b"http://localhost/health/live")],
    "target with two slashes": [request(target=b"//health/live")],
    "target without slash": [request(target=b"health")],
    "target a query": [request(target=b"?a=1")],
    "two framings": [post(b"Content-Length: 4\r\n" + CHUNKED, b"0\r\n\r\n")],
    "two lengths": [post(b"Content-Length: 4\r\nContent-Length: 5\r\n")],
    "length of minus one": [post(b"Content-Length: -1\r\n")],
    "length without end": [post(b"Content-Length: 99999999999999999999\r\n")],
    "chunk size that is none": [post(CHUNKED, b"ZZ\r\nabc\r\n")],
    "chunk larger than it says": [post(CHUNKED, b"1\r\nabc\r\n0\r\n\r\n")],
    "a coding nobody knows": [post(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n")],
    "header without name": [request(headers=HOST + b": x\r\n")],
    "header folded": [request(headers=HOST + b"X: y\r\n z\r\n")],
    "header with NUL": [request(headers=HOST + b"X: \0\r\n")],
    "HTTP/9.9": [b"GET / HTTP/9.9\r\n" + HOST + b"\r\n"],
    "HTTP/0.9": [b"GET /\r\n\r\n"],
    "h2c with settings that are none": [request(headers=HOST + H2C + b"HTTP2-Settings: !!!!\r\n")],
    "h2c with half a setting": [request(headers=HOST + H2C + b"HTTP2-Settings: AAMA\r\n")],
    "h2c with an impossible setting": [request(headers=HOST + H2C + b"HTTP2-Settings: AAT_____\r\n")],
    "h2c without settings": [request(headers=HOST + b"Upgrade: h2c\r\nConnection: Upgrade\r\n")],
    "WebSocket with data at once": [HANDSHAKE % b"" + ws_frame(1, b"{}")],
    "WebSocket without key": [(HANDSHAKE % b"").replace(b"Sec-WebSocket-Key", b"X-Key")],
    "WebSocket by HTTP/1.0": [(HANDSHAKE % b"").replace(b"HTTP/1.1", b"HTTP/1.0")],
    "WebSocket protocol not ASCII": [HANDSHAKE % b"Sec-WebSocket-Protocol: \xff\r\n"],
    "WebSocket extension of nonsense": [HANDSHAKE % b"Sec-WebSocket-Extensions: permessage-deflate; a=b; =;;\r\n"],
    "WebSocket opcode that is none": [HANDSHAKE % b"", ws_frame(3)],
    "WebSocket frame without mask": [HANDSHAKE % b"", b"\x81\x02hi"],
    "WebSocket text that is no UTF-8": [HANDSHAKE % b"", ws_frame(1, b"\xff\xfe")],
    "WebSocket reserved bit": [HANDSHAKE % b"", ws_frame(1, b"a", flags=0xC0)],
    "WebSocket ping too long": [HANDSHAKE % b"", ws_frame(9, b"a" * 200)],
    "WebSocket close code that is none": [HANDSHAKE % b"", ws_frame(8, b"\x00\x01")],
    "WebSocket data after the close": [HANDSHAKE % b"", ws_frame(8, b"\x03\xe8") + ws_frame(1, b"{}")],
    "WebSocket message of 2^40 bytes": [HANDSHAKE % b"", b"\x82\xff" + struct.pack("!Q", 2**40) + bytes(70_000)],
    "WebSocket continuation of nothing": [HANDSHAKE % b"", ws_frame(0, b"a")],
    "WebSocket JSON deep as a well": [HANDSHAKE % b"", ws_frame(1, b"[" * 60_000)],
    "h2 CONNECT": [h2_open((":method", "CONNECT"), (":authority", "x"))],
    "h2 CONNECT for what nobody knows": [h2_open(*CONNECT[:1], (":protocol", "foo"), *CONNECT[2:])],
    "h2 WebSocket without version": [h2_open(*CONNECT[:-1], end=False)],
    "h2 no method": [h2_open(*GET[1:])],
    "h2 path not ASCII": [h2_open(GET[0], (":path", b"/\xff"), *GET[2:])],
    "h2 method not ASCII": [h2_open((":method", b"G\xff"), *GET[1:])],
    "h2 header in capitals": [h2_open(*GET, ("X-Y", "z"))],
    "h2 content length that is wrong": [h2_open(*POST, ("content-length", "5"))],
    "h2 DATA after the response": [h2_open(*GET, end=False), h2_frame(DATA, 0, 1, b"abc")],
    "h2 DATA after a reset": [h2_open(*POST, end=False), RESET + h2_frame(DATA, 0, 1, b"a")],
    "h2 DATA on stream 0": [h2_open() + h2_frame(DATA, 0, 0, b"abc")],
    "h2 DATA on an idle stream": [h2_open() + h2_frame(DATA, 0, 5, b"abc")],
    "h2 padding longer than its frame": [h2_open(*POST, end=False) + h2_frame(DATA, 8, 1, b"\xffab")],
    "h2 GOAWAY of nothing": [h2_open() + h2_frame(GOAWAY)],
    "h2 PRIORITY on itself": [h2_open() + h2_frame(PRIORITY, 0, 1, b"\0\0\0\1\x10")],
    "h2 PRIORITY without end": [
        h2_open() + b"".join(h2_frame(PRIORITY, 0, n, b"\0\0\0\0\x10") for n in range(1, 3000, 2))
    ],
    "h2 window beyond all bounds": [h2_open(*GET) + h2_frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff") * 2],
    "h2 window update of nothing": [h2_open(*GET) + h2_frame(WINDOW, 0, 0, bytes(4))],
    "h2 settings that cannot be": [PREFACE + h2_frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff")],
    "h2 frame too long": [h2_open() + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(70_000)],
    "h2 CONTINUATION without end": [h2_open() + h2_frame(HEADERS, 0, 1) + h2_frame(CONTINUATION, 0, 1) * 100],
    "h2 headers that are no HPACK": [h2_open() + h2_frame(HEADERS, 5, 1, b"\xff" * 50)],
    "h2 push from a client": [h2_open() + h2_frame(PUSH, 4, 1, bytes(4))],
    "h2 begun and reset a thousand times": [h2_open() + h2_frame(HEADERS, 5, 1, b"\x82") + RESET],
}

WORDS = (
    *(b"\0", b"\r\n", b"\r\n\r\n", b"\xff", b":", b"0", b"-1", b"%", b"/", b"?", b"#", b"@", b"\\", b" " * 8, b"," * 8),
    *(b"HTTP/1.0", b"HTTP/2.0", PREFACE, b"chunked", b"Content-Length: 7\r\n", CHUNKED, b"Connection: close\r\n"),
    *(b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\n", b"Upgrade: h2c\r\n", b"\x7f\xff\xff\xff", b"\x80\0\0\0"),
    *(
        RESET,
        h2_frame(SETTINGS),
        h2_frame(PING, 0, 0, bytes(8)),
        h2_frame(GOAWAY, 0, 0, bytes(8)),
    ),
    *(ws_frame(8), ws_frame(9, b"p"), ws_frame(10), ws_frame(1, b"{}"), ws_frame(0), ws_frame(2, b"x", flags=0)),
)


def _action(**fields: object) -> bytes:
    return ws_frame(1, json.dumps(fields).encode())


GOOD: dict[str, list[Packet]] = {
    "HTTP/1.1": [
        [request()],
        [request() * 3],
        [request(b"HEAD", b"/v1/models")],
        [request(target=b"/stream?prompt=a&max_tokens=2"), request()],
        [
            request(
                headers=HOST + b"Last-Event-ID: tf-00:1\r\nAccept: text/event-stream\r\n", target=b"/stream?prompt=a"
            )
        ],
        [post(b"Content-Length: %d\r\n" % len(BODY))],
        [post(CHUNKED, b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)) + request()],
        [post(b"Content-Length: %d\r\nExpect: 100-continue\r\n" % len(BODY), b""), BODY],
        [request(headers=HOST + H2C + b"HTTP2-Settings: AAMAAABk\r\n"), h2_open(*GET)],
    ],
    "HTTP/2": [
        [h2_open(*GET), h2_frame(PING, 0, 0, bytes(8))],
        [h2_open(*POST, end=False) + h2_frame(DATA, 1, 1, BODY), h2_frame(WINDOW, 0, 0, b"\0\0\1\0")],
        [
            h2_open(*POST, ("content-length", "52"), end=False),
            h2_frame(DATA, 0, 1, BODY[:9]),
            RESET,
        ],
        [h2_open(*GET) + h2_frame(SETTINGS, 0, 0, b"\0\4\0\0\0\1") + h2_frame(SETTINGS, 1)],
        [h2_open(*CONNECT, end=False), h2_frame(DATA, 0, 1, _action(action="generate", prompt="a", max_tokens=2))],
        [h2_open(*GET, end=False) + h2_frame(DATA, 8, 1, b"\3abc" + bytes(3)) + h2_frame(GOAWAY, 0, 0, bytes(8))],
    ],
    "WebSocket": [
        [HANDSHAKE % b"", _action(action="generate", id="a", prompt="hello", max_tokens=3)],
        [HANDSHAKE % b"", _action(action="generate", id="a", prompt="x") + _action(action="cancel", id="a")],
        [HANDSHAKE % b"", _action(prompt="a", max_tokens=2, credit=1) + _action(action="credit", id="a", n=3)],
        [HANDSHAKE % b"", _action(action="attach", id="b", stream="tf-00", after=0), ws_frame(9, b"ping")],
        [
            HANDSHAKE % b"",
            ws_frame(1, b'{"type":', flags=0) + ws_frame(9) + ws_frame(0, b'"ping"}'),
            ws_frame(8, b"\x03\xe8"),
        ],
        [HANDSHAKE % b"Sec-WebSocket-Protocol: tokenflow\r\n", ws_frame(2, BODY), ws_frame(10, b"x")],
    ],
}


def mutants(protocol: str, random: Random) -> Iterator[Packet]:
    """Packets without end, each a good one with some changes. A WebSocket's handshake is mostly left as it is."""
    while True:
        packet = list(random.choice(GOOD[protocol]))
        first = 1 if protocol == "WebSocket" and random.random() < 0.8 else 0
        for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
            at = random.randrange(first, len(packet))
            packet[at] = random.choice(_CHANGES)(packet[at], random)
        yield packet


def _flip(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) or 1)
    return data[:at] + bytes([(data[at : at + 1] or b"\0")[0] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _replace(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) or 1)
    return data[:at] + random.randbytes(random.randrange(1, 5)) + data[at + random.randrange(5) :]


def _insert(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(WORDS) + data[at:]


def _cut(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + data[at + random.randrange(1, 40) :]


def _end_early(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _repeat(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    part = data[at : at + random.randrange(1, 60)]
    return data[:at] + part * random.choice((2, 3, 50)) + data[at:]


def _splice(data: bytes, random: Random) -> bytes:
    other = random.choice(random.choice(random.choice(list(GOOD.values()))))
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other)) :]


_CHANGES: tuple[Callable[[bytes, Random], bytes], ...] = (_flip, _replace, _insert, _cut, _end_early, _repeat, _splice)
