"""HTTP/2: a send waits for the client's window, a stream's trouble is its own, and every leaving is seen."""

from collections import Counter, defaultdict
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import pytest
import trio
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame
from trio.testing import wait_all_tasks_blocked
from wsproto import ConnectionType
from wsproto.connection import Connection as WebSocket
from wsproto.events import CloseConnection, Message, TextMessage

from tokenflow.http.transport import Limits, Traffic

START = {"type": "http.response.start", "status": 200, "headers": []}
WINDOW = 65_535
HOW = pytest.mark.parametrize("how", ["close", "half-close", "reset"])


def body(data=b"", more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}


async def ok(scope, receive, send):
    await send(START)
    await send(body(b"ok", more=False))


async def wait_disconnect(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


class Client:
    """The `h2` library on a socket. It opens no window by itself: what is read is acknowledged only where asked."""

    def __init__(self, client):
        self.client = client
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(validate_outbound_headers=False))
        self.received = defaultdict(bytes)
        self.status = {}
        self.continued = set()
        self.ended = {}
        self.resets = {}
        self.goaway = self.last_stream = None
        self.h2._frame_dispatch_table[GoAwayFrame] = self._take_goaway  # the library would read no streams after it
        self.settings_acknowledged = False

    def _take_goaway(self, frame):
        self.goaway, self.last_stream = ErrorCodes(frame.error_code), frame.last_stream_id
        return [], []

    async def flush(self):
        await self.client.send(self.h2.data_to_send())

    async def open(self):
        self.h2.initiate_connection()
        await self.flush()
        await self.until(lambda: self.settings_acknowledged)

    async def request(self, path="/", method="GET", end_stream=True, **pseudo):
        stream_id = self.h2.get_next_available_stream_id()
        fields = {"method": method, "path": path, "scheme": "http", "authority": "x"} | pseudo
        headers = [(f":{name}", value) for name, value in fields.items() if value is not None]
        self.h2.send_headers(stream_id, headers, end_stream=end_stream)
        await self.flush()
        return stream_id

    async def read(self, *, acknowledge=True):
        data = await self.client.stream.receive_some()
        if not data:
            raise EOFError
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.status[event.stream_id] = int(dict(event.headers)[b":status"])
            elif isinstance(event, h2.events.InformationalResponseReceived):
                self.continued.add(event.stream_id)
            elif isinstance(event, h2.events.DataReceived):
                self.received[event.stream_id] += event.data
                if acknowledge:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.setdefault(event.stream_id, "end")
            elif isinstance(event, h2.events.StreamReset):
                self.resets[event.stream_id] = ErrorCodes(event.error_code)
                self.ended.setdefault(event.stream_id, ErrorCodes(event.error_code))
            elif isinstance(event, h2.events.SettingsAcknowledged):
                self.settings_acknowledged = True
        await self.flush()

    async def until(self, condition, *, acknowledge=True):
        with trio.fail_after(3):
            while not condition():
                await self.read(acknowledge=acknowledge)

    async def response(self, stream_id):
        """Status and body of a response that ends, however."""
        await self.until(lambda: stream_id in self.ended)
        return self.status.get(stream_id), self.received[stream_id], self.ended[stream_id]


@pytest.fixture
def connect_h2(connect):
    async def connect_h2(address, **options):
        client = Client(await connect(address, **options))
        await client.open()
        return client

    return connect_h2


class Flood:
    """Sends as fast as it may, and keeps account of how that ended."""

    def __init__(self, chunk=b"x" * 1000):
        self.chunk = chunk
        self.sent = 0
        self.error = None
        self.ended = trio.Event()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/ok":
            await ok(scope, receive, send)
            return
        try:
            await send(START)
            while True:
                await send(body(self.chunk))
                self.sent += len(self.chunk)
        except OSError as error:
            self.error = error
            raise
        finally:
            self.ended.set()


# --- backpressure -----------------------------------------------------------------------------------------------------


