"""`/v1/ws` in mock time: every action, credit to the record, backpressure, and what a closed socket leaves behind."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import pytest
import trio
from quart.testing.connections import WebsocketDisconnectError
from trio.testing import MockClock

from tests.service.conftest import STEP_S, Rig, open_rig
from tokenflow.config.model import AuthConfig, Config, KeyConfig
from tokenflow.http.app import create_app
from tokenflow.http.routes import ws

HEADERS = {"Authorization": "Bearer secret"}


class Client:
    """A socket's other end: frames out by keyword, frames in as they come or sorted by id."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.begun: dict[str, str] = {}
        """Stream ids by id."""

    async def send(self, **fields: Any) -> None:
        await self._connection.send(json.dumps(fields))

    async def raw(self, data: str | bytes) -> None:
        await self._connection.send(data)

    async def get(self) -> Any:
        """The next frame."""
        with trio.fail_after(1000):
            frame = json.loads(await self._connection.receive())
        if frame.keys() == {"id", "stream", "n"}:
            self.begun[frame["id"]] = frame["stream"]
        return frame

    async def error(self) -> Any:
        """The next frame, which refuses something."""
        frame = await self.get()
        assert frame.keys() == {"id", "error"}, frame
        return frame

    async def generate(self, id: str = "a", **fields: Any) -> str:
        """Ask, and wait until it has begun; the stream's id."""
        await self.send(action="generate", id=id, **{"prompt": "a prompt"} | fields)
        while id not in self.begun:
            frame = await self.get()
            assert "error" not in frame, frame
        return self.begun[id]

    async def until_end(self, *ids: str) -> dict[str, list[Any]]:
        """Frames by id, until each of these has ended."""
        frames = defaultdict(list)
        left = set(ids)
        while left:
            frame = await self.get()
            frames[frame.get("id")].append(frame)
            if "stream" in frame and ("done" in frame or "error" in frame):
                left.discard(frame["id"])
        return frames

    async def until(self, n: int) -> Any:
        """The frame that carries record `n`."""
        while (frame := await self.get()).get("n") != n:
            pass
        return frame

    async def silence(self, seconds: float) -> None:
        """Nothing comes for that long."""
        with trio.move_on_after(seconds):
            pytest.fail(f"{await self.get()} came")

    async def closed_with(self) -> int:
        with pytest.raises(WebsocketDisconnectError) as caught, trio.fail_after(1000):
            while True:
                await self.get()
        return caught.value.args[0]


@asynccontextmanager
async def socket(r: Rig, **options: Any) -> AsyncIterator[Client]:
    async with create_app(r.service).test_client().websocket("/v1/ws", **options) as connection:
        yield Client(connection)


@asynccontextmanager
async def both(**options: Any) -> AsyncIterator[tuple[Rig, Client]]:
    """A service and one socket to it."""
    async with open_rig(**options) as r, socket(r) as client:
        yield r, client


def made(r: Rig, stream: str) -> int:
    return r.engine.stepper.made.get(stream, 0)


def text(frames: list[Any]) -> str:
    return "".join(frame["delta"]["content"] for frame in frames if "delta" in frame)


# --- generating ------------------------------------------------------------------------------------------------------


async def test_a_generation_from_first_to_last_frame(autojump_clock: MockClock) -> None:
    async with both() as (r, client):
        await client.send(action="generate", id="a", prompt="hello", max_tokens=5)
        frames = (await client.until_end("a"))["a"]
        [stream] = {frame["stream"] for frame in frames}
        assert stream.startswith("tf-")
        assert [frame["n"] for frame in frames] == [0, 1, 2, 3, 4, 5, 6], (
            "what has begun says so, then record by record"
        )
        assert all(frame["index"] == 0 for frame in frames[1:-1])
        assert text(frames) == await r.whole("hello", max_tokens=5)
        end = frames[-1]
        assert end.keys() == {"id", "stream", "n", "done", "finish_reason", "usage"}
        assert (end["done"], end["finish_reason"], end["usage"]["completion_tokens"]) == (True, "length", 5)


async def test_without_an_id_the_streams_is_used(autojump_clock: MockClock) -> None:
    async with both() as (_, client):
        await client.send(prompt="hello", max_tokens=50)  # and a bare prompt is a generate
        begun = await client.get()
        assert begun["id"] == begun["stream"]
        await client.send(action="cancel", id=begun["stream"])
        frames = (await client.until_end(begun["id"]))[begun["id"]]
        assert frames[-1]["finish_reason"] == "cancelled"


