"""The one writer of a connection, on real sockets: frames are never torn, reordered, lost or written after the end."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tokenflow.http.transport.writer import Writer


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield ours, theirs


def frame(writer: int, number: int, size: int) -> bytes:
    return b"<%d.%d %s>" % (writer, number, b"x" * size)


async def read(sock: socket.socket, size: int) -> bytes:
    await trio.lowlevel.wait_readable(sock)
    return sock.recv(size)


@pytest.mark.parametrize("seed", range(20))
async def test_frames_of_many_writers_stay_whole_and_each_writers_in_order(
    seed: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    rng = random.Random(seed)
    ours, theirs = pair
    writer = Writer(ours, None, 30.0)
    got = bytearray()

    async def write(who: int) -> None:
        for number in range(30):
            data = frame(who, number, rng.choice([1, 10, 3000, 20_000]))
            if writer.ready and rng.random() < 0.7:
                if not writer.write_nowait(data) and rng.random() < 0.5:
                    await writer.flush()  # or not: whoever writes next does it
            else:
                await writer.write(data)
            if rng.random() < 0.5:
                await trio.lowlevel.checkpoint()

    async def write_all() -> None:
        async with trio.open_nursery() as writers:
            for who in range(4):
                writers.start_soon(write, who)
        await writer.flush()
        ours.shutdown(socket.SHUT_WR)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_all)
        while data := await read(theirs, rng.choice([1, 100, 65536])):
            got += data
            for _ in range(rng.randrange(3)):
                await trio.lowlevel.checkpoint()
    frames = bytes(got).replace(b"><", b">\n<").split(b"\n")
    assert len(frames) == 4 * 30
    assert all(f.startswith(b"<") and f.endswith(b">") and f.count(b"<") == 1 for f in frames)
    for who in range(4):
        numbers = [int(f[1:].split(b" ")[0].split(b".")[1]) for f in frames if f.startswith(b"<%d." % who)]
        assert numbers == list(range(30))


async def test_a_client_that_takes_nothing_is_given_up_and_one_that_takes_a_little_is_not(
    pair: tuple[socket.socket, socket.socket], mock_clock: MockClock
) -> None:
    ours, theirs = pair
    writer = Writer(ours, None, 30.0)
    mock_clock.autojump_threshold = 0.01
    async with trio.open_nursery() as nursery:
        ended: list[float] = []

        async def write() -> None:
            with pytest.raises(TimeoutError):
                await writer.write(b"x" * 1_000_000)
            ended.append(trio.current_time())

        began = trio.current_time()
        nursery.start_soon(write)
        for _ in range(4):
            await trio.sleep(29)
            while len(theirs.recv(65536)) == 65536:
                await trio.testing.wait_all_tasks_blocked()
            last = trio.current_time()
    assert began + 4 * 29 == last
    assert ended == [last + 30]


async def test_nothing_is_written_after_it_was_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    writer = Writer(ours, None, 30.0)
    assert writer.ready and writer.write_nowait(b"a")
    async with trio.open_nursery() as nursery:
        stuck: list[str] = []

        async def write() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await writer.write(b"x" * 1_000_000)
            stuck.append("let go")

        nursery.start_soon(write)
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        writer.close()
        trio.lowlevel.notify_closing(ours)
        ours.close()
    assert stuck == ["let go"] * 2
    assert not writer.ready
    with pytest.raises(trio.ClosedResourceError):
        await writer.write(b"b")
    assert b"b" not in theirs.recv(1_000_000)