async def test_a_closed_window_holds_the_application(serving, connect_h2):
    """Stock: it goes on for ever, and a buffer grows by 45 MB a second."""
    flood = Flood()
    client = await connect_h2(await serving(flood))
    stream_id = await client.request()
    await client.until(lambda: len(client.received[stream_id]) == WINDOW, acknowledge=False)
    await wait_all_tasks_blocked(0.05)
    assert flood.sent <= WINDOW
    client.h2.increment_flow_control_window(10_000, stream_id)
    client.h2.increment_flow_control_window(10_000)
    await client.flush()
    await client.until(lambda: len(client.received[stream_id]) == WINDOW + 10_000, acknowledge=False)
    await wait_all_tasks_blocked(0.05)
    assert WINDOW < flood.sent <= WINDOW + 10_000


async def test_a_send_returns_when_the_kernel_has_all_of_it(serving, connect_h2):
    size, returned = 1_000_000, trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        await send(body(b"x" * size))
        returned.set()
        await send(body(more=False))

    client = await connect_h2(await serving(handler))
    stream_id = await client.request()
    await client.until(lambda: len(client.received[stream_id]) == WINDOW, acknowledge=False)
    await wait_all_tasks_blocked(0.02)
    assert not returned.is_set()
    client.h2.increment_flow_control_window(size, stream_id)
    client.h2.increment_flow_control_window(size)
    await client.flush()
    assert await client.response(stream_id) == (200, b"x" * size, "end")
    assert returned.is_set()


@pytest.mark.parametrize("which", ["stream", "connection"])
async def test_a_window_that_stays_closed_ends_its_stream_alone(serving, connect_h2, which):
    """Stock: the stream lives for ever."""
    flood = Flood()
    client = await connect_h2(await serving(flood, stall_s=0.2))
    stream_id = await client.request()
    if which == "stream":
        client.h2.increment_flow_control_window(10 * WINDOW)
    else:
        client.h2.increment_flow_control_window(10 * WINDOW, stream_id)
    await client.flush()
    began = trio.current_time()
    await client.until(lambda: stream_id in client.ended, acknowledge=False)
    assert client.ended[stream_id] is ErrorCodes.CANCEL
    assert 0.15 < trio.current_time() - began < 1
    assert "took nothing for 0.2 s" in str(flood.error)
    client.h2.increment_flow_control_window(WINDOW)
    assert await client.response(await client.request("/ok")) == (200, b"ok", "end")


async def test_a_slow_window_is_not_a_closed_one(serving, connect_h2):
    flood = Flood()
    client = await connect_h2(await serving(flood, stall_s=0.2))
    stream_id = await client.request()
    await client.until(lambda: len(client.received[stream_id]) == WINDOW, acknowledge=False)
    for _ in range(5):
        await trio.sleep(0.1)
        client.h2.increment_flow_control_window(100, stream_id)
        client.h2.increment_flow_control_window(100)
        await client.flush()
    assert not flood.ended.is_set()


async def test_streams_take_turns(serving, connect_h2):
    client = await connect_h2(await serving(Flood(b"x" * 100_000)))
    streams = [await client.request() for _ in range(3)]
    await client.until(lambda: min(len(client.received[stream_id]) for stream_id in streams) > 500_000)
    sizes = [len(client.received[stream_id]) for stream_id in streams]
    assert max(sizes) < 3 * min(sizes)


async def test_a_client_that_reads_nothing_at_all_is_cut_off(serving, connect_h2):
    flood = Flood()
    client = await connect_h2(await serving(flood, stall_s=0.2, send_buffer=4096), receive_buffer=4096)
    stream_id = await client.request()
    client.h2.increment_flow_control_window(2**30, stream_id)
    client.h2.increment_flow_control_window(2**30)
    await client.flush()
    with trio.fail_after(2):
        await flood.ended.wait()
    assert "took nothing for 0.2 s" in str(flood.error)


# --- leaving ----------------------------------------------------------------------------------------------------------


