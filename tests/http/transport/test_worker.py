"""What must not end the worker, how it binds and starts, and that Hypercorn's other protocols still work."""

import errno
import socket
import ssl
import struct
from functools import partial

import h2.config
import h2.connection
import h2.events
import pytest
import trio
import trustme
import wsproto
from hypercorn.config import Config
from hypercorn.utils import LifespanFailureError
from quart import request
from quart_trio import QuartTrio
from wsproto.events import AcceptConnection, CloseConnection, Message, Request, TextMessage

from tokenflow.http.transport import bind, serve


async def ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


async def echo(scope, receive, send):
    if scope["type"] == "http":
        return await ok(scope, receive, send)
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})
    return None


UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n%b\r\n"
)


def h2_client(*headers, end_stream=True):
    connection = h2.connection.H2Connection(
        h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    )
    connection.initiate_connection()
    if headers:
        connection.send_headers(1, headers, end_stream=end_stream)
    return connection


H2_BASE = [(b":scheme", b"http"), (b":authority", b"x")]
PRIORITY = b"\0\0\5\2\0\0\0%b\0\0\0\0\0"

BAD_PACKETS = {
    "websocket data with the handshake": UPGRADE % b"" + b"\x81\x82\0\0\0\0hi",
    "websocket subprotocol not ASCII": UPGRADE % b"Sec-WebSocket-Protocol: \xff\r\n",
    "h2 CONNECT without path": h2_client((b":method", b"CONNECT"), (b":authority", b"x")).data_to_send(),
    "h2 path not ASCII": h2_client((b":method", b"GET"), (b":path", b"/\xff"), *H2_BASE).data_to_send(),
    "h2 method not ASCII": h2_client((b":method", b"G\xff"), (b":path", b"/"), *H2_BASE).data_to_send(),
    "h2 many PRIORITY frames": h2_client().data_to_send()
    + b"".join(PRIORITY % bytes([n >> 8, n & 255]) for n in range(1, 2300, 2)),
}


@pytest.mark.parametrize("name", BAD_PACKETS)
async def test_a_bad_packet_ends_its_connection_alone(serving, connect, caplog, name):
    """Stock: the exception ends the worker, and with it every stream there is."""
    address = await serving(echo)
    tasks = trio.lowlevel.current_statistics().tasks_living
    client = await connect(address)
    await client.send(BAD_PACKETS[name])
    await trio.testing.wait_all_tasks_blocked(0.02)
    await client.leave("close")
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert trio.lowlevel.current_statistics().tasks_living == tasks  # and leaves nothing behind
    other = await connect(address)
    await other.get()
    assert (await other.response())[1] == b"ok"
    assert len(caplog.records) <= 1
    for record in caplog.records:
        message = record.getMessage()
        assert "dropped" in message and "\n" not in message and not record.exc_info
        assert "Host" not in message and ":path" not in message  # nothing of what the client sent


class ExhaustedListener(socket.socket):
    """Has no file descriptors for the first calls."""

    failures = 2

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_accepting_goes_on_after_emfile(serving, connect, caplog):
    plain = bind("127.0.0.1", 0)
    listener = ExhaustedListener(fileno=plain.detach())
    listener.setblocking(False)
    client = await connect(await serving(ok, listener=listener))
    await client.get()
    assert (await client.response())[1] == b"ok"
    assert caplog.text.count("cannot accept") == 1