async def test_many_at_once_and_each_frame_belongs_to_one(autojump_clock: MockClock) -> None:
    async with both(slots=4) as (r, client):
        wanted = {f"id {i}": (f"prompt {i}", 5 + i) for i in range(20)}
        for id, (prompt, max_tokens) in wanted.items():
            await client.send(action="generate", id=id, prompt=prompt, max_tokens=max_tokens)
        frames = await client.until_end(*wanted)
        assert len({frame["stream"] for of_one in frames.values() for frame in of_one}) == 20
        for id, (prompt, max_tokens) in wanted.items():
            assert [frame["n"] for frame in frames[id]] == list(range(max_tokens + 2))
            assert text(frames[id]) == await r.whole(prompt, max_tokens=max_tokens)


async def test_choices_have_their_index_and_their_reasons(autojump_clock: MockClock) -> None:
    async with both() as (_, client):
        await client.send(action="generate", id="a", prompt="hello", max_tokens=5, n=2)
        frames = (await client.until_end("a"))["a"]
        assert sorted(frame["index"] for frame in frames if "delta" in frame) == [0] * 5 + [1] * 5
        assert (frames[-1]["finish_reason"], frames[-1]["finish_reasons"]) == ("length", ["length", "length"])


async def test_a_failure_ends_the_generation_and_not_the_socket(autojump_clock: MockClock) -> None:
    async with both(timeouts={"idle_timeout_s": 5.0}) as (_, client):
        await client.send(action="generate", id="a", prompt='{"synthetic": {"hang_at": 3}}')
        frames = (await client.until_end("a"))["a"]
        assert frames[-1]["error"]["code"] == "idle_timeout" and "stream" in frames[-1]
        await client.send(action="generate", id="a", prompt="again", max_tokens=2)
        assert (await client.until_end("a"))["a"][-1]["done"]


# --- steering --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_stream", [False, True])
async def test_cancel(autojump_clock: MockClock, by_stream: bool) -> None:
    async with both(slots=1) as (r, client):
        stream = await client.generate(max_tokens=1000)
        await client.until(3)
        await client.send(action="cancel", id=stream if by_stream else "a")
        end = (await client.until_end("a"))["a"][-1]
        assert (end["done"], end["finish_reason"]) == (True, "cancelled")
        await r.settle()
        assert r.sink.ended(stream).by == "client" and (await r.engine.stats()).slots_used == 0
        await client.send(action="cancel", id="a")  # once more, or too late: no harm
        await client.silence(5)


@pytest.mark.parametrize("phase", ["queue", "prefill"])
async def test_cancel_before_the_first_token(autojump_clock: MockClock, phase: str) -> None:
    async with both(slots=1, prefill_ms=10_000) as (r, client):
        if phase == "queue":
            await client.generate("hog", max_tokens=1000)
        stream = await client.generate("a")
        await trio.sleep(1)
        await client.send(action="cancel", id="a")
        end = (await client.until_end("a"))["a"][-1]
        assert (end["finish_reason"], end["usage"]["completion_tokens"]) == ("cancelled", 0)
        assert made(r, stream) == 0


async def test_pause_and_resume(autojump_clock: MockClock) -> None:
    async with both() as (r, client):
        stream = await client.generate(max_tokens=50)
        await client.until(3)
        await client.send(action="pause", id="a")
        await trio.sleep(100)  # far beyond idle_timeout_s
        held = made(r, stream)
        assert held < 10
        await client.send(action="resume", id="a")
        assert (await client.until_end("a"))["a"][-1]["finish_reason"] == "length"