@HOW
@pytest.mark.parametrize("state", ["waiting", "streaming", "window closed", "kernel full"])
async def test_leaving_reaches_every_stream(serving, connect_h2, how, state):
    told = trio.Semaphore(0)

    async def handler(scope, receive, send):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def stream():
                if state == "waiting":
                    return
                await send(START)
                await send(body(b"x"))
                if state != "streaming":
                    with pytest.raises(OSError):
                        while True:
                            await send(body(b"x" * 1000))

            await wait_disconnect(receive)
        told.release()

    small = {"receive_buffer": 4096} if state == "kernel full" else {}
    address = await serving(handler, **({"send_buffer": 4096} if state == "kernel full" else {}))
    client = await connect_h2(address, **small)
    if state == "kernel full":
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
        client.h2.increment_flow_control_window(2**30)
    for _ in range(2):
        await client.request()
    await wait_all_tasks_blocked(0.05)
    await client.client.leave(how)
    with trio.fail_after(1):
        for _ in range(2):
            await told.acquire()


@pytest.mark.parametrize("blocked", [False, True])
async def test_a_reset_ends_its_stream_alone(serving, connect_h2, blocked):
    flood = Flood()
    running, go = trio.Event(), trio.Event()

    async def handler(scope, receive, send):
        if scope["path"] == "/flood":
            await flood(scope, receive, send)
        elif scope["path"] == "/silent":
            running.set()
            await wait_disconnect(receive)
            flood.ended.set()
        else:
            await go.wait()
            await ok(scope, receive, send)

    client = await connect_h2(await serving(handler))
    other = await client.request("/other")
    victim = await client.request("/flood" if blocked else "/silent")
    await wait_all_tasks_blocked(0.05)
    client.h2.reset_stream(victim, ErrorCodes.CANCEL)
    client.h2.increment_flow_control_window(WINDOW)
    await client.flush()
    with trio.fail_after(1):
        await flood.ended.wait()
    go.set()
    assert await client.response(other) == (200, b"ok", "end")


@pytest.mark.parametrize("last", ["a reset", "a fault"])
async def test_who_leaves_without_reading_is_seen_at_once(serving, connect_h2, last):
    """What is being sent to it waits for the kernel: its application hears of the leaving all the same."""
    told = trio.Event()

    async def handler(scope, receive, send):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Flood(), scope, receive, send)
            await wait_disconnect(receive)
            told.set()
            nursery.cancel_scope.cancel()

    client = await connect_h2(await serving(handler, send_buffer=4096), receive_buffer=4096)
    stream_id = await client.request()
    await wait_all_tasks_blocked(0.1)
    if last == "a reset":
        client.h2.reset_stream(stream_id)
        await client.flush()
    else:
        await client.client.send(bytes(100))  # a DATA frame on stream 0
    with trio.fail_after(1):
        await told.wait()


async def test_a_reset_in_the_same_breath_as_its_request(serving, connect_h2, caplog):
    client = await connect_h2(await serving(ok))
    for n in range(50):
        stream_id = client.h2.get_next_available_stream_id()
        path = "/" if n % 2 else "no-slash"
        headers = [(":method", "GET"), (":path", path), (":scheme", "http"), (":authority", "x")]
        client.h2.send_headers(stream_id, headers, end_stream=bool(n % 3))
        client.h2.reset_stream(stream_id)
    await client.flush()
    assert await client.response(await client.request()) == (200, b"ok", "end")
    assert not caplog.records


async def test_a_client_that_goes_away_has_its_streams_to_the_end(serving, connect_h2):
    """Stock: they are cut, for the library sends nothing more after a GOAWAY."""
    go = trio.Event()

    async def handler(scope, receive, send):
        await send(START)
        await go.wait()
        await send(body(b"ok", more=False))

    client = await connect_h2(await serving(handler))
    stream_id = await client.request()
    await client.until(lambda: stream_id in client.status)
    await client.client.send(b"\0\0\x08\x07\0\0\0\0\0" + bytes(8))
    await wait_all_tasks_blocked(0.02)
    go.set()
    assert await client.response(stream_id) == (200, b"ok", "end")
    assert await client.client.wait_closed() == b""


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_a_body_that_nobody_takes_holds_up_no_other_stream(serving, connect_h2):
    """Stock: the reader waits for the application to take it, and sees nothing else."""
    told = trio.Event()

    async def handler(scope, receive, send):
        if scope["path"] == "/ok":
            await ok(scope, receive, send)
            return
        await send(START)
        with pytest.raises(OSError):
            while True:
                await trio.sleep(0.005)
                await send(body(b"x"))
        told.set()

    client = await connect_h2(await serving(handler))
    stream_id = await client.request("/deaf", "POST", end_stream=False)
    while client.h2.local_flow_control_window(stream_id) > 0:
        client.h2.send_data(stream_id, b"x" * min(1000, client.h2.local_flow_control_window(stream_id)))
    await client.flush()
    await wait_all_tasks_blocked()
    client.h2.reset_stream(stream_id)
    await client.flush()
    with trio.fail_after(1):
        await told.wait()
    assert await client.response(await client.request("/ok")) == (200, b"ok", "end")
    assert client.h2.outbound_flow_control_window > WINDOW // 2, "its share of the connection's window is given back"


