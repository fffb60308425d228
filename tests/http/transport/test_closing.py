"""Connections close when they should: asked to, idle, at the drain, and after an error, without losing an answer."""

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tokenflow.http.transport import Limits, bind, serve

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
END = {"type": "http.response.body", "body": b"ok", "more_body": False}


async def ok(scope, receive, send):
    await send(START)
    await send(END)


@pytest.fixture(params=["plain", "ends on disconnect"])
def answer(request, ends_on_disconnect):
    return ok if request.param == "plain" else ends_on_disconnect(ok)


async def test_a_connection_is_used_again(serving, connect, answer):
    client = await connect(await serving(answer))
    for _ in range(3):
        await client.get()
        head, body = await client.response()
        assert (head.status_code, body) == (200, b"ok")


@pytest.mark.parametrize("version, header", [("1.1", "Connection: close\r\n"), ("1.0", "")])
async def test_close_and_http_1_0_close(serving, connect, answer, version, header):
    """Stock: open for ever, if the application ends itself on the disconnect that ends every response."""
    client = await connect(await serving(answer))
    await client.send(f"GET / HTTP/{version}\r\nHost: x\r\n{header}\r\n".encode())
    assert (await client.wait_closed()).endswith(b"ok")


@pytest.mark.parametrize("requests", [0, 1, 2])
async def test_an_idle_connection_is_closed(serving, connect, config, answer, requests):
    """Stock: not after a response, if the application ends itself on the disconnect."""
    config.keep_alive_timeout = 0.1
    client = await connect(await serving(answer, limits=Limits(header_timeout_s=0.1)))
    for _ in range(requests):
        await client.get()
        await client.response()
    assert await client.wait_closed() == b""


async def test_the_keep_alive_timeout_does_not_cut_a_response(serving, connect, config):
    config.keep_alive_timeout = 0.05

    async def handler(scope, receive, send):
        await trio.sleep(0.15)
        await ok(scope, receive, send)

    client = await connect(await serving(handler))
    await client.get()
    assert (await client.response())[1] == b"ok"


async def test_a_drain_closes_idle_connections_at_once(serving, connect, answer):
    """Stock: waits for the whole timeout, if the application ends itself on the disconnect."""
    stop = trio.Event()
    address = await serving(answer, shutdown_trigger=stop.wait, drain_s=20)
    client = await connect(address)
    await client.get()
    await client.response()
    stop.set()
    assert await client.wait_closed(1) == b""
    with trio.fail_after(1):
        await serving.returned.wait()
    with pytest.raises(OSError):
        await connect(address)


async def test_a_drain_lets_a_response_end(serving, connect, ends_on_disconnect):
    """Stock: no hook tells the application, and no header tells the client."""
    stop, draining = trio.Event(), trio.Event()

    async def handler(scope, receive, send):
        await draining.wait()
        await ok(scope, receive, send)

    async def drain():
        draining.set()

    address = await serving(ends_on_disconnect(handler), shutdown_trigger=stop.wait, drain=drain, drain_s=20)
    client = await connect(address)
    await client.get()
    await wait_all_tasks_blocked(0.02)
    stop.set()
    head, body = await client.response()
    assert body == b"ok" and (b"connection", b"close") in head.headers
    assert await client.wait_closed() == b""
    await client.stream.aclose()
    with trio.fail_after(1):
        await serving.returned.wait()


async def test_the_port_stays_open_until_the_drain_ends(serving, connect, answer):
    """Stock: closed at once, so who comes is told nothing. Here each is answered once, also who came before."""
    stop, done = trio.Event(), trio.Event()
    address = await serving(answer, shutdown_trigger=stop.wait, drain=done.wait, drain_s=20)
    early, silent = await connect(address), await connect(address)
    await wait_all_tasks_blocked(0.02)
    stop.set()
    await wait_all_tasks_blocked(0.02)
    late = await connect(address)
    for client in early, late:
        await client.get()
        head, body = await client.response()
        assert body == b"ok" and (b"connection", b"close") in head.headers
        assert await client.wait_closed() == b""
        await client.stream.aclose()
    assert not serving.returned.is_set()
    done.set()
    assert await silent.wait_closed(1) == b""
    with trio.fail_after(1):
        await serving.returned.wait()
    with pytest.raises(OSError):
        await connect(address)


async def test_a_request_that_has_come_when_the_drain_begins_is_answered(serving, connect, answer):
    stop = trio.Event()
    client = await connect(await serving(answer, shutdown_trigger=stop.wait, drain_s=20))
    await client.get()
    await client.response()
    stop.set()
    await client.get()  # sent before the server has looked at `stop`
    assert (await client.response())[1] == b"ok"


async def test_cancelled_it_ends_at_once_whoever_does_not_read(nursery, connect, config, app_of):
    """Stock: waits for ever, for its send is shielded."""
    listener = bind("127.0.0.1", 0, send_buffer=4096)
    client = await connect(listener.getsockname(), receive_buffer=4096)
    await client.get()
    with trio.move_on_after(1), trio.CancelScope() as scope:
        async with trio.open_nursery() as server:
            server.start_soon(partial(serve, app_of(flood), config, listeners=[listener]))
            await wait_all_tasks_blocked(0.05)
            server.cancel_scope.cancel()
        scope.cancel()
    assert scope.cancel_called
    await client.wait_closed()


async def flood(scope, receive, send):
    await send({**START, "headers": []})
    while True:
        await send({**END, "body": b"x" * 4096, "more_body": True})


async def deaf(scope, receive, send):
    await trio.sleep_forever()


async def eternal(scope, receive, send):
    while True:
        try:
            await flood(scope, receive, send)
        except OSError:
            await trio.sleep(0.01)


@pytest.mark.parametrize("handler", [flood, deaf, eternal])
async def test_a_drain_is_bounded(serving, connect_small, handler):
    """Stock: a client that does not read holds the server for ever."""
    stop = trio.Event()
    client = await connect_small(handler, shutdown_trigger=stop.wait, drain_s=0.1)
    await client.get()
    await wait_all_tasks_blocked(0.05)
    stop.set()
    with trio.fail_after(0.1 + 2):
        await serving.returned.wait()
    await client.wait_closed()


async def test_an_answer_survives_a_body_that_nobody_reads(serving, connect, answer):
    """Stock: closes with the body unread; the reset that this sends takes the answer with it, sometimes."""
    client = await connect(await serving(answer))
    size = 500_000
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def upload():
            await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(10):
                await trio.sleep(0.01)
                await client.send(b"x" * (size // 10))

        await wait_all_tasks_blocked(0.02)
    assert (await client.response())[1] == b"ok"
