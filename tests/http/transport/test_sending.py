"""A send returns when the kernel has everything, and never outlives the client."""

from contextlib import suppress

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

START = {"type": "http.response.start", "status": 200, "headers": []}


def body(data=b"", more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}


async def wait_blocked():
    await wait_all_tasks_blocked(0.05)


class Flood:
    """Sends as fast as it may, and keeps account of how that ended."""

    def __init__(self, chunk=b"x" * 1000):
        self.chunk = chunk
        self.sent = 0
        self.error = None
        self.ended = trio.Event()

    async def __call__(self, scope, receive, send):
        try:
            await send(START)
            while True:
                await send(body(self.chunk))
                self.sent += 1
                await trio.lowlevel.checkpoint()
        except OSError as error:
            self.error = error
            raise
        finally:
            self.ended.set()


async def test_send_returns_when_the_kernel_has_all_of_it(connect_small):
    size = 1_000_000
    returned = trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        await send(body(b"x" * size))
        returned.set()
        await send(body(more=False))

    client = await connect_small(handler)
    await client.get()
    await wait_blocked()
    assert not returned.is_set()
    _, received = await client.response()
    assert returned.is_set() and len(received) == size


async def test_what_was_sent_can_be_read(connect_small):
    flood = Flood()
    client = await connect_small(flood)
    await client.get()
    await wait_blocked()
    sent = flood.sent
    assert 0 < sent < 200  # blocked, and soon
    received = 0
    with trio.fail_after(2):
        while received < sent * 1000:
            received += len(await client.stream.receive_some())


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
async def test_leaving_wakes_a_blocked_send(connect_small, how):
    """Stock: the send waits, shielded, until the client takes more, which after a half-close is never."""
    flood = Flood()
    client = await connect_small(flood)
    await client.get()
    await wait_blocked()
    await client.leave(how)
    with trio.fail_after(1):
        await flood.ended.wait()
    assert isinstance(flood.error, OSError)


async def test_a_client_that_takes_nothing_is_cut_off(connect_small):
    """Stock: waits for ever."""
    flood = Flood()
    client = await connect_small(flood, stall_s=0.1)
    await client.get()
    with trio.fail_after(2):
        await flood.ended.wait()
    assert "took nothing for 0.1 s" in str(flood.error)
    await client.wait_closed()


async def test_a_slow_client_that_goes_on_reading_is_not_cut_off(connect_small):
    flood = Flood()
    client = await connect_small(flood, stall_s=0.2)
    await client.get()
    end = trio.current_time() + 0.6
    while trio.current_time() < end:
        await trio.sleep(0.01)
        await client.stream.receive_some(4000)
    assert not flood.ended.is_set()


async def test_a_timeout_around_a_blocked_send_ends(connect_small):
    """Stock: the shield outlives the timeout, for ever."""
    ended = trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        with trio.move_on_after(0.05), suppress(OSError):
            await send(body(b"x" * 1_000_000))
        ended.set()

    client = await connect_small(handler, stall_s=0.2)
    await client.get()
    with trio.fail_after(2):
        await ended.wait()


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
async def test_a_send_after_the_disconnect_checkpoints_and_raises(serving, connect, how):
    """Stock: returns, without a checkpoint: an application that sends in a loop freezes the process."""
    checked = trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        while (await receive())["type"] != "http.disconnect":
            pass
        for _ in range(3):
            with assert_checkpoints(), pytest.raises(OSError):
                await send(body(b"x"))
        checked.set()

    client = await connect(await serving(handler))
    await client.get()
    await wait_blocked()
    await client.leave(how)
    with trio.fail_after(1):
        await checked.wait()


async def test_a_loop_of_sends_lets_others_run(serving, connect):
    """A send that the kernel takes at once is no checkpoint by itself."""
    done = trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        with assert_checkpoints():
            for _ in range(16):
                await send(body(b"x"))
        await send(body(more=False))
        done.set()

    client = await connect(await serving(handler))
    await client.get()
    assert (await client.response())[1] == b"x" * 16
    assert done.is_set()


async def test_the_head_goes_out_with_the_first_piece_of_the_body(connect_small):
    """Stock sends two packets."""
    begun, go = trio.Event(), trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        begun.set()
        await go.wait()
        await send(body(b"first"))
        await trio.sleep_forever()

    client = await connect_small(handler)
    await client.get()
    await begun.wait()
    go.set()
    with trio.fail_after(5):
        packet = await client.stream.receive_some()
    assert packet.startswith(b"HTTP/1.1 200") and packet.endswith(b"5\r\nfirst\r\n")


async def test_an_empty_piece_sends_the_head_alone(connect_small):
    async def handler(scope, receive, send):
        await send(START)
        await send(body(b""))
        await trio.sleep_forever()

    client = await connect_small(handler)
    await client.get()
    with trio.fail_after(5):
        packet = await client.stream.receive_some()
    assert packet.startswith(b"HTTP/1.1 200") and packet.endswith(b"\r\n\r\n")