async def test_a_body_comes_whole(serving, connect_h2):
    size = 300_000

    async def handler(scope, receive, send):
        received, more = 0, True
        while more:
            message = await receive()
            received += len(message["body"])
            more = message["more_body"]
        await send(START)
        await send(body(b"%d" % received, more=False))

    client = await connect_h2(await serving(handler))
    stream_id = await client.request(method="POST", end_stream=False)
    left = size
    while left:
        window = client.h2.local_flow_control_window(stream_id)
        piece = min(left, window, 16_384)
        if not piece:
            await client.until(lambda: client.h2.local_flow_control_window(stream_id))
            continue
        client.h2.send_data(stream_id, b"x" * piece, end_stream=piece == left)
        left -= piece
        await client.flush()
    assert await client.response(stream_id) == (200, b"%d" % size, "end")


async def expect(client, expected="100-continue", length=4, end_stream=False):
    stream_id = client.h2.get_next_available_stream_id()
    headers = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x"), ("expect", expected)]
    client.h2.send_headers(stream_id, [*headers, ("content-length", str(length))], end_stream=end_stream)
    await client.flush()
    return stream_id


@pytest.mark.parametrize("expected", ["100-continue", "100-Continue"])
async def test_who_waits_to_be_asked_for_the_body_is_asked(serving, connect_h2, expected):
    """Stock: not asked; both wait for the other."""

    async def handler(scope, receive, send):
        received = (await receive())["body"]
        await send(START)
        await send(body(received, more=False))

    client = await connect_h2(await serving(handler))
    stream_id = await expect(client, expected)
    await client.until(lambda: stream_id in client.continued)
    client.h2.send_data(stream_id, b"body", end_stream=True)
    await client.flush()
    assert await client.response(stream_id) == (200, b"body", "end")


@pytest.mark.parametrize(
    "fields",
    [{"length": 5}, {"length": 0, "end_stream": True}, {"expected": "something else"}],
    ids=["too long", "no body", "another expectation"],
)
async def test_who_need_not_be_asked_for_the_body_is_not(serving, connect_h2, fields):
    client = await connect_h2(await serving(ok, limits=Limits(max_body_bytes=4)))
    stream_id = await expect(client, **fields)
    assert await client.response(stream_id) == (200, b"ok", "end")
    assert not client.continued


async def test_a_reset_in_the_same_breath_as_what_waits_to_be_asked(serving, connect_h2, caplog):
    client = await connect_h2(await serving(ok))
    stream_id = client.h2.get_next_available_stream_id()
    headers = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
    client.h2.send_headers(stream_id, [*headers, ("expect", "100-continue")])
    client.h2.reset_stream(stream_id)
    await client.flush()
    assert await client.response(await client.request()) == (200, b"ok", "end")
    assert not caplog.records


async def test_data_after_the_response_is_spared(serving, connect_h2):
    """Stock: the worker ends."""
    client = await connect_h2(await serving(ok))
    stream_id = await client.request(method="POST", end_stream=False)
    assert await client.response(stream_id) == (200, b"ok", "end")
    await client.client.send(b"\0\0\3\0\0" + stream_id.to_bytes(4, "big") + b"abc")
    assert await client.response(await client.request()) == (200, b"ok", "end")


