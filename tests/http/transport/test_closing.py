"""Connections close when they should: asked to, idle, at the drain, and after an error, without losing an answer."""

import ssl
from functools import partial

import pytest
import trio
import trustme
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


# --- over TLS: a client that is strict can tell an end from a cut -----------------------------------------------------


@pytest.fixture
def connect_tls(serving, connect, config, tmp_path):
    """`await connect_tls(handler, **options of serve)`: a client that takes no end for one without a close_notify."""

    async def connect_tls(handler, protocol="http/1.1", **options):
        authority = trustme.CA()
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
        config.certfile = config.keyfile = str(tmp_path / "both.pem")
        context = ssl.create_default_context()
        authority.configure_trust(context)
        context.set_alpn_protocols([protocol])
        plain = await connect(await serving(handler, **options))
        stream = trio.SSLStream(plain.stream, context, server_hostname="localhost")
        await stream.do_handshake()
        return stream

    return connect_tls


async def read_to_the_end(stream, seconds=2):
    received = b""
    with trio.fail_after(seconds):
        while data := await stream.receive_some():
            received += data
    return received


ENDS = {
    "asked to": (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
    "HTTP/1.0": (b"GET / HTTP/1.0\r\n\r\n", b"200"),
    "refused": (b"GET / HTTP/1.1\r\n\r\n", b"400"),
    "a head that does not end": (b"GET / HTTP/1.1\r\n", b"408"),
    "idle": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
    "idle from the beginning": (b"", b""),
}


@pytest.mark.parametrize("request_, status", ENDS.values(), ids=ENDS)
async def test_an_end_is_told_from_a_cut(connect_tls, config, answer, request_, status):
    """Stock: no close_notify."""
    config.keep_alive_timeout = 0.1
    stream = await connect_tls(answer, limits=Limits(header_timeout_s=0.1))
    if request_:
        await stream.send_all(request_)
    assert (await read_to_the_end(stream))[9:12] == status


async def test_an_end_of_http_2_is_told_from_a_cut(connect_tls, config):
    config.keep_alive_timeout = 0.1
    stream = await connect_tls(ok, "h2", limits=Limits(header_timeout_s=0.1))
    await stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    assert (await read_to_the_end(stream)).endswith(b"\0\0\x08\7\0\0\0\0\0" + bytes(8))  # a GOAWAY


async def test_a_drain_is_told_from_a_cut(connect_tls, serving, answer):
    stop = trio.Event()
    stream = await connect_tls(answer, shutdown_trigger=stop.wait, drain_s=20)
    await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while not received.endswith(b"ok"):
        received += await stream.receive_some()
    stop.set()
    assert await read_to_the_end(stream) == b""
    await stream.aclose()
    with trio.fail_after(1):
        await serving.returned.wait()


async def test_an_answer_over_tls_survives_a_body_that_nobody_reads(connect_tls, answer):
    stream = await connect_tls(answer)
    await stream.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n")
    await wait_all_tasks_blocked(0.02)
    await stream.send_all(b"x" * 500_000)  # after the end, and still read
    assert (await read_to_the_end(stream)).endswith(b"ok")


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_does_not_answer_the_end_is_left_in_a_moment(connect_tls, serving, reads):
    stop = trio.Event()
    stream = await connect_tls(ok, shutdown_trigger=stop.wait, drain_s=20)
    await stream.send_all(ENDS["asked to"][0])
    if reads:
        await read_to_the_end(stream)
    await wait_all_tasks_blocked(0.02)
    stop.set()
    with trio.fail_after(1.5):
        await serving.returned.wait()
