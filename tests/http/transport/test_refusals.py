"""Requests that the transport itself refuses, each in the one error envelope."""

import json

import pytest
import trio


async def ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def request(target="/", host="x", headers="", method="GET"):
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode("latin-1")


SMUGGLED = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"

NO_HOSTS = [
    *("[::1]x", "[::1].", "[::1]:x", "[::1]:80]", "[::1", "[]", "[127.0.0.1]", "[..:]", "[::1%25lo]", "::1"),
    *("x:80:80", "x:-1", "x:99999999", ":80", "x y", "x\ty", "x%41", "x\xe9", "x:8\xb2"),
    *("x..y", ".x", ".", "x" * 64),  # whoever encodes it as DNS does fails
]
HOSTS = ["X", "x:", "x:80", "x_y.z-0", "x.", "x" * 63 + ".y", "127.0.0.1:80", "[::1]", "[::FFFF:127.0.0.1]:80"]

REFUSED = [
    pytest.param(400, request(headers=SMUGGLED, method="POST") + b"0\r\n\r\n", id="two lengths"),
    pytest.param(400, request("?a=1"), id="no slash, query"),
    pytest.param(400, request("quick"), id="no slash"),
    pytest.param(400, request("http://x?a=1"), id="absolute, no slash"),
    pytest.param(421, request("http://x@y/"), id="absolute, no host"),
    pytest.param(400, request("*"), id="asterisk for GET"),
    pytest.param(400, request("x:80", method="CONNECT"), id="CONNECT"),
    *(pytest.param(421, request(host=f"x{c}y"), id=f"host with {c}") for c in "/?#@\\"),
    *(pytest.param(421, request(host=host), id=f"host {host[:20]}") for host in NO_HOSTS),
    pytest.param(431, request(headers="X-Long: " + "x" * 20_000 + "\r\n"), id="long headers"),
    pytest.param(400, b"\x16\x03\x01\x02\x00" + b"\xff" * 100 + b"\r\n\r\n", id="TLS to a plain port"),
    pytest.param(400, request("/\xff"), id="target not ASCII"),
    pytest.param(400, b"GET / HTTP/1.1\r\n\r\n", id="no host"),
    pytest.param(400, request(headers="Host: y\r\n"), id="two hosts"),
]


@pytest.mark.parametrize("status, raw", REFUSED)
async def test_refused(serving, connect, status, raw):
    """Stock: two lengths and a strange host are served, `?a=1` is the application's failure; bodies are empty."""
    address = await serving(ok)
    client = await connect(address)
    await client.send(raw)
    head, body = await client.response()
    assert head.status_code == status
    assert dict(head.headers)[b"content-type"] == b"application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]
    assert await client.wait_closed() == b""
    again = await connect(address)
    await again.get()
    assert (await again.response())[1] == b"ok"


@pytest.mark.parametrize(
    "raw",
    [
        request("/?a=1"),
        request("//x"),
        request("http://x/quick"),
        *(request(host=host) for host in HOSTS),
    ],
)
async def test_not_refused(serving, connect, raw):
    client = await connect(await serving(ok))
    await client.send(raw)
    head, _ = await client.response()
    assert head.status_code == 200


async def test_options_for_the_server_itself(serving, connect):
    """Stock: left to the application, which knows paths only."""
    client = await connect(await serving(ok))
    for _ in range(2):
        await client.send(request("*", method="OPTIONS"))
        head, body = await client.response()
        assert (head.status_code, body) == (204, b"")
    await client.get()  # the connection goes on
    assert (await client.response())[1] == b"ok"


async def test_a_refusal_of_HEAD_has_no_body(serving, connect):
    client = await connect(await serving(ok))
    await client.send(request("?a=1", method="HEAD"))
    raw = await client.wait_closed()
    assert raw.startswith(b"HTTP/1.1 400 ") and raw.endswith(b"\r\n\r\n")


async def test_a_broken_body_is_refused_and_is_a_disconnect(serving, connect):
    told = trio.Event()

    async def handler(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        with pytest.raises(OSError):
            await ok(scope, receive, send)
        told.set()

    client = await connect(await serving(handler))
    await client.send(request(headers="Transfer-Encoding: chunked\r\n", method="POST") + b"ZZ\r\n")
    head, _ = await client.response()
    assert head.status_code == 400
    with trio.fail_after(1):
        await told.wait()


async def test_an_application_that_fails_answers_500(serving, connect, caplog):
    """Stock: an empty body."""

    async def handler(scope, receive, send):
        raise ValueError("a bug")

    client = await connect(await serving(handler))
    await client.get()
    head, body = await client.response()
    assert head.status_code == 500
    assert json.loads(body)["error"]["type"] == "server_error"
    assert b"a bug" not in body
    assert "ValueError: a bug" in caplog.text


async def test_an_application_that_fails_in_its_response_is_cut(serving, connect, caplog):
    async def handler(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        raise ValueError("a bug")

    client = await connect(await serving(handler))
    await client.get()
    raw = await client.wait_closed()
    assert raw.endswith(b"1\r\nx\r\n")  # and no last chunk: the client can tell
    assert "ValueError: a bug" in caplog.text


async def test_a_client_that_leaves_is_not_an_error(serving, connect, caplog):
    """Stock: the sends go on for ever, without a checkpoint."""
    ended = trio.Event()

    async def handler(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.set()

    client = await connect(await serving(handler))
    await client.get()
    await client.stream.receive_some()
    await client.leave("reset")
    with trio.fail_after(1):
        await ended.wait()
    assert not caplog.records


async def test_a_targets_own_host_counts(serving, connect):
    """Stock: the header's, whatever the target says."""

    async def handler(scope, receive, send):
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b" ".join(hosts)})

    client = await connect(await serving(handler))
    await client.send(request("http://Y:80/a://z", host="x"))
    assert (await client.response())[1] == b"Y:80"
    await client.send(request("/a://z", host="x"))
    assert (await client.response())[1] == b"x"
