"""How much clients may take: beyond each limit they are told so, it is counted, and others do not notice."""

import json
import socket
from collections import Counter

import pytest
import trio
import trio.lowlevel
from trio.testing import wait_all_tasks_blocked

from tokenflow.http.transport import Limits, Traffic, connection


async def ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def traffic():
    return Traffic()


async def refused(client, status):
    head, body = await client.response()
    assert head.status_code == status
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert (b"connection", b"close") in head.headers
    assert await client.wait_closed() == b""
    return dict(head.headers)


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "status", "reason"),
    [
        (Limits(max_connections=2), 503, "connections"),
        (Limits(max_connections_per_address=2), 429, "address"),
    ],
)
async def test_one_connection_too_many_is_told_when_to_come_back(serving, connect, traffic, limits, status, reason):
    """Stock: there is no limit."""
    address = await serving(ok, limits=limits, traffic=traffic)
    first, second = await connect(address), await connect(address)
    await wait_all_tasks_blocked(0.02)
    third = await connect(address)
    await third.get()
    assert (await refused(third, status))[b"retry-after"] == b"1"
    assert (traffic.connections, traffic.refused) == (2, Counter({reason: 1}))
    for client in first, second:
        await client.get()
        assert (await client.response())[1] == b"ok"
    await first.leave("close")
    await wait_all_tasks_blocked(0.02)
    fourth = await connect(address)
    await fourth.get()
    assert (await fourth.response())[1] == b"ok"


async def test_many_at_once_are_counted_before_any_begins(serving, connect, traffic):
    address = await serving(ok, limits=Limits(max_connections=5), traffic=traffic)
    clients = []
    async with trio.open_nursery() as nursery:

        async def one():
            clients.append(await connect(address))

        for _ in range(20):
            nursery.start_soon(one)
    await wait_all_tasks_blocked(0.02)
    assert (traffic.connections, traffic.refused["connections"]) == (5, 15)
    for client in clients:
        await client.leave("close")
    await wait_all_tasks_blocked(0.02)
    assert traffic.connections == 0


async def test_another_address_has_its_own_share(serving, connect, traffic):
    address = await serving(ok, limits=Limits(max_connections_per_address=1), traffic=traffic)
    first = await connect(address)
    sock = trio.socket.socket()
    await sock.bind(("127.0.0.2", 0))
    await sock.connect(address)
    with sock:
        await sock.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await sock.recv(100)).startswith(b"HTTP/1.1 200")
    await first.get()
    assert (await first.response())[1] == b"ok"


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", ["X: " + "y" * 2000 + "\r\n", "X: y\r\n" * 10], ids=["long", "many"])
async def test_too_much_of_headers_is_a_431(serving, connect, traffic, headers):
    client = await connect(await serving(ok, limits=Limits(max_header_bytes=1000, max_headers=10), traffic=traffic))
    await client.get("/", headers)
    await refused(client, 431)
    assert traffic.refused == Counter(headers=1)


async def test_headers_that_never_end_are_a_431_too(serving, connect, traffic):
    client = await connect(await serving(ok, limits=Limits(max_header_bytes=1000), traffic=traffic))
    await client.send(b"GET / HTTP/1.1\r\n")
    for _ in range(50):
        await client.send(b"X: " + b"y" * 30 + b"\r\n")
    await refused(client, 431)


@pytest.mark.parametrize("before", [0, 1])
async def test_a_head_that_drips_is_a_408(serving, connect, traffic, before):
    """Stock: waits for it for ever, once its connection has been used."""
    client = await connect(await serving(ok, limits=Limits(header_timeout_s=0.2), traffic=traffic))
    for _ in range(before):
        await client.get()
        await client.response()
    began = trio.current_time()
    await client.send(b"GET / HTTP/1.1\r\n")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def drip():
            while True:
                await trio.sleep(0.02)
                await client.send(b"X: y\r\n")

        await refused(client, 408)
        nursery.cancel_scope.cancel()
    assert 0.15 < trio.current_time() - began < 1.5
    assert traffic.refused == Counter(header_timeout=1)


