"""Leaving: early, cancelled, between reads. And reading no further than asked."""

from __future__ import annotations

import gc

import httpx2
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.client.fake import EVENTS, HELLO, ID, URL, Body, Cut, Server
from tokenflow.client import BadAnswer, Client, ServerError

DELETE = f"DELETE /v1/streams/{ID}"


async def test_leaving_early_closes_and_cancels() -> None:
    server = Server(["a"] * 10, piece=200)
    async with server.client() as client, client.chat(HELLO) as stream:
        assert (await anext(stream)).text == "a"
    assert server.log == ["POST /v1/chat/completions", DELETE]
    assert server.bodies[0].closed
    await stream.aclose()
    assert len(server.log) == 2


async def test_no_generator_is_left_to_the_collector() -> None:
    server = Server(["a"] * 10, [Cut(400), Cut(300)], piece=50)
    async with server.client() as client:
        for _ in range(3):
            async with client.chat(HELLO) as stream:
                await anext(stream)
    gc.collect()  # a generator that is still open would warn, and warnings are errors


async def test_at_the_end_there_is_nothing_to_cancel() -> None:
    server = Server(["a"])
    async with server.client() as client, client.chat(HELLO) as stream:
        assert await stream.text() == "a"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert server.log == ["POST /v1/chat/completions"]


@pytest.mark.parametrize("choice", ["cancel", "continue"])
async def test_what_the_request_chose_is_left_to_the_server(choice: str) -> None:
    server = Server(["a"] * 9, piece=200)
    async with server.client() as client, client.chat(HELLO, stream_options={"on_disconnect": choice}) as stream:
        await anext(stream)
    assert server.log == ["POST /v1/chat/completions"]


async def test_left_as_it_is() -> None:
    server = Server(["a"] * 9, piece=200)
    async with server.client() as client:
        async with client.chat(HELLO) as stream:
            await anext(stream)
            stream.cancel_on_leave = False
        async with client.attach(stream.id, after=stream.n) as again:
            assert await again.text() == "a" * (9 - stream.n)
    assert DELETE not in server.log


async def test_cancelled_while_it_waits() -> None:
    server = Server(["a", "b"], [Cut(400, hang=True)])
    async with server.client() as client:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    async with client.chat(HELLO) as stream:
                        await stream.text()

                nursery.start_soon(read)
                await wait_all_tasks_blocked()
                scope.cancel()
    assert server.log == ["POST /v1/chat/completions", DELETE]
    assert server.bodies[0].closed