async def test_a_body_that_comes_after_the_answer_is_taken(serving, connect_h2):
    """More of it than a window: to a client that is cut off at it the answer is lost."""
    client = await connect_h2(await serving(ok))
    stream_id = await client.request(method="POST", end_stream=False)
    assert await client.response(stream_id) == (200, b"ok", "end")
    for _ in range(5):
        await client.until(lambda: client.h2.local_flow_control_window(stream_id) >= 16_384)
        client.h2.send_data(stream_id, b"x" * 16_384)
        await client.flush()
    client.h2.end_stream(stream_id)
    await client.flush()
    assert await client.response(await client.request()) == (200, b"ok", "end")
    assert client.resets == {}


async def test_a_body_without_end_after_the_answer_is_ended(serving, connect_h2):
    client = await connect_h2(await serving(ok))
    stream_id = await client.request(method="POST", end_stream=False)
    await client.until(lambda: client.resets)
    assert client.resets == {stream_id: ErrorCodes.NO_ERROR}


REFUSED = [
    pytest.param(400, {"path": "?a=1"}, id="no slash"),
    pytest.param(400, {"path": "http://y/"}, id="absolute"),
    pytest.param(400, {"path": "/\xff"}, id="target not ASCII"),
    pytest.param(400, {"method": "G\xff"}, id="method not ASCII"),
    pytest.param(421, {"authority": "x@y"}, id="strange host"),
    pytest.param(421, {"authority": "x..y"}, id="host with a label that is empty"),
    pytest.param(501, {"method": "CONNECT", "path": None, "scheme": None}, id="CONNECT"),
    pytest.param(501, {"method": "CONNECT", "protocol": "connect-udp"}, id="CONNECT for something else"),
]


async def test_options_for_the_server_itself(serving, connect_h2):
    """Stock: left to the application, which knows paths only."""
    client = await connect_h2(await serving(ok))
    assert await client.response(await client.request("*", "OPTIONS")) == (204, b"", "end")
    assert await client.response(await client.request("/", "OPTIONS")) == (200, b"ok", "end")


@pytest.mark.parametrize("status, fields", REFUSED)
@pytest.mark.parametrize("end_stream", [True, False])
async def test_a_request_is_refused_alone(serving, connect_h2, caplog, status, fields, end_stream):
    """Stock: some of them end the worker."""
    client = await connect_h2(await serving(ok))
    stream_id = await client.request(**{"path": "/"} | fields, end_stream=end_stream)
    assert (await client.response(stream_id))[0] == status
    assert b'"error"' in client.received[stream_id]
    assert await client.response(await client.request()) == (200, b"ok", "end")
    assert not caplog.records


async def test_one_stream_too_many_is_refused_alone(serving, connect_h2):
    """Stock: the connection is closed, with all streams that live on it."""
    go = trio.Event()

    async def handler(scope, receive, send):
        await go.wait()
        await ok(scope, receive, send)

    traffic = Traffic()
    client = await connect_h2(await serving(handler, limits=Limits(max_streams=3), traffic=traffic))
    client.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 100  # as if it had not read ours yet
    client.h2.remote_settings.acknowledge()
    streams = [await client.request() for _ in range(5)]
    await client.until(lambda: len(client.ended) == 2)
    assert [client.ended.get(stream_id) for stream_id in streams] == [None] * 3 + [ErrorCodes.REFUSED_STREAM] * 2
    assert traffic.refused == Counter(streams=2)
    go.set()
    for stream_id in streams[:3]:
        assert await client.response(stream_id) == (200, b"ok", "end")


async def test_a_frame_longer_than_agreed_is_not_gathered(serving, connect_h2):
    """The library would hold up to 16 MiB of it."""
    client = await connect_h2(await serving(ok))
    await client.client.send(b"\x10\0\0\0\0\0\0\0\1" + b"x" * 20_000)
    await client.until(lambda: client.goaway is not None)
    assert client.goaway is ErrorCodes.FRAME_SIZE_ERROR
    await client.client.wait_closed()


