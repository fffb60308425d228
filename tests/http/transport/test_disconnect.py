"""A client's leaving reaches the application, in every state and however it leaves."""

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tokenflow.http.transport import take_body, when_left

START = {"type": "http.response.start", "status": 200, "headers": []}
CHUNK = {"type": "http.response.body", "body": b"x", "more_body": True}
HOW = pytest.mark.parametrize("how", ["close", "half-close", "reset"])


async def wait_disconnect(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


@HOW
@pytest.mark.parametrize("pipelined", [False, True])
async def test_before_the_first_byte_of_the_response(serving, connect, how, pipelined):
    """Stock: unseen once bytes of a next request have arrived, for the reader is parked."""
    told = trio.Event()

    async def handler(scope, receive, send):
        await wait_disconnect(receive)
        told.set()

    client = await connect(await serving(handler))
    await client.get()
    if pipelined:
        await wait_all_tasks_blocked(0.02)
        await client.get()
    await wait_all_tasks_blocked(0.02)
    await client.leave(how)
    with trio.fail_after(1):
        await told.wait()


@HOW
async def test_while_the_response_is_streamed(serving, connect, how):
    told = trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        await send(CHUNK)
        await wait_disconnect(receive)
        told.set()

    client = await connect(await serving(handler))
    await client.get()
    await client.stream.receive_some()
    await client.leave(how)
    with trio.fail_after(1):
        await told.wait()


@HOW
async def test_while_a_send_is_blocked(connect_small, how):
    """Stock: the send stays blocked after a half-close, and otherwise returns as if all were well."""
    told = trio.Event()

    async def handler(scope, receive, send):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def flood():
                with pytest.raises(OSError):
                    await send(START)
                    while True:
                        await send({**CHUNK, "body": b"x" * 4096})

            await wait_disconnect(receive)
        told.set()

    client = await connect_small(handler)
    await client.get()
    await wait_all_tasks_blocked(0.05)
    await client.leave(how)
    with trio.fail_after(1):
        await told.wait()


@HOW
async def test_before_the_whole_body_has_come(serving, connect, how):
    """The rest of a body is of no use any more: the disconnect overtakes it. Stock delivers that body first."""
    left, told = trio.Event(), trio.Event()

    async def handler(scope, receive, send):
        await left.wait()
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    client = await connect(await serving(handler))
    await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
    await wait_all_tasks_blocked(0.02)
    await client.leave(how)
    await wait_all_tasks_blocked(0.02)
    left.set()
    with trio.fail_after(1):
        await told.wait()


@HOW
async def test_while_a_large_body_waits_for_the_application(serving, connect, how):
    """Stock: the reader waits for the application to take the body, and sees nothing until it does."""
    told = trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        with pytest.raises(OSError):
            while True:
                await trio.sleep(0.005)
                await send(CHUNK)
        told.set()

    client = await connect(await serving(handler))
    await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(30):
        await client.send(b"1\r\nx\r\n")
        await wait_all_tasks_blocked()
    with trio.fail_after(1):
        await client.stream.receive_some()
        await client.leave(how)
        await told.wait()


async def test_a_full_inbox_holds_the_body_back_and_loses_nothing(serving, connect):
    size, ready = 3_000_000, trio.Event()

    async def handler(scope, receive, send):
        await ready.wait()
        received, more = 0, True
        while more:
            message = await receive()
            received += len(message["body"])
            more = message["more_body"]
        await send(START)
        await send({**CHUNK, "body": b"%d" % received, "more_body": False})

    client = await connect(await serving(handler))
    async with trio.open_nursery() as nursery:
        request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
        nursery.start_soon(client.send, request + b"x" * size)
        await wait_all_tasks_blocked(0.02)
        ready.set()
    assert (await client.response())[1] == b"%d" % size


def takes_body(ready):
    """A handler that takes its body once `ready()` returns, and answers with it."""

    async def handler(scope, receive, send):
        taken, whole = [], trio.Event()

        def take(data, more):
            taken.append(data)
            if not more:
                whole.set()

        await ready()
        stop = take_body(scope, take)
        await whole.wait()
        stop()
        await send(START)
        await send({**CHUNK, "body": b"".join(taken), "more_body": False})

    return handler


async def test_a_body_may_be_taken_as_it_comes(serving, connect):
    """What is there at once, the rest from the reader's own task; and the request after it anew."""
    client = await connect(await serving(takes_body(trio.lowlevel.checkpoint)))
    for _ in range(2):
        await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
        for _ in range(20):
            await client.send(b"1\r\nx\r\n")
            await wait_all_tasks_blocked(0.001)
        await client.send(b"0\r\n\r\n")
        assert (await client.response())[1] == b"half" + b"x" * 20


@pytest.mark.parametrize("pieces", [8, 9, 10, 11, 12, 30])
async def test_a_body_in_many_pieces_is_taken_whole(serving, connect, pieces):
    """Also where the reader waits with one of them, since more have come than are kept for who does not take them."""
    ready = partial(wait_all_tasks_blocked, 0.01)
    client = await connect(await serving(takes_body(ready)))
    said = [b"%d," % n for n in range(pieces)]
    chunks = b"".join([b"%x\r\n%b\r\n" % (len(piece), piece) for piece in said])
    await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert (await client.response())[1] == b"".join(said)


async def test_a_body_that_nobody_takes_any_more_holds_its_client_back(serving, connect):
    taken, done = [], trio.Event()

    async def handler(scope, receive, send):
        stop = take_body(scope, lambda data, more: taken.append(data))
        stop()
        await send({**START, "headers": []})
        await send(CHUNK)
        await done.wait()

    client = await connect(await serving(handler))
    await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    await client.stream.receive_some()
    with trio.move_on_after(0.3) as patience:
        for _ in range(1000):
            await client.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    assert patience.cancelled_caught and not taken
    done.set()


async def test_the_tasks_end(serving, connect, nursery):
    """A client that is gone leaves no task behind."""

    async def handler(scope, receive, send):
        await wait_disconnect(receive)

    address = await serving(handler)
    before = trio.lowlevel.current_statistics().tasks_living
    client = await connect(address)
    await client.get()
    await wait_all_tasks_blocked(0.02)
    assert trio.lowlevel.current_statistics().tasks_living > before
    await client.leave("reset")
    await wait_all_tasks_blocked(0.02)
    assert trio.lowlevel.current_statistics().tasks_living == before


@HOW
async def test_who_asked_is_called_when_the_client_leaves(serving, connect, how):
    called, asked = trio.Event(), trio.Event()

    async def handler(scope, receive, send):
        when_left(scope, called.set)
        asked.set()
        await trio.sleep_forever()

    client = await connect(await serving(handler))
    await client.get()
    await asked.wait()
    await wait_all_tasks_blocked(0.01)
    assert not called.is_set()
    await client.leave(how)
    with trio.fail_after(5):
        await called.wait()


async def test_who_asks_too_late_is_called_at_once(serving, connect):
    called, begun, left = trio.Event(), trio.Event(), trio.Event()

    async def handler(scope, receive, send):
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        when_left(scope, called.set)
        assert called.is_set()
        left.set()

    client = await connect(await serving(handler))
    await client.get()
    await begun.wait()
    await client.leave("close")
    with trio.fail_after(5):
        await left.wait()
