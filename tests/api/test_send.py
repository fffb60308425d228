"""`Send`: a memory channel's contract, and credit as one absolute number."""

from __future__ import annotations

import pytest
import trio
from trio.testing import assert_checkpoints, assert_no_checkpoints, wait_all_tasks_blocked

from tokenflow.api import Delta, Event, Finished, Send, Started, TokenLogprob


def make(window: int = 2) -> tuple[Send, list[Event]]:
    events: list[Event] = []
    return Send(events.append, window=window), events


async def test_send_is_a_checkpoint_each_time() -> None:
    send, events = make()
    for event in (Started(1), Delta("a"), Delta("", 1), Finished("stop")):
        with assert_checkpoints():
            await send.send(event)
    assert events == [Started(1), Delta("a"), Delta("", 1), Finished("stop")]


async def test_cancelled_it_sends_nothing() -> None:
    send, events = make()
    with trio.CancelScope() as scope:
        scope.cancel()
        await send.send(Delta("a"))
    assert scope.cancelled_caught
    assert (events, send.sent) == ([], 0)


async def test_only_deltas_wait_for_room(autojump_clock: trio.testing.MockClock) -> None:
    send, events = make(window=1)
    await send.send(Delta("a"))
    with trio.move_on_after(5) as scope:
        await send.send(Delta("b"))
    assert scope.cancelled_caught
    await send.send(Finished("stop"))
    assert events == [Delta("a"), Finished("stop")]


async def test_room_wakes_who_waits(nursery: trio.Nursery) -> None:
    send, events = make(window=1)
    await send.send(Delta("a"))
    nursery.start_soon(send.send, Delta("b"))
    await wait_all_tasks_blocked()
    assert events == [Delta("a")]
    send.accept(1)
    await wait_all_tasks_blocked()
    assert events == [Delta("a"), Delta("b")]


async def test_woken_and_then_cancelled_it_sends_nothing() -> None:
    send, events = make(window=1)
    await send.send(Delta("a"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send.send, Delta("b"))
        await wait_all_tasks_blocked()
        send.accept(1)
        nursery.cancel_scope.cancel()
    assert events == [Delta("a")]


async def test_after_the_end_it_is_closed() -> None:
    send, events = make()
    await send.send(Finished("stop"))
    for event in (Delta("a"), Finished("stop")):
        with pytest.raises(trio.ClosedResourceError):
            await send.send(event)
        with pytest.raises(trio.ClosedResourceError):
            send.send_nowait(event)
    assert events == [Finished("stop")]


async def test_closing_lets_a_waiting_sender_go() -> None:
    send, _ = make(window=1)
    await send.send(Delta("a"))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await send.send(Delta("b"))

            nursery.start_soon(refused)
            await wait_all_tasks_blocked()
            with assert_checkpoints():
                await send.aclose()


async def test_only_content_costs_credit() -> None:
    send, _ = make(window=2)
    for _ in range(5):
        send.send_nowait(Delta("", 1))
    assert (send.sent, send.stalled) == (0, False)
    send.send_nowait(Delta("a"))
    send.send_nowait(Delta("", 1, (TokenLogprob("a", -1.0, b"a"),)))
    assert (send.sent, send.stalled) == (2, True)


async def test_the_listener_hears_each_change_once() -> None:
    send, _ = make(window=2)
    heard: list[int] = []
    send.listen(heard.append)
    assert heard == [2]
    send.accept(0)
    assert heard == [2]
    send.accept(3)
    assert heard == [2, 5]
    send.listen(None)
    send.accept(1)
    assert heard == [2, 5]
    assert send.limit == 6


async def test_pause_takes_all_credit_and_resume_gives_it_back() -> None:
    send, _ = make(window=4)
    heard: list[int] = []
    send.listen(heard.append)
    send.send_nowait(Delta("a"))
    send.pause()
    assert (send.limit, send.stalled) == (1, True)
    send.send_nowait(Delta("b"))  # was under way
    send.accept(2)
    assert send.stalled, "a reader's progress is no resume"
    send.resume()
    assert (send.limit, send.stalled) == (6, False)
    assert heard == [4, 1, 2, 6]


async def test_resume_wakes_who_waits(nursery: trio.Nursery) -> None:
    send, events = make(window=4)
    send.pause()
    nursery.start_soon(send.send, Delta("a"))
    await wait_all_tasks_blocked()
    assert events == []
    send.resume()
    await wait_all_tasks_blocked()
    assert events == [Delta("a")]


async def test_what_the_stream_raises_reaches_the_sender() -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Send(fail, window=1).send(Started(1))


async def test_waiting_for_room_with_room_is_no_checkpoint() -> None:
    send, _ = make()
    with assert_no_checkpoints():
        await send.wait_room()


def test_what_readers_allow_caps_the_window() -> None:
    send, _ = make(window=4)
    limits: list[int] = []
    send.listen(limits.append)
    send.allow(1)
    send.send_nowait(Delta("a"))
    send.accept(1)
    assert send.stalled
    send.allow(9)
    send.allow(None)
    assert limits == [4, 1, 5], "a change that changes nothing is not told"
    send.allow(0)
    assert send.limit == send.sent == 1, "what was sent was sent"
