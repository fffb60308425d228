"""Bytes that come during a response are held, bounded, and answered after it."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked


@pytest.fixture
def echo():
    """Answers with the path and the body, one at a time, when `echo.go` is released."""

    async def echo(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await echo.go.acquire()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["raw_path"] + body})

    echo.go = trio.Semaphore(0)
    return echo


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("together", [True, False])
async def test_requests_are_answered_in_order(serving, connect, echo, ends_on_disconnect, wrapped, together):
    client = await connect(await serving(ends_on_disconnect(echo) if wrapped else echo))
    requests = [b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n%d" % (n, n) for n in range(5)]
    for request in [b"".join(requests)] if together else requests:
        await client.send(request)
        await wait_all_tasks_blocked(0.01)
    for n in range(5):
        echo.go.release()
        assert (await client.response())[1] == b"/%d%d" % (n, n)


async def test_a_request_cut_in_two_by_a_response(serving, connect, echo):
    client = await connect(await serving(echo))
    await client.get("/one")
    await client.send(b"GET /two HTTP/1.1\r\nHo")
    await wait_all_tasks_blocked(0.01)
    echo.go.release()
    assert (await client.response())[1] == b"/one"
    await client.send(b"st: x\r\n\r\n")
    echo.go.release()
    assert (await client.response())[1] == b"/two"


async def test_a_held_upgrade_to_h2_is_ignored(serving, connect, echo):
    client = await connect(await serving(echo))
    await client.get("/one")
    await client.get("/two", "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n")
    for path in (b"/one", b"/two"):
        echo.go.release()
        assert (await client.response())[1] == path


async def test_no_more_than_64_KiB_are_held(serving, connect, echo):
    """Stock: reads 64 KiB and then parks, so the client hangs instead of failing."""
    client = await connect(await serving(echo))
    await client.get()
    with trio.fail_after(2), pytest.raises(trio.BrokenResourceError):
        while True:
            await client.send(b"x" * 10_000)


async def test_less_is_held(serving, connect, echo):
    client = await connect(await serving(echo))
    await client.get()
    padding = b"X-Padding: " + b"x" * 10_000 + b"\r\n"
    await client.send((b"GET /next HTTP/1.1\r\nHost: x\r\n" + padding + b"\r\n") * 6)
    for path in [b"/"] + [b"/next"] * 6:
        echo.go.release()
        assert (await client.response())[1] == path


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "more", [b"\r\n", b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n", b"x" * 200_000], ids=["CRLF", "a", "much"]
)
@pytest.mark.parametrize("last", [b"HTTP/1.1\r\nHost: x\r\nConnection: close", b"HTTP/1.0"], ids=["close", "1.0"])
async def test_what_follows_the_last_request_is_nobodys(serving, connect, echo, last, more, together):
    """Old clients send a line end after a body. Stock: a 400 for the good request, or a cut in its answer."""
    client = await connect(await serving(echo))
    request = b"POST /last %b\r\nContent-Length: 1\r\n\r\na" % last
    if together:
        await client.send(request + more)
    else:
        await client.send(request)
        await wait_all_tasks_blocked(0.01)
        await client.send(more)
    await wait_all_tasks_blocked(0.01)
    echo.go.release()
    assert (await client.response())[1] == b"/lasta"
    assert await client.wait_closed() == b""


async def test_a_held_request_does_not_begin_after_the_client_has_left(serving, connect, ends_on_disconnect):
    """The FIN and the end of the response that the request waits for come in one step of the scheduler."""
    go, running = trio.Semaphore(0), 0

    async def handler(scope, receive, send):
        nonlocal running
        running += 1
        try:
            if scope["path"] == "/held":
                await trio.sleep_forever()
            await go.acquire()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        finally:
            running -= 1

    address = await serving(ends_on_disconnect(handler))
    for _ in range(8):
        client = await connect(address)
        await client.get()
        await client.get("/held")
        await wait_all_tasks_blocked(0.01)
        await client.leave("half-close")
        go.release()
        await wait_all_tasks_blocked(0.01)
        assert running == 0
        go = trio.Semaphore(0)