async def test_bind_fails_if_the_port_is_busy():
    with bind("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use") as caught:
        bind("127.0.0.1", listener.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
async def test_accepted_sockets_inherit_the_options():
    """Stock: a backlog of 100 and no user timeout."""
    with bind("127.0.0.1", 0, stall_s=7, keepalive_s=3, send_buffer=8192) as listener:
        tcp_info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        assert struct.unpack("8x 6I", tcp_info)[5] == 2048  # of a listener, `tcpi_sacked` is the backlog
        with socket.create_connection(listener.getsockname()):
            await trio.lowlevel.wait_readable(listener)
            with listener.accept()[0] as accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 16 * 1024
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 8192  # man 7 socket


async def test_bind_takes_ipv6():
    with bind("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


async def test_binds_what_the_config_says_and_tells_the_urls(nursery, connect, config, app_of):
    config.bind = ["127.0.0.1:0", "[::1]:0"]
    urls = await nursery.start(serve, app_of(ok), config)
    assert urls[0].startswith("http://127.0.0.1:") and urls[1].startswith("http://[::1]:")
    client = await connect(("127.0.0.1", int(urls[0].rpartition(":")[2])))
    await client.get()
    assert (await client.response())[1] == b"ok"


async def test_a_failed_startup_is_told(nursery, config):
    """Stock: the same error, in a group."""

    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    listener = bind("127.0.0.1", 0)
    with pytest.raises(LifespanFailureError, match="no model"):
        await nursery.start(partial(serve, app, config, listeners=[listener]))
    assert listener.fileno() == -1


async def test_a_lifespan_that_does_not_end_is_bounded(config):
    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await trio.sleep_forever()

    with trio.fail_after(2.5):
        await serve(
            app,
            config,
            listeners=[bind("127.0.0.1", 0)],
            shutdown_trigger=trio.lowlevel.checkpoint,
            drain_s=0,
        )


async def test_the_application_starts_before_and_ends_after_its_connections(nursery, connect, config):
    order, stop = [], trio.Event()

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            order.append(scope["state"]["made at startup"])
            return await ok(scope, receive, send)
        await receive()
        scope["state"]["made at startup"] = "request"
        order.append("startup")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        order.append("shutdown")
        return await send({"type": "lifespan.shutdown.complete"})

    listener = bind("127.0.0.1", 0)
    client = await connect(listener.getsockname())  # waits in the backlog
    await client.get()
    await nursery.start(partial(serve, app, config, listeners=[listener], shutdown_trigger=stop.wait))
    await client.response()
    stop.set()
    await client.wait_closed()
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert order == ["startup", "request", "shutdown"]


async def test_quart_trio(serving, connect):
    app = QuartTrio(__name__)

    @app.route("/<name>", methods=["POST"])
    async def hello(name):
        body = await request.get_data(as_text=True)

        async def chunks():
            yield f"hello {name}, "
            yield body

        return chunks()

    client = await connect(await serving(app))
    for _ in range(2):
        await client.send(b"POST /you HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nyes")
        assert (await client.response())[1] == b"hello you, yes"


async def h2_get(stream):
    connection = h2_client((b":method", b"GET"), (b":path", b"/"), *H2_BASE)
    await stream.send_all(connection.data_to_send())
    received = b""
    with trio.fail_after(2):
        while True:
            for event in connection.receive_data(await stream.receive_some()):
                if isinstance(event, h2.events.DataReceived):
                    received += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    return received
            await stream.send_all(connection.data_to_send() or b"")


async def test_h2_by_prior_knowledge(serving, connect):
    client = await connect(await serving(ok))
    assert await h2_get(client.stream) == b"ok"


@pytest.mark.parametrize("protocol", ["h2", "http/1.1"])
async def test_tls(serving, connect, config: Config, tmp_path, protocol):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    config.certfile, config.keyfile = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols([protocol])

    async def handler(scope, receive, send):
        assert scope["scheme"] == "https"
        await ok(scope, receive, send)

    client = await connect(await serving(handler))
    client.stream = trio.SSLStream(client.stream, context, server_hostname="localhost", https_compatible=True)
    await client.stream.do_handshake()
    assert client.stream.selected_alpn_protocol() == protocol
    if protocol == "h2":
        assert await h2_get(client.stream) == b"ok"
    else:
        await client.stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"ok" in await client.wait_closed()
    client.stream = client.stream.transport_stream


async def test_a_tls_handshake_that_fails_is_no_error(serving, connect, config, tmp_path, caplog):
    certificate = trustme.CA().issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    config.certfile = config.keyfile = str(tmp_path / "both.pem")
    client = await connect(await serving(ok))
    await client.get()
    await client.wait_closed()
    assert not caplog.records


async def websocket(client):
    connection = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
    await client.send(connection.send(Request(host="x", target="/")))

    async def event():
        with trio.fail_after(2):
            while True:
                for event in connection.events():
                    return event
                connection.receive_data(await client.stream.receive_some() or None)

    assert isinstance(await event(), AcceptConnection)
    return connection, event


async def test_websocket(serving, connect):
    client = await connect(await serving(echo))
    connection, event = await websocket(client)
    for text in ("one", "two"):
        await client.send(connection.send(Message(text)))
        answer = await event()
        assert isinstance(answer, TextMessage) and answer.data == text
    await client.send(connection.send(CloseConnection(1000)))
    assert isinstance(await event(), CloseConnection)
    assert await client.wait_closed() == b""


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
async def test_websocket_leaving_wakes_a_blocked_send(connect_small, how):
    """Stock: the send waits, shielded; once it is over, sends return at once and do nothing: a hot loop."""
    ended = trio.Event()

    async def handler(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        with pytest.raises(OSError):
            while True:
                await send({"type": "websocket.send", "text": "x" * 1000})
        ended.set()

    client = await connect_small(handler)
    await websocket(client)
    await trio.testing.wait_all_tasks_blocked(0.05)
    await client.leave(how)
    with trio.fail_after(1):
        await ended.wait()


async def test_websocket_messages_before_the_close_are_delivered(serving, connect):
    received, done, go = [], trio.Event(), trio.Event()

    async def handler(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await go.wait()
        while (message := await receive())["type"] == "websocket.receive":
            received.append(message["text"])
        done.set()

    client = await connect(await serving(handler))
    connection, _ = await websocket(client)
    await client.send(connection.send(Message("one")) + connection.send(Message("two")))
    await client.leave("close")
    await trio.testing.wait_all_tasks_blocked(0.02)
    go.set()
    with trio.fail_after(1):
        await done.wait()
    assert received == ["one", "two"]
