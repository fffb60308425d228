"""WebSocket against an echo application: the cases that Autobahn's fuzzing client has, chapter by chapter.

Autobahn itself needs Python 2.7; what is asked here is taken from RFC 6455, frame by frame.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

CONTINUED, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)
MASK = b"\x11\x22\x33\x44"


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True) -> bytes:
    """A client's frame."""
    head = bytes([fin << 7 | rsv << 4 | opcode])
    bit = masked << 7
    if len(payload) < 126:
        head += bytes([bit | len(payload)])
    elif len(payload) < 65536:
        head += bytes([bit | 126]) + struct.pack(">H", len(payload))
    else:
        head += bytes([bit | 127]) + struct.pack(">Q", len(payload))
    if not masked:
        return head + payload
    return head + MASK + bytes(byte ^ MASK[i % 4] for i, byte in enumerate(payload))


def close(code: int, reason: bytes = b"") -> bytes:
    return struct.pack(">H", code) + reason


class Frames:
    """What the server sends after the handshake, frame by frame."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.send = client.send
        self._data = b""

    async def _take(self, size: int) -> bytes:
        with trio.fail_after(3):
            while len(self._data) < size:
                more = await self._client.stream.receive_some()
                if not more:
                    raise EOFError
                self._data += more
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    async def head(self) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await self._take(1)
        return head

    async def get(self) -> tuple[int, bytes]:
        """(opcode, payload) of the next frame, which must be whole and not masked."""
        first, second = await self._take(2)
        assert first & 0xF0 == 0x80 and not second & 0x80, "the server does not fragment, mask or compress"
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(await self._take(2 if size == 126 else 8), "big")
        return first & 0x0F, await self._take(size)

    async def closed_with(self) -> int:
        """The close code, after which nothing follows but the end."""
        opcode, payload = await self.get()
        assert opcode == CLOSE
        with pytest.raises(EOFError):
            await self.get()
        return int.from_bytes(payload[:2], "big") if payload else 0


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "bytes": message["bytes"], "text": message["text"]})


@pytest.fixture
async def socket(serving: Any, connect: Any, config: Any) -> Any:
    """`await socket(handler)`: a WebSocket that has been accepted."""

    async def socket(handler: Any = echo, headers: bytes = b"", **options: Any) -> Frames:
        frames = Frames(await connect(await serving(handler, **options)))
        await frames.send(UPGRADE + headers + b"\r\n")
        frames.answer = (await frames.head()).lower()
        assert frames.answer.startswith(b"http/1.1 101")
        return frames

    return socket


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 128, 65535, 65536])
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
async def test_1_messages_of_every_size(socket: Any, opcode: int, size: int) -> None:
    frames = await socket()
    await frames.send(frame(opcode, b"*" * size))
    assert await frames.get() == (opcode, b"*" * size)


@pytest.mark.parametrize("payload", [b"", b"Hello", b"\x00\xff\xfe", b"x" * 125])
async def test_2_a_ping_is_answered_with_its_payload(socket: Any, payload: bytes) -> None:
    frames = await socket()
    await frames.send(frame(PONG, b"unasked") + frame(PING, payload))
    assert await frames.get() == (PONG, payload)


async def test_2_pings_are_answered_in_order(socket: Any) -> None:
    frames = await socket()
    await frames.send(b"".join(frame(PING, b"%d" % i) for i in range(10)))
    assert [await frames.get() for _ in range(10)] == [(PONG, b"%d" % i) for i in range(10)]


BROKEN = {
    "2.5 a ping too long": frame(PING, b"x" * 126),
    "3 reserved bit 1, which means compressed": frame(TEXT, b"x", rsv=4),
    "3 reserved bit 2": frame(TEXT, b"x", rsv=2),
    "3 reserved bit 3 of a ping": frame(PING, b"x", rsv=1),
    "4.1 reserved opcode 3": frame(3, b"x"),
    "4.1 reserved opcode 7": frame(7),
    "4.2 reserved control opcode 11": frame(11),
    "5.1 a fragmented ping": frame(PING, b"x", fin=False),
    "5.9 a continuation of nothing": frame(CONTINUED, b"x"),
    "5.18 a message within a message": frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"),
    "7.3.2 a close of one byte": frame(CLOSE, b"\x03"),
    "7.3.6 a close too long": frame(CLOSE, close(1000, b"x" * 124)),
    "not masked": frame(TEXT, b"x", masked=False),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
async def test_3_4_5_what_breaks_the_protocol_is_closed_with_1002(socket: Any, data: bytes) -> None:
    """Stock: ends without a close frame."""
    frames = await socket()
    await frames.send(data)
    assert await frames.closed_with() == 1002


@pytest.mark.parametrize("pieces", [1, 7, 1000], ids=["whole", "in pieces of 7", "at once"])
async def test_5_fragments_with_pings_between_them(socket: Any, pieces: int) -> None:
    frames = await socket()
    data = (
        frame(TEXT, b"one", fin=False) + frame(PING, b"p") + frame(CONTINUED, b"", fin=False) + frame(CONTINUED, b"two")
    )
    for at in range(0, len(data), pieces):
        await frames.send(data[at : at + pieces])
    assert [await frames.get(), await frames.get()] == [(PONG, b"p"), (TEXT, b"onetwo")]


@pytest.mark.parametrize("cut", range(1, 12))
async def test_6_a_character_cut_anywhere_is_whole_again(socket: Any, cut: int) -> None:
    text = "κόσμε 😀".encode()
    frames = await socket()
    await frames.send(frame(TEXT, text[:cut], fin=False) + frame(CONTINUED, text[cut:]))
    assert await frames.get() == (TEXT, text)


@pytest.mark.parametrize("bad", [b"\xce\xba\xed\xa0\x80", b"\xff", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"cut \xe2\x82"])
async def test_6_text_that_is_not_utf8_is_closed_with_1007(socket: Any, bad: bytes) -> None:
    frames = await socket()
    await frames.send(frame(TEXT, bad))
    assert await frames.closed_with() == 1007


async def test_6_and_at_the_fragment_that_breaks_it(socket: Any) -> None:
    frames = await socket()
    await frames.send(frame(TEXT, b"\xed\xa0\x80", fin=False))
    assert await frames.closed_with() == 1007


@pytest.mark.parametrize("payload", [b"", close(1000), close(1001, b"bye"), close(3000), close(4999, b"x" * 123)])
async def test_7_a_close_is_answered_with_its_code(socket: Any, payload: bytes) -> None:
    frames = await socket()
    await frames.send(frame(CLOSE, payload) + frame(TEXT, b"after the close"))
    assert await frames.closed_with() == (int.from_bytes(payload[:2], "big"))


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1012, 1015, 1100, 2000, 2999, 5000, 65535])
async def test_7_a_code_that_may_not_be_sent(socket: Any, code: int) -> None:
    frames = await socket()
    await frames.send(frame(CLOSE, close(code)))
    # Codes registered after the RFC (1012 to 1014) may be answered with themselves or with 1002.
    assert await frames.closed_with() in ({1002, code} if code == 1012 else {1002})


async def test_7_a_close_reason_that_is_not_utf8(socket: Any) -> None:
    frames = await socket()
    await frames.send(frame(CLOSE, close(1000, b"\xce\xba\xed\xa0\x80")))
    assert await frames.closed_with() == 1007


@pytest.mark.parametrize("text", [b"x" * 1001, "é".encode() * 501], ids=["ASCII", "two bytes a character"])
async def test_9_a_message_too_big_is_closed_with_1009_and_the_application_is_told(
    socket: Any, config: Any, text: bytes
) -> None:
    """Stock: counts characters, and leaves the application waiting."""
    config.websocket_max_message_size = 1000
    told = trio.Event()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        told.set()

    frames = await socket(handler)
    await frames.send(frame(TEXT, b"x" * 1000))
    assert await frames.get() == (TEXT, b"x" * 1000)
    await frames.send(frame(TEXT, text[:600], fin=False) + frame(CONTINUED, text[600:], fin=False))
    assert await frames.closed_with() == 1009
    with trio.fail_after(1):
        await told.wait()


async def test_12_compression_is_declined(socket: Any) -> None:
    """Stock: accepts it, for 100 KiB a connection."""
    frames = await socket(headers=b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n")
    assert b"sec-websocket-extensions" not in frames.answer
    await frames.send(frame(TEXT, b"x" * 1000))
    assert await frames.get() == (TEXT, b"x" * 1000)


# --- the handshake, and who is still there -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (UPGRADE + b"Sec-WebSocket-Protocol: \xff\r\n\r\n", "not ASCII"),
        (UPGRADE.replace(b"13", b"12") + b"\r\n", "another version"),
        (UPGRADE.replace(b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b"") + b"\r\n", "no key"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_handshake_is_a_400(serving: Any, connect: Any, request_: bytes, why: str) -> None:
    client = await connect(await serving(echo))
    await client.send(request_)
    assert (await client.wait_closed()).startswith(b"HTTP/1.1 400 ")


ODD = {
    "Upgrade twice, to WebSocket last": (UPGRADE.replace(b"Upgrade: w", b"Upgrade: other\r\nUpgrade: w", 1), 101),
    "Upgrade twice, to WebSocket first": (UPGRADE + b"Upgrade: other\r\n", 200),
    "Upgrade with a space that no header has": (UPGRADE.replace(b"websocket", b"websocket\x1f"), 400),
    "Upgrade with a space that is not ASCII": (UPGRADE.replace(b"websocket", b"websocket\xa0"), 400),
    "Connection with a space that no header has": (UPGRADE.replace(b", Upgrade", b", Upgrade\x1f"), 101),
    "Connection with a space that is not ASCII": (UPGRADE.replace(b", Upgrade", b", Upgrade\xa0"), 400),
    "the method in small letters": (UPGRADE.replace(b"GET", b"get"), 101),
}


@pytest.mark.parametrize(("handshake", "status"), ODD.values(), ids=ODD)
async def test_an_odd_handshake_is_not_left_to_hypercorn(
    serving: Any, connect: Any, config: Any, caplog: pytest.LogCaptureFixture, handshake: bytes, status: int
) -> None:
    """Stock: its stream is compressed, and its task that pings outlives the client."""

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await echo(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    config.websocket_ping_interval = 60
    address = await serving(handler)
    tasks = trio.lowlevel.current_statistics().tasks_living
    client = await connect(address)
    frames = Frames(client)
    await frames.send(handshake + b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n")
    head = await frames.head()
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"extensions" not in head.lower()
    if status == 101:
        await frames.send(frame(TEXT, b"hello"))
        assert await frames.get() == (TEXT, b"hello")
    elif status == 400:
        assert b"application/json" in head  # and not the empty body that Hypercorn has for it
        await client.wait_closed()
    await client.leave("close")
    await wait_all_tasks_blocked(0.02)
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert not caplog.records


async def test_lists_in_several_lines_are_one(serving: Any, connect: Any) -> None:
    """Stock: the last line is all of it: without an Upgrade in it a 400, and the protocols before are lost."""
    offered: list[str] = []

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        offered.extend(scope["subprotocols"])
        await receive()
        await send({"type": "websocket.accept", "subprotocol": "first"})

    frames = Frames(await connect(await serving(handler)))
    lines = (
        b"Connection: keep-alive\r\nSec-WebSocket-Protocol: first\r\nX: y\r\nSec-WebSocket-Protocol: second, third\r\n"
    )
    await frames.send(UPGRADE + lines + b"\r\n")
    head = (await frames.head()).lower()
    assert head.startswith(b"http/1.1 101 ") and b"sec-websocket-protocol: first\r\n" in head
    assert offered == ["first", "second", "third"]


async def test_data_before_the_answer_is_a_400_that_ends_the_application(
    serving: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told = trio.Event()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "websocket.disconnect":
            pass
        told.set()

    client = await connect(await serving(handler))
    await client.send(UPGRADE + b"\r\n" + frame(TEXT, b"too early"))
    assert (await client.wait_closed()).startswith(b"HTTP/1.1 400 ")
    with trio.fail_after(1):
        await told.wait()
    assert not caplog.records


async def test_a_refusal_is_the_applications_answer(serving: Any, connect: Any) -> None:
    async def handler(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.close"})

    client = await connect(await serving(handler))
    await client.send(UPGRADE + b"\r\n")
    assert (await client.wait_closed()).startswith(b"HTTP/1.1 403 ")


async def test_a_ping_without_a_pong_ends_it(socket: Any, config: Any) -> None:
    """Stock: pings for ever, whoever is there."""
    config.websocket_ping_interval = 0.05
    told = trio.Event()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        told.set()

    frames = await socket(handler, stall_s=0.2)
    began = trio.current_time()
    assert await frames.get() == (PING, b"")
    assert await frames.closed_with() == 1011
    assert 0.2 <= trio.current_time() - began < 1
    with trio.fail_after(1):
        await told.wait()


async def test_pongs_keep_it_alive_and_its_end_leaves_no_pinger(
    socket: Any, config: Any, nursery: trio.Nursery
) -> None:
    config.websocket_ping_interval = 0.02
    frames = await socket(stall_s=0.1)
    for _ in range(20):
        assert await frames.get() == (PING, b"")
        await frames.send(frame(PONG))
    await frames.send(frame(TEXT, b"still here"))
    while (got := await frames.get()) == (PING, b""):
        await frames.send(frame(PONG))
    assert got == (TEXT, b"still here")


async def test_a_send_after_the_client_has_left_checkpoints_and_raises(socket: Any) -> None:
    outcome: list[Any] = []
    done = trio.Event()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        with trio.testing.assert_checkpoints():
            try:
                await send({"type": "websocket.send", "text": "x"})
            except OSError as error:
                outcome.append(error)
        done.set()

    frames = await socket(handler)
    await frames.send(frame(CLOSE, close(1000)))
    with trio.fail_after(1):
        await done.wait()
    assert len(outcome) == 1


LAST_FRAMES = {
    "a close": frame(CLOSE, close(1000)),
    "a fault": frame(3),
    "too much": frame(TEXT, b"x" * 1001),
    "pings, then a half-close": frame(PING, b"p" * 100) * 100,
}


@pytest.mark.parametrize("last", LAST_FRAMES.values(), ids=LAST_FRAMES)
async def test_who_leaves_without_reading_is_seen_at_once(connect_small: Any, config: Any, last: bytes) -> None:
    """The answer cannot be sent, nor can what the application sends: it hears of the leaving all the same."""
    config.websocket_max_message_size = 1000
    told = trio.Event()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def flood() -> None:
                with pytest.raises(OSError):
                    while True:
                        await send({"type": "websocket.send", "text": "x" * 1000})

            assert (await receive())["type"] == "websocket.disconnect"
            told.set()

    client = await connect_small(handler)
    frames = Frames(client)
    await frames.send(UPGRADE + b"\r\n")
    await frames.head()
    await wait_all_tasks_blocked(0.1)
    await frames.send(last)
    if last == LAST_FRAMES["pings, then a half-close"]:
        await client.leave("half-close")
    with trio.fail_after(1):
        await told.wait()


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_a_message_that_is_written_at_once_is_framed_as_wsproto_frames_it(size: int) -> None:
    from wsproto.connection import Connection, ConnectionType
    from wsproto.events import TextMessage

    from tokenflow.http.transport.at_once import text_frame

    text = "é" * (size // 2) + "x" * (size % 2)
    assert text_frame(text) == Connection(ConnectionType.SERVER).send(TextMessage(data=text))