async def test_attach_reads_on_where_the_client_was(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        options = {"on_disconnect": "pause", "grace_s": 60}
        async with socket(r) as client:
            stream = await client.generate(max_tokens=20, stream_options=options)
            first = [await client.until(4)]
        await trio.sleep(20)
        assert made(r, stream) < 20
        async with socket(r) as client:
            await client.send(action="attach", stream=stream, id="b", after=4)
            frames = (await client.until_end("b"))["b"]
            assert [frame["n"] for frame in frames] == list(range(4, 22))
            assert all(frame["stream"] == stream for frame in first + frames)
            await client.send(action="attach", stream=stream, id="b", after=21)
            again = (await client.until_end("b"))["b"]
            assert again[-1] == frames[-1], "who has everything hears the end once more"
            await client.send(action="attach", stream=stream, after=22)
            assert (await client.error())["error"]["param"] == "after"


async def test_a_reader_that_fell_out_of_the_log_is_told(autojump_clock: MockClock) -> None:
    async with both() as (_, client):
        stream = await client.generate(max_tokens=100)
        await client.until(50)
        await client.send(action="attach", stream=stream, id="a")
        assert (await client.until_end("a"))["a"][-1]["done"]  # the first refusal is among these
        await client.send(action="attach", stream=stream, id="b")
        assert (await client.error())["error"]["code"] == "stream_not_found"


# --- credit ----------------------------------------------------------------------------------------------------------


async def test_a_thousand_records_for_a_thousand_of_credit(autojump_clock: MockClock) -> None:
    async with both(tokens_per_s=10_000, context_length=8192) as (r, client):
        stream = await client.generate(max_tokens=5000, credit=1)
        total = 1
        for more in (1, 62, 64, 65, 300, 507):
            await client.until(total)
            await client.silence(5)
            assert made(r, stream) == total
            await client.send(action="credit", id="a", n=more)
            total += more
        await client.until(1000)
        with trio.move_on_after(100):
            while True:
                assert await client.get() == {"type": "ping"}
        assert made(r, stream) == total == 1000, "and never one more"
        await client.send(action="cancel", id="a")
        [*_, end] = (await client.until_end("a"))["a"]
        assert (end["n"], end["usage"]["completion_tokens"]) == (1001, 1000)


async def test_no_credit_no_tokens_and_the_end_is_free(autojump_clock: MockClock) -> None:
    async with both() as (r, client):
        stream = await client.generate(max_tokens=3, credit=0)
        await trio.sleep(10)
        assert made(r, stream) == 0
        await client.send(action="credit", id=stream, n=3)
        assert (await client.until_end("a"))["a"][-1]["finish_reason"] == "length"
        await client.send(action="credit", id="a", n=3)  # crossed the end on its way
        await client.silence(5)


async def test_a_cancel_lets_go_of_a_stream_that_has_ended_beyond_the_credit(autojump_clock: MockClock) -> None:
    """Another reader had all of it, so it came to its end; this one would wait for ever for credit that never comes."""
    async with both() as (r, client):
        options = {"on_disconnect": "continue"}
        stream = await client.generate(max_tokens=20, credit=4, stream_options=options)
        await client.until(4)
        async with socket(r) as other:
            await other.send(action="attach", stream=stream, id="b")
            assert (await other.until_end("b"))["b"][-1]["finish_reason"] == "length"
        await client.silence(10)
        await client.send(action="cancel", id="a")
        frames = (await client.until_end("a"))["a"]
        assert [frame["n"] for frame in frames] == list(range(5, 22)), "what is left of it, each once"
        assert frames[-1]["finish_reason"] == "length", "it is no other end than it was"
        await client.generate(max_tokens=1)  # and the id is free
        async with socket(r) as later:
            await later.send(action="attach", stream=stream, id="c", credit=2)
            await later.until(2)
            await later.silence(10)


async def test_draining_lets_go_of_it_too(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    async with open_rig(server={"drain_s": 5.0}) as r, socket(r) as client, socket(r) as other:
        stream = await client.generate(max_tokens=20, credit=4, stream_options={"on_disconnect": "continue"})
        await other.send(action="attach", stream=stream, id="b")
        await other.until_end("b")
        began = trio.current_time()
        nursery.start_soon(r.service.drain)
        assert (await client.until_end("a"))["a"][-1]["finish_reason"] == "length"
        assert await client.closed_with() == 1012
        assert trio.current_time() - began <= 5.1


async def test_attach_with_credit(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        async with socket(r) as client:
            options = {"on_disconnect": "pause"}
            stream = await client.generate(max_tokens=20, credit=4, stream_options=options)
            await client.until(4)
        async with socket(r) as client:
            await client.send(action="attach", stream=stream, id="b", after=4, credit=2)
            await client.until(6)
            await client.silence(5)
            assert made(r, stream) == 6


async def test_one_without_credit_beside_one_with(autojump_clock: MockClock) -> None:
    async with both(slots=2) as (r, client):
        bound = await client.generate("bound", max_tokens=100, credit=2)
        await client.generate("free", max_tokens=100)
        await client.until_end("free")
        assert made(r, bound) == 2


# --- a socket that does not read -------------------------------------------------------------------------------------


async def test_a_stalled_socket_stops_its_generation_and_no_other(autojump_clock: MockClock) -> None:
    async with open_rig(slots=4, stream={"window": 8}) as r, socket(r) as stalled, socket(r) as other:
        stream = await stalled.generate(max_tokens=1000)
        await other.generate("b", max_tokens=200)
        frames = (await other.until_end("b"))["b"]
        assert len(frames) > 150
        # The test's own pipe holds 10 frames.
        assert made(r, stream) <= 10 + 1 + 8 + 1
        await stalled.until(200)
        assert made(r, stream) >= 200


# --- heartbeats ------------------------------------------------------------------------------------------------------


async def test_a_ping_is_answered(autojump_clock: MockClock) -> None:
    async with both() as (_, client):
        await client.send(type="ping")
        assert await client.get() == {"type": "pong"}
        await client.send(type="pong")
        await client.silence(1)


async def test_silence_is_filled_and_postpones_nothing(autojump_clock: MockClock) -> None:
    async with both(prefill_ms=10**7, timeouts={"prefill_timeout_s": 50.0}) as (_, client):
        await client.generate()
        began = trio.current_time()
        frames = []
        while "error" not in (frame := await client.get()):
            frames.append((frame, round(trio.current_time() - began, 6)))
        assert frames == [({"type": "ping"}, 15.0), ({"type": "ping"}, 30.0), ({"type": "ping"}, 45.0)]
        assert frame["error"]["code"] == "prefill_timeout"
        assert 50.0 <= trio.current_time() - began <= 50.0 + 2 * STEP_S


# --- what a closed socket leaves behind ------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_closed_socket_frees_its_places_at_once(autojump_clock: MockClock, phase: str) -> None:
    engine = {"prefill_ms": 10_000} if phase == "prefill" else {}
    async with open_rig(slots=1, **engine) as r:
        if phase == "queue":
            _, hog = await r.open(max_tokens=1000)
        async with socket(r) as client:
            stream = await client.generate(max_tokens=1000)
            await trio.sleep(1)
        left_at = trio.current_time()
        if phase == "queue":
            hog.close()
        await r.settle()
        assert trio.current_time() - left_at <= 3 * STEP_S
        record = r.sink.ended(stream)
        assert (record.reason, record.by, record.phase) == ("disconnected", "client", phase)
        assert (record.generated_tokens == 0) == (phase != "decode")
        assert (await r.engine.stats()).slots_used == 0


async def test_every_generation_of_the_socket_goes_with_it(autojump_clock: MockClock) -> None:
    async with open_rig(slots=2) as r:
        async with socket(r) as client:
            streams = [await client.generate(str(i), max_tokens=1000) for i in range(6)]
        await r.settle()
        assert {r.sink.ended(stream).reason for stream in streams} == {"disconnected"}


async def test_unless_it_chose_to_go_on(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        async with socket(r) as client:
            stream = await client.generate(max_tokens=20, stream_options={"on_disconnect": "continue"})
        await trio.sleep(5)
        assert made(r, stream) == 20


# --- frames that are wrong -------------------------------------------------------------------------------------------


async def test_a_bad_frame_is_refused_and_the_socket_lives(autojump_clock: MockClock) -> None:
    async with both() as (r, client):
        stream = await client.generate("good", max_tokens=200)
        bad: list[tuple[str | bytes, str | None, str | None]] = [
            ("{", None, None),
            ("[]", None, None),
            ("", None, None),
            (b"", None, None),
            (b'{"type":"ping"}', None, None),
            ('{"id":"x"}', "x", "action"),
            ('{"id":"x","action":"dance"}', "x", "action"),
            ('{"id":"x","action":"cancel"}', "x", "id"),
            ('{"id":"good","action":"credit","n":0}', "good", "n"),
            ('{"id":"x","action":"generate","prompt":""}', "x", "prompt"),
            ('{"id":"x","action":"generate","prompt":"a","model":"gpt-7"}', "x", "model"),
            ('{"id":"x","action":"generate","prompt":"a","max_tokens":"many"}', "x", "max_tokens"),
            ('{"id":"x","action":"attach","stream":"tf-0"}', "x", None),
            ('{"id":"good","action":"generate","prompt":"a"}', "good", "id"),
            (json.dumps({"id": stream, "action": "generate", "prompt": "a"}), stream, "id"),
            (json.dumps({"id": "x", "action": "attach", "stream": stream}), "x", "id"),
        ]
        answers = []
        for data, _, _ in bad:
            await client.raw(data)
        frames = await client.until_end("good")
        answers = [f for of_one in frames.values() for f in of_one if "stream" not in f]
        assert sorted(map(str, [(a["id"], a["error"]["param"]) for a in answers])) == sorted(
            map(str, [(id, param) for _, id, param in bad])
        )
        assert frames["good"][-1]["done"]
        await r.settle()
        assert len([e for e in r.sink.events if type(e).__name__ == "Ended"]) == 1, "nothing else was ever begun"


async def test_a_socket_has_room_for_so_many(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ws, "MAX_GENERATIONS", 2)
    async with both() as (_, client):
        await client.generate("a", max_tokens=50)
        await client.generate("b", max_tokens=1000)
        await client.send(action="generate", id="c", prompt="x")
        frames = await client.until_end("a")
        assert [f["error"]["code"] for f in frames["c"]] == ["too_many_generations"]
        await client.generate("c", max_tokens=5)


async def test_a_fault_of_ours_is_an_error_and_the_socket_lives(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with both() as (r, client):
        with monkeypatch.context() as broken:
            broken.setattr(r.service, "open", None)
            await client.send(action="generate", id="a", prompt="x")
            assert (await client.error())["error"]["code"] == "internal_error"
        assert caplog.records
        await client.generate("a", max_tokens=3)


# --- who, and when ---------------------------------------------------------------------------------------------------

KEYS = AuthConfig(keys=(KeyConfig(name="me", sha256=sha256(b"secret").hexdigest()),))


@pytest.fixture
async def locked(autojump_clock: MockClock) -> AsyncIterator[Rig]:
    async with open_rig() as r:
        config = r.service.config
        r.service.config = Config(**{name: getattr(config, name) for name in Config.__slots__} | {"auth": KEYS})
        yield r


async def test_a_key_by_header(locked: Rig) -> None:
    async with socket(locked, headers=HEADERS) as client:
        stream = await client.generate(max_tokens=3)
        assert locked.service.stream(stream, "me").identity.key == "me"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "missing_api_key"),
        ({"headers": {"Authorization": "Basic secret"}}, "missing_api_key"),
        ({"headers": {"Authorization": "Bearer wrong"}}, "invalid_api_key"),
    ],
)
async def test_a_bad_key_is_closed_with_1008(locked: Rig, options: Any, code: str) -> None:
    async with socket(locked, **options) as client:
        frame = await client.error()
        assert (frame["id"], frame["error"]["code"]) == (None, code)
        assert await client.closed_with() == 1008


@pytest.mark.parametrize(
    ("origin", "welcome"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1:8000", True),
        ("http://[::1]", True),
        ("https://example.com", False),
        ("http://localhost.example.com", False),
        ("null", False),
        ("http://[", False),
    ],
)
async def test_without_keys_only_pages_of_this_machine(autojump_clock: MockClock, origin: str, welcome: bool) -> None:
    async with open_rig() as r, socket(r, headers={"Origin": origin}) as client:
        if welcome:
            await client.generate(max_tokens=2)
        else:
            assert (await client.error())["error"]["code"] == "origin_not_allowed"
            assert await client.closed_with() == 1008


async def test_somebody_elses_stream_is_not_there(locked: Rig) -> None:
    theirs, reader = await locked.open(max_tokens=100)
    async with socket(locked, headers=HEADERS) as client:
        await client.send(action="attach", stream=theirs.identity.id)
        assert (await client.error())["error"]["code"] == "stream_not_found"
    reader.close()


async def test_draining_closes_an_idle_socket_at_once_and_a_busy_one_when_it_is_done(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_rig(server={"drain_s": 20.0}) as r, socket(r) as idle, socket(r) as busy, socket(r) as endless:
        await busy.generate(max_tokens=50)
        await endless.generate(prompt='{"synthetic": {"hang_at": 5}}')
        began = trio.current_time()
        nursery.start_soon(r.service.drain)
        assert await idle.closed_with() == 1012
        assert trio.current_time() == began
        await busy.send(action="generate", id="b", prompt="one more")
        frames = await busy.until_end("a")
        assert frames["b"][0]["error"]["code"] == "draining" and frames["a"][-1]["finish_reason"] == "length"
        assert await busy.closed_with() == 1012
        assert (await endless.until_end("a"))["a"][-1]["error"]["code"] == "draining"
        assert trio.current_time() - began == pytest.approx(20.0, abs=0.1)
        assert await endless.closed_with() == 1012