async def test_cancelled_while_it_opens() -> None:
    class Slow(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            await trio.sleep_forever()

    async with Client(URL, transport=Slow()) as client:
        with trio.move_on_after(0) as scope:
            async with client.chat(HELLO):
                pass
    assert scope.cancelled_caught


async def test_a_cancelled_read_loses_nothing(autojump_clock) -> None:
    """As `move_on_after` around one read does it: the next one comes back."""
    server = Server(["a", "b"], [Cut(500, hang=True), Cut(100, hang=True)], piece=30)
    got = []
    async with server.client() as client, client.chat(HELLO) as stream:
        while not stream.finished:
            with trio.move_on_after(1):
                async for delta in stream:
                    got.append(delta.text)
    assert "".join(got) == "ab"


async def test_a_server_that_does_not_take_the_goodbye(autojump_clock) -> None:
    class Deaf(Server):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if request.method == "DELETE":
                await trio.sleep_forever()
            return await super().handle_async_request(request)

    async with Deaf(["a"] * 9, piece=200).client() as client, client.chat(HELLO) as stream:
        await anext(stream)
    assert trio.current_time() == 2


@pytest.mark.parametrize("answer", [httpx2.Response(404), httpx2.ConnectError("gone")])
async def test_a_goodbye_that_fails_is_no_error(answer: object) -> None:
    class Gone(Server):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if request.method == "DELETE":
                if isinstance(answer, Exception):
                    raise answer
                return answer
            return await super().handle_async_request(request)

    async with Gone(["a"] * 9, piece=200).client() as client, client.chat(HELLO) as stream:
        await anext(stream)


async def test_it_reads_no_further_than_asked() -> None:
    server = Server([f"{i:04d}" for i in range(5000)], piece=1000)
    async with server.client() as client, client.chat(HELLO) as stream:
        for expected in range(20):
            assert (await anext(stream)).text == f"{expected:04d}"
            consumed = len(server.transcript()) - len(server.transcript(after=expected + 1))
            assert server.bodies[0].sent - consumed <= 2 * 1000
        assert len(stream._ready) < 10


# --- errors within the stream ---------------------------------------------------------------------------------------


def error_end(code: str) -> bytes:
    envelope = f'{{"error":{{"message":"Sorry.","type":"server_error","param":null,"code":"{code}"}}}}'
    return f"data: {envelope}\n\nid: {ID}:3\ndata: [DONE]\n\n".encode()


async def test_a_failure_comes_after_what_was_generated() -> None:
    server = Server(["a", "b"], end=error_end("engine_error"))
    got = []
    async with server.client() as client, client.chat(HELLO) as stream:
        with pytest.raises(ServerError, match="Sorry") as caught:
            async for delta in stream:
                got.append(delta.text)
        with pytest.raises(ServerError):
            await anext(stream)
    assert (got, caught.value.code, caught.value.status, stream.finished) == (["a", "b"], "engine_error", None, True)
    assert server.log == ["POST /v1/chat/completions"]


async def test_a_failure_that_was_cut_is_come_back_for(autojump_clock) -> None:
    whole = Server(["a", "b"], end=error_end("engine_error")).transcript()
    server = Server(["a", "b"], [Cut(len(whole) - 10)], end=error_end("engine_error"))
    async with server.client() as client, client.chat(HELLO) as stream:
        with pytest.raises(ServerError):
            await stream.text()
    assert server.log[1] == f"GET /v1/streams/{ID} {ID}:2"


WRONG = {
    "a gap": f'id: {ID}:3\ndata: {{"id":"{ID}"}}\n\n',
    "another stream": "id: tf-other:1\ndata: {}\n\n",
    "no JSON": "data: nonsense\n\n",
    "no object": "data: []\n\n",
    "no choice": 'data: {"choices":["x"]}\n\n',
    "no text": 'data: {"choices":[{"delta":{"content":1}}]}\n\n',
}


@pytest.mark.parametrize("frame", WRONG.values(), ids=WRONG)
async def test_what_is_no_stream_of_ours(frame: str) -> None:
    numbered = frame.startswith("id")
    opening = f'data: {{"id":"{ID if numbered else "x"}","choices":[]}}\n\n'
    answer = httpx2.Response(200, headers=EVENTS | {"X-Request-Id": ID}, content=(opening + frame).encode())
    server = Server([], instead=[lambda: _streaming(answer)])
    async with server.client() as client, client.chat(HELLO) as stream:
        with pytest.raises(BadAnswer):
            await stream.text()


def _streaming(answer: httpx2.Response) -> httpx2.Response:
    return httpx2.Response(200, headers=answer.headers, stream=Body(answer.content, None, 1 << 20))


async def test_choices_are_told_apart() -> None:
    def chunk(index: int, text: str) -> str:
        return f'data: {{"id":"x","choices":[{{"index":{index},"text":"{text}"}}]}}\n\n'

    ends = "".join(f'data: {{"choices":[{{"index":{i},"text":"","finish_reason":"stop"}}]}}\n\n' for i in (0, 1))
    content = chunk(0, "a") + chunk(1, "b") + chunk(0, "c") + ends + "data: [DONE]\n\n"
    server = Server([], instead=[lambda: _streaming(httpx2.Response(200, headers=EVENTS, content=content.encode()))])
    async with server.client() as client, client.completions("p", n=2) as stream:
        assert [(delta.n, delta.index, delta.text) async for delta in stream] == [(1, 0, "a"), (2, 1, "b"), (3, 0, "c")]
        assert (await stream.text(1), stream.finish_reasons) == ("b", {0: "stop", 1: "stop"})


async def test_tool_calls_are_handed_on() -> None:
    call = '{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}'
    content = f'data: {{"id":"x","choices":[{{"index":0,"delta":{call}}}]}}\n\ndata: [DONE]\n\n'
    server = Server([], instead=[lambda: _streaming(httpx2.Response(200, headers=EVENTS, content=content.encode()))])
    async with server.client() as client, client.chat(HELLO) as stream:
        [delta] = [delta async for delta in stream]
    assert delta.text == "" and delta.choice["delta"]["tool_calls"][0]["function"]["arguments"] == "{"
