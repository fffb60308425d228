"""The body of a streaming response, in mock time: heartbeats in every phase, and what counts as accepted."""

from __future__ import annotations

import json
import socket
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from tests.service.conftest import STEP_S, open_rig
from tests.service.test_messages import CHAT, ask
from tokenflow.core.types import Delta
from tokenflow.dialects.openai_chat import ChatEncoder
from tokenflow.dialects.small import SmallEncoder
from tokenflow.http.events import EventBody
from tokenflow.http.transport import Direct
from tokenflow.http.transport.writer import Writer

PING = b": ping\n\n"


def body(reader: Any, heartbeat_s: float = 15.0) -> EventBody:
    return EventBody(reader, ChatEncoder("tf-1", "m", 0, False, 1), heartbeat_s)


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_silence_is_filled_in_every_phase_and_postpones_nothing(autojump_clock: MockClock, phase: str) -> None:
    engine = {"queue": {"slots": 1}, "prefill": {"prefill_ms": 10_000_000}, "decode": {"hang_at": 2}}[phase]
    code = {"queue": "queue_timeout", "prefill": "prefill_timeout", "decode": "idle_timeout"}[phase]
    async with open_rig(timeouts={"idle_timeout_s": 500.0} | {f"{code}_s": 50.0}, **engine) as r:
        if phase == "queue":
            _, hog = await r.open('{"synthetic": {"hang_at": 1}}')
            await trio.sleep(1)
        began = trio.current_time()
        _, reader = await r.open()
        pings, last = [], b""
        async for piece in body(reader):
            if piece == PING:
                pings.append(trio.current_time())
            last = piece
        silent_since = began if phase != "decode" else pings[0] - 15.0
        assert [round(at - silent_since, 6) for at in pings] == [15.0, 30.0, 45.0]
        assert 50.0 <= trio.current_time() - silent_since <= 50.0 + 2 * STEP_S
        assert code.encode() in last and last.endswith(b"data: [DONE]\n\n")
        reader.close()
        if phase == "queue":
            hog.close()


async def test_the_headers_go_out_before_anything_is_waited_for(autojump_clock: MockClock) -> None:
    async with open_rig(prefill_ms=20_000) as r:
        _, reader = await r.open()
        first = await anext(aiter(body(reader)))
        assert trio.current_time() == 0.0
        assert json.loads(first[6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        reader.close()


async def test_what_was_handed_on_counts_only_when_the_next_is_asked_for(autojump_clock: MockClock) -> None:
    async with open_rig(stream={"window": 4}) as r:
        stream, reader = await r.open(max_tokens=100)
        pieces = aiter(body(reader))
        await anext(pieces)
        await trio.sleep(1)
        assert (await anext(pieces)).count(b"\n\n") == 4, "all that is ready goes out in one write"
        await trio.sleep(1)
        assert r.engine.stepper.made[stream.identity.id] == 4, "the transport still has it: no credit"
        await anext(pieces)
        await trio.sleep(1)
        assert r.engine.stepper.made[stream.identity.id] in (8, 9)
        reader.close()


class Kernel:
    """As much of a socket as a writer meets, to a client that takes everything at once: what was written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def send(self, data: bytes) -> int:
        self.written.append(data)
        return len(data)

    @property
    def direct(self) -> Direct:
        direct = Direct(Writer(cast(socket.socket, self), None, 1.0), lambda: None, trio.lowlevel.checkpoint)
        direct.open_ended = True
        return direct


async def test_what_is_put_goes_out_together_when_it_is_settled(autojump_clock: MockClock) -> None:
    async with open_rig(prefill_ms=1_000_000) as r:
        stream, reader = await r.open()
        kernel = Kernel()
        sent = EventBody(reader, ChatEncoder("tf-1", "m", 0, False, 1), 15.0, direct=kernel.direct)
        await anext(sent)
        send = stream._choices[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(anext, sent)
            await trio.testing.wait_all_tasks_blocked()

            def put(*deltas: Delta) -> None:
                kernel.written.clear()
                for delta in deltas:
                    send.put(delta)

            def frames() -> list[int]:
                return [data.count(b"\n\n") for data in kernel.written]

            put(*[Delta("a")] * 20, Delta("", 1), Delta("a"))
            assert frames() == []
            send.settle()
            send.settle()
            assert frames() == [21], "also with one between without text"
            put()
            send.send_nowait(Delta("a"))
            assert frames() == [1]
            put(Delta("a"))
            stream.cancel("client")
            assert frames() == [1], "what was put goes before the end"
            nursery.cancel_scope.cancel()
        reader.close()


@pytest.mark.parametrize("inline", [False, True])
async def test_records_that_a_dialect_is_silent_about_are_silence(autojump_clock: MockClock, inline: bool) -> None:
    """The small dialect says nothing of what a model thinks, which may take minutes."""
    said = f"<think>{'x' * 100}</think>Hi."
    async with open_rig(chat=CHAT, text=said, one_byte=True, tokens_per_s=2.0) as r:
        _, reader = await ask(r)
        kernel = Kernel()
        sent = EventBody(reader, SmallEncoder("tf-1", "m", 0, False), 15.0, direct=kernel.direct if inline else None)
        pieces = [piece async for piece in sent if piece]
        assert pieces[:3] == [PING] * 3 and PING not in pieces[4:], "15, 30 and 45 of its 50 seconds"
        assert b'{"token":"' in b"".join(pieces + kernel.written)
        reader.close()