async def test_half_a_head_that_came_with_the_request_before_is_a_408(serving, connect, traffic):
    """Stock: waits for it for ever."""
    client = await connect(await serving(ok, limits=Limits(header_timeout_s=0.2), traffic=traffic))
    await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT")
    assert (await client.response())[1] == b"ok"
    await refused(client, 408)
    assert traffic.refused == Counter(header_timeout=1)


@pytest.mark.parametrize("size", [1, 1000, 70_000, 1_000_000])
async def test_an_answer_before_the_end_of_the_body_is_not_followed_by_a_reset(
    serving, connect, traffic, monkeypatch, size
):
    """What comes meanwhile is read: a reset may destroy the answer on its way (RFC 9112 section 9.6)."""
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    client = await connect(await serving(ok, traffic=traffic))
    await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n")
    head, body = await client.response()
    assert body == b"ok" and (b"connection", b"close") in head.headers
    await client.send(b"x" * size)
    while traffic.connections:
        await wait_all_tasks_blocked(0.005)
    assert client.stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


async def test_a_body_that_drips_wakes_nobody_before_it_is_whole(serving, connect):
    """Stock: each byte wakes the reader, and it the application."""
    pieces = []

    async def handler(scope, receive, send):
        while not pieces or pieces[-1]["more_body"]:
            pieces.append(await receive())
        await ok(scope, receive, send)

    client = await connect(await serving(handler))
    for n in range(1, 3):  # the second request on the connection is as the first
        await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n")
        for _ in range(50):
            await wait_all_tasks_blocked(0.005)
            assert len(pieces) == 0
            await client.send(b"x")
        assert (await client.response())[1] == b"ok"
        assert b"".join(piece["body"] for piece in pieces) == b"x" * 50
        assert len(pieces) == 2, n
        pieces.clear()


async def test_who_connects_and_says_nothing_is_closed_without_a_word(serving, connect, traffic):
    client = await connect(await serving(ok, limits=Limits(header_timeout_s=0.1), traffic=traffic))
    assert await client.wait_closed() == b""
    assert traffic.refused == Counter()


async def test_between_requests_the_keep_alive_timeout_counts(serving, connect, config):
    config.keep_alive_timeout = 5
    client = await connect(await serving(ok, limits=Limits(header_timeout_s=0.05)))
    await client.get()
    await client.response()
    await trio.sleep(0.15)
    await client.get()
    assert (await client.response())[1] == b"ok"


async def test_a_handshake_that_drips_is_ended(serving, connect, config, tmp_path, traffic):
    import trustme

    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    config.certfile = config.keyfile = str(tmp_path / "both.pem")
    client = await connect(await serving(ok, limits=Limits(header_timeout_s=0.1), traffic=traffic))
    await client.send(b"\x16\x03\x01\x02")
    assert await client.wait_closed() == b""
    assert traffic.connections == 0


# --- what comes ahead of its turn -------------------------------------------------------------------------------------


async def test_too_much_ahead_is_cut_and_counted(serving, connect, traffic):
    async def handler(scope, receive, send):
        await trio.sleep_forever()

    client = await connect(await serving(handler, limits=Limits(max_pipelined_bytes=1000), traffic=traffic))
    await client.get()
    with trio.fail_after(2), pytest.raises(trio.BrokenResourceError):
        while True:
            await client.send(b"x" * 100)
            await trio.lowlevel.checkpoint()
    assert traffic.refused == Counter(pipelined=1)


async def test_refusals_are_counted_by_what_is_wrong(serving, connect, traffic):
    address = await serving(ok, traffic=traffic)
    for raw in (b"GET ?a HTTP/1.1\r\nHost: x\r\n\r\n", b"\0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x@y\r\n\r\n"):
        client = await connect(address)
        await client.send(raw)
        await client.wait_closed()
        await client.stream.aclose()
    assert traffic.refused == Counter(malformed=2, host=1)


def test_every_reason_is_there_from_the_start():
    """Prometheus' `rate` needs a 0 to rise from."""
    assert set(Traffic().refused) >= {"connections", "address", "headers", "header_timeout", "body", "body_timeout"}


async def test_the_backlog_is_as_asked():
    from tokenflow.http.transport import bind

    with bind("127.0.0.1", 0, backlog=7) as listener:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        assert int.from_bytes(info[28:32], "little") == 7  # of a listener, `tcpi_sacked` is the backlog