async def test_who_asks_for_answers_and_reads_none_is_cut_off(serving, connect_h2):
    """Stock: the reader waits for it, and sees nothing else."""
    address = await serving(ok, send_buffer=4096)
    client = await connect_h2(address, receive_buffer=4096)
    with trio.fail_after(5), pytest.raises(trio.BrokenResourceError):
        while True:
            await client.client.send(b"\0\0\x08\x06\0\0\0\0\0pingpong" * 100)


async def test_who_begins_and_resets_without_end_is_sent_away(serving, connect_h2):
    """Stock: each costs a task, and there is no end (CVE-2023-44487)."""
    traffic = Traffic()

    async def handler(scope, receive, send):
        await wait_disconnect(receive)

    client = await connect_h2(await serving(handler, limits=Limits(max_resets=20), traffic=traffic))
    for _ in range(20):
        client.h2.reset_stream(await client.request())
    await client.flush()
    await client.until(lambda: client.goaway is not None)
    assert client.goaway is ErrorCodes.ENHANCE_YOUR_CALM
    assert traffic.refused == Counter(resets=1)


async def test_long_or_many_headers_are_a_431(serving, connect_h2):
    client = await connect_h2(await serving(ok, limits=Limits(max_header_bytes=1000, max_headers=10)))
    for headers in [("x", "y" * 1000)], [("x", "y")] * 10:
        stream_id = client.h2.get_next_available_stream_id()
        pseudo = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
        client.h2.send_headers(stream_id, pseudo + headers, end_stream=True)
        await client.flush()
        assert (await client.response(stream_id))[0] == 431


# --- responses --------------------------------------------------------------------------------------------------------


async def test_an_application_that_fails_answers_500(serving, connect_h2):
    async def handler(scope, receive, send):
        raise ValueError("a bug")

    client = await connect_h2(await serving(handler))
    status, received, how = await client.response(await client.request())
    assert (status, how) == (500, "end") and b"server_error" in received


async def test_an_application_that_fails_in_its_response_is_a_reset(serving, connect_h2):
    """Stock: the client waits for ever."""

    async def handler(scope, receive, send):
        await send(START)
        await send(body(b"x"))
        raise ValueError("a bug")

    client = await connect_h2(await serving(handler))
    assert await client.response(await client.request()) == (200, b"x", ErrorCodes.INTERNAL_ERROR)


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [0, 1])
@pytest.mark.parametrize("reset", [False, True])
async def test_an_idle_connection_is_closed(serving, connect_h2, config, requests, reset):
    """And told so: a proxy is to know that what it sends in that moment may be sent again, elsewhere.

    Stock: not before its first request, and not after a reset; and without a word.
    """
    config.keep_alive_timeout = 0.2

    async def handler(scope, receive, send):
        if reset:
            await wait_disconnect(receive)
        await ok(scope, receive, send)

    client = await connect_h2(await serving(handler, limits=Limits(header_timeout_s=0.2)))
    for _ in range(requests):
        stream_id = await client.request()
        await wait_all_tasks_blocked(0.02)
        if reset:
            client.h2.reset_stream(stream_id)
            await client.flush()
        else:
            await client.response(stream_id)
    with pytest.raises(EOFError):
        await client.until(lambda: False)
    assert (client.goaway, client.last_stream) == (ErrorCodes.NO_ERROR, requests)  # the first stream's number is 1


async def test_a_request_that_comes_when_an_idle_connection_is_closed(serving, connect_h2, config):
    """It is not begun; and its coming does not destroy the GOAWAY, as it would that of a socket closed at once."""
    config.keep_alive_timeout = 0.1
    client = await connect_h2(await serving(ok))
    assert await client.response(await client.request()) == (200, b"ok", "end")
    await trio.sleep(0.2)
    late = await client.request()
    await wait_all_tasks_blocked(0.02)
    with pytest.raises(EOFError):
        await client.until(lambda: False)
    assert (client.goaway, client.last_stream) == (ErrorCodes.NO_ERROR, 1)
    assert late not in client.status


async def test_a_drain_lets_streams_end_and_takes_no_more(serving, connect_h2):
    """Stock: sends no GOAWAY before all streams have ended."""
    stop, go = trio.Event(), trio.Event()

    async def handler(scope, receive, send):
        if scope["path"] == "/live":
            await go.wait()
        await ok(scope, receive, send)

    address = await serving(handler, shutdown_trigger=stop.wait, drain=go.wait, drain_s=20)
    client, idle = await connect_h2(address), await connect_h2(address)
    assert await idle.response(await idle.request()) == (200, b"ok", "end")
    live = await client.request("/live")
    await wait_all_tasks_blocked(0.02)
    late = client.h2.get_next_available_stream_id()
    stop.set()
    await wait_all_tasks_blocked(0.02)
    headers = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
    client.h2.send_headers(late, headers, end_stream=True)  # before it has read the GOAWAY
    await client.flush()
    await client.until(lambda: late in client.ended)
    assert (client.goaway, client.ended[late]) == (ErrorCodes.NO_ERROR, ErrorCodes.REFUSED_STREAM)
    with pytest.raises(EOFError):
        await idle.until(lambda: False)
    assert idle.goaway is ErrorCodes.NO_ERROR
    newcomer = await connect_h2(address)
    assert await newcomer.response(await newcomer.request()) == (200, b"ok", "end")
    assert newcomer.goaway is ErrorCodes.NO_ERROR
    go.set()
    await client.until(lambda: live in client.ended)
    assert client.received[live] == b"ok"
    for each in client, newcomer, idle:
        await each.client.stream.aclose()
    with trio.fail_after(1):
        await serving.returned.wait()


UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"


TWO_LINES = "Connection: keep-alive, Upgrade\r\nConnection: http2-settings\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize("upgrade", [UPGRADE, TWO_LINES])
async def test_an_upgrade_from_http_1_1(serving, connect, upgrade):
    client = Client(await connect(await serving(ok)))
    settings = client.h2.initiate_upgrade_connection()
    await client.client.get("/", f"{upgrade}HTTP2-Settings: {settings.decode()}\r\n")
    switched = b""
    with trio.fail_after(2):
        while not switched.endswith(b"\r\n\r\n"):
            switched += await client.client.stream.receive_some(1)
    assert switched.startswith(b"HTTP/1.1 101 ")
    await client.flush()
    assert await client.response(1) == (200, b"ok", "end")
    assert await client.response(await client.request()) == (200, b"ok", "end")


@pytest.mark.parametrize("settings", ["", "HTTP2-Settings: !!!!\r\n", "HTTP2-Settings: AAMA\r\n"])
async def test_an_upgrade_with_settings_that_do_not_hold_is_ignored(serving, connect, settings):
    client = await connect(await serving(ok))
    await client.get("/", UPGRADE + settings)
    assert (await client.response())[1] == b"ok"


UNASKED = {
    "no Connection": "GET / HTTP/1.1\r\nUpgrade: h2c\r\n",
    "Connection without Upgrade": "GET / HTTP/1.1\r\nConnection: HTTP2-Settings\r\nUpgrade: h2c\r\n",
    "Connection without HTTP2-Settings": "GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
    "HTTP/1.0": f"GET / HTTP/1.0\r\n{UPGRADE}",
}


@pytest.mark.parametrize("head", UNASKED.values(), ids=UNASKED)
async def test_an_upgrade_that_the_connection_does_not_ask_for_is_ignored(serving, connect, head):
    """Stock: obeyed, for a client that did not ask and cannot read the answer."""
    client = await connect(await serving(ok))
    await client.send(f"{head}Host: x\r\nHTTP2-Settings: AAMAAABk\r\n\r\n".encode())
    head_, body_ = await client.response()
    assert (head_.status_code, body_) == (200, b"ok")


async def test_a_preface_with_an_upgrade_is_a_400(serving, connect):
    """Stock: the upgrade is obeyed, without settings."""
    client = await connect(await serving(ok))
    await client.send(b"PRI * HTTP/2.0\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n")
    assert (await client.wait_closed()).startswith(b"HTTP/1.1 400 ")


async def test_an_upgrade_for_a_target_in_absolute_form_is_ignored(serving, connect):
    """HTTP/2 has no such paths; and the host is the target's, not the header's."""
    client = await connect(await serving(ok))
    await client.get("http://y/", f"{UPGRADE}HTTP2-Settings: AAMAAABk\r\n")
    assert (await client.response())[1] == b"ok"


# --- WebSocket over HTTP/2 (RFC 8441) ---------------------------------------------------------------------------------


async def echo(scope, receive, send):
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        if message["text"] == "bye":
            await send({"type": "websocket.close", "code": 1012})
            return
        await send({"type": "websocket.send", "text": message["text"]})
    echo.left.set()


@asynccontextmanager
async def websocket(client, **pseudo):
    """A WebSocket in a stream: `send` and `event`."""
    stream_id = client.h2.get_next_available_stream_id()
    fields = {"method": "CONNECT", "protocol": "websocket", "path": "/", "scheme": "http", "authority": "x"} | pseudo
    headers = [(f":{name}", value) for name, value in fields.items()] + [("sec-websocket-version", "13")]
    client.h2.send_headers(stream_id, headers)
    await client.flush()
    await client.until(lambda: stream_id in client.status)
    assert client.status[stream_id] == 200
    ws = WebSocket(ConnectionType.CLIENT)

    async def send(what):
        data = ws.send(what)
        for at in range(0, len(data), 16_384):
            client.h2.send_data(stream_id, data[at : at + 16_384])
        await client.flush()

    async def event():
        while (found := next(ws.events(), None)) is None:
            await client.until(lambda: client.received[stream_id] or stream_id in client.ended)
            ws.receive_data(client.received.pop(stream_id, None))
        return found

    yield stream_id, send, event


async def test_a_websocket(serving, connect_h2):
    client = await connect_h2(await serving(echo))
    async with websocket(client) as (stream_id, send, event):
        for text in ("one", "two" * 10_000):
            await send(Message(text))
            received = ""
            while True:
                answer = await event()
                assert isinstance(answer, TextMessage)
                received += answer.data
                if answer.message_finished:
                    break
            assert received == text
        await send(Message("bye"))
        answer = await event()
        assert isinstance(answer, CloseConnection) and answer.code == 1012
        await client.until(lambda: stream_id in client.ended)
        assert client.ended[stream_id] == "end"


async def test_a_websockets_closing_handshake_ends_the_stream(serving, connect_h2):
    echo.left = trio.Event()
    client = await connect_h2(await serving(echo))
    async with websocket(client) as (stream_id, send, event):
        await send(CloseConnection(1000))
        assert isinstance(await event(), CloseConnection)
        await client.until(lambda: stream_id in client.ended)
        assert client.ended[stream_id] == "end"
    with trio.fail_after(1):
        await echo.left.wait()


@pytest.mark.parametrize("how", ["reset stream", "end stream", "close"])
async def test_leaving_a_websocket(serving, connect_h2, how):
    echo.left = trio.Event()
    client = await connect_h2(await serving(echo))
    async with websocket(client) as (stream_id, send, event):
        await send(Message("one"))
        await event()
        if how == "close":
            await client.client.leave("close")
        elif how == "reset stream":
            client.h2.reset_stream(stream_id)
            await client.flush()
        else:
            client.h2.end_stream(stream_id)
            await client.flush()
    with trio.fail_after(1):
        await echo.left.wait()


async def test_a_handshake_of_another_version_is_refused(serving, connect_h2):
    client = await connect_h2(await serving(echo))
    stream_id = await client.request(method="CONNECT", protocol="websocket", end_stream=False)
    assert (await client.response(stream_id))[0] == 400


async def test_a_silent_websocket_is_ended(serving, connect_h2, config):
    config.websocket_ping_interval = 0.05
    echo.left = trio.Event()
    client = await connect_h2(await serving(echo, stall_s=0.2))
    async with websocket(client) as (stream_id, _, event):
        assert type(await event()).__name__ == "Ping"
        assert isinstance(answer := await event(), CloseConnection) and answer.code == 1011
        await client.until(lambda: stream_id in client.ended)
    with trio.fail_after(1):
        await echo.left.wait()
