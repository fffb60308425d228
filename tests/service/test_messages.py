"""Chat streams whose text is read as messages: credit, tokens, coalescing and ends are right whatever is held."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.service.conftest import STEP_S, Rig, open_rig, read_all
from tests.service.test_credit import Takes
from tokenflow.chat.reader import MessageReader
from tokenflow.cli.logs import OneLine
from tokenflow.config.model import ChatConfig
from tokenflow.core.types import Attendance, ChatPrompt, Delta, GenerationRequest, Message, Tools
from tokenflow.errors import StartupError
from tokenflow.service.records import Ended, Failed
from tokenflow.service.stream import Stream, StreamReader

CHAT = ChatConfig(template="{{ messages[0].content }}", tool_calls="hermes", reasoning="think")
TOOLS = Tools(functions=({"type": "function", "function": {"name": "f"}},))
ARGUMENTS = '{"a": [1, "two"]}'
SAID = f'<think>\nHm\n</think>\n\nLook <b>.\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
TOKENS = len(SAID) + 1
"""One byte a token, and one that ends."""


def talking(text: str = SAID, **options: Any) -> AbstractAsyncContextManager[Rig]:
    return open_rig(chat=CHAT, text=text, one_byte=True, **options)


async def ask(r: Rig, **wishes: Any) -> tuple[Stream, StreamReader]:
    prompt = ChatPrompt(messages=({"role": "user", "content": "x"},), tools=TOOLS)
    request = GenerationRequest(model="", prompts=(prompt,), stream=True, **wishes)
    return await r.service.open(request, key="-", route="/test")


def joined(events: list[tuple[int, Any]], source: int = 0) -> Message:
    message = Message()
    for whose, event in events:
        if whose == source:
            message.add(event)
    return message


def check(message: Message) -> None:
    assert (message.text, message.reasoning) == ("Look <b>.", "Hm")
    assert [(call.name, call.arguments) for call in message.calls] == [("f", ARGUMENTS)]


@pytest.mark.parametrize("coalesce_ms", [None, 20, 70, 1000])
@pytest.mark.parametrize("n", [1, 3])
async def test_every_token_counts_once_however_it_is_gathered(
    autojump_clock: MockClock, coalesce_ms: int | None, n: int
) -> None:
    async with talking(tokens_per_s=100) as r:
        stream, reader = await ask(r, coalesce_ms=coalesce_ms, n=n)
        events = await read_all(reader)
        await r.settle()
        record = r.sink.ended(stream.identity.id)
    end = events[-1][1]
    assert end.reasons == ("tool_calls",) * n and record.reason == "tool_calls"
    assert end.usage.completion == n * TOKENS
    assert sum(event.tokens for _, event in events) == n * TOKENS == record.delivered_tokens
    for source in range(n):
        check(joined(events[:-1], source))
    ids = [call.id for source in range(n) for call in joined(events[:-1], source).calls]
    assert len(set(ids)) == n


async def test_credit_is_of_records_and_what_is_held_costs_none(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """However little credit comes at a time, not one record comes that was not allowed, and it gets to its end."""
    async with talking(tokens_per_s=1000) as r:
        _, reader = await ask(r)
        reader.allow(0)
        takes = Takes(reader)
        nursery.start_soon(takes.run)
        await trio.sleep(10)
        assert takes.deltas == []
        allowed = 0
        while takes.end is None:
            await trio.sleep(1)
            assert len(takes.deltas) == allowed
            takes.reader.allow(1)
            allowed += 1
            await trio.sleep(1)
        await r.settle()
    assert isinstance(takes.end, Ended) and takes.end.reasons == ("tool_calls",)
    check(joined([(0, delta) for delta in takes.deltas]))
    assert len(takes.deltas) < TOKENS / 2, "markup is most of it"


async def test_the_engine_is_no_further_ahead_than_the_window(autojump_clock: MockClock) -> None:
    """A reader that takes nothing holds it back, and markup that becomes no record does not use the window up."""
    async with talking("Hi <tool_cal <tool_call" * 40, stream={"window": 4}) as r:
        stream, reader = await ask(r)
        await trio.sleep(100 * STEP_S)
        assert stream.state.last_n == 4
        events = await read_all(reader)
    assert joined(events[:-1]).text == "Hi <tool_cal <tool_call" * 40


async def test_what_is_held_when_it_is_cancelled_is_delivered(autojump_clock: MockClock) -> None:
    async with talking("Hi <tool_", hang_at=9) as r:
        stream, reader = await ask(r, attendance=Attendance(on_disconnect="pause"))
        await trio.sleep(50 * STEP_S)
        assert "".join(record.event.text for record in await reader.read()) == "Hi "  # type: ignore[union-attr]
        stream.cancel("client")
        events = await read_all(reader)
    assert [event.text for _, event in events if isinstance(event, Delta)][-1] == "<tool_"
    assert events[-1][1].reasons == ("cancelled",)
    assert sum(event.tokens for _, event in events) == 9


async def test_a_call_cut_by_the_limit_is_length(autojump_clock: MockClock) -> None:
    size = SAID.index("two")
    async with talking() as r:
        _, reader = await ask(r, max_tokens=size)
        events = await read_all(reader)
    assert events[-1][1].reasons == ("length",)
    assert joined(events[:-1]).calls[0].arguments == '{"a": [1, "'
    assert events[-1][1].usage.completion == size


async def test_log_probabilities_are_of_the_content_also_coalesced(autojump_clock: MockClock) -> None:
    for coalesce_ms in (None, 50):
        async with talking(tokens_per_s=100) as r:
            _, reader = await ask(r, logprobs=0, coalesce_ms=coalesce_ms)
            events = await read_all(reader)
        assert b"".join(entry.bytes for entry in joined(events[:-1]).logprobs) == b"Look <b>."


async def test_a_template_that_is_none_ends_the_start_with_one_line(tmp_path: Path, autojump_clock: MockClock) -> None:
    file = tmp_path / "a.jinja"
    for content, says in ((b"a\n{% if %}", "line 2"), (b"\xff", "utf-8"), (None, "No such file")):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.RaisesGroup(
            pytest.RaisesExc(StartupError, match=rf"model 'm': .*{says}.*set \[models.m.chat\] template_file"),
            flatten_subgroups=True,
        ):
            async with open_rig(chat=ChatConfig(template_file=file)):
                raise AssertionError("it opened")


async def test_the_configured_template_counts(tmp_path: Path, autojump_clock: MockClock) -> None:
    file = tmp_path / "a.jinja"
    file.write_text("<|im_start|>é", encoding="utf-8")
    prompt = ChatPrompt(messages=({"role": "user", "content": "x"},))
    for chat in (ChatConfig(template_file=file), ChatConfig(template="<|im_start|>é")):
        async with open_rig(chat=chat) as r:
            model = r.service.model("")
            tokens = await model.planner.tokenize(prompt, model.engine)
            assert await model.engine.detokenize(list(tokens)) == "<|im_start|>é"


async def test_who_comes_later_reads_the_same_records(autojump_clock: MockClock) -> None:
    async with talking(tokens_per_s=100) as r:
        stream, reader = await ask(r, attendance=Attendance(on_disconnect="continue", retention_s=60.0))
        events = await read_all(reader)
        for after in range(len(events)):
            assert await read_all(stream.attach(after)) == events[after:]


def broken(self: MessageReader, *args: Any) -> Any:
    raise IndexError("a bug of ours")


@pytest.mark.parametrize("coalesce_ms", [None, 20])
@pytest.mark.parametrize("way", ["ended", "cancelled"])
async def test_a_reader_that_fails_at_the_end_ends_its_stream_alone(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    coalesce_ms: int | None,
) -> None:
    async with talking(slots=2, tokens_per_s=100) as r:
        stream, reader = await ask(r, idempotency_key="k", coalesce_ms=coalesce_ms)
        _, other = await r.open(max_tokens=1000)
        await trio.sleep(0.5)
        with monkeypatch.context() as patch:
            patch.setattr(MessageReader, "finish", broken)
            if way == "cancelled":
                stream.cancel("client")
            events = await read_all(reader)
        assert isinstance(events[-1][1], Failed) and events[-1][1].error.code == "internal_error"
        assert "bug" not in events[-1][1].error.message
        assert isinstance((await read_all(other))[-1][1], Ended)
        await r.settle()
        record = r.sink.ended(stream.identity.id)
        assert (record.reason, record.code, record.by) == ("error", "internal_error", "server")
        assert not stream.repeatable and stream.state.error == "internal_error"
        assert (await ask(r, idempotency_key="k"))[0] is not stream
    (line,) = [OneLine(traces=False).format(record) for record in caplog.records if record.levelno == logging.ERROR]
    assert "IndexError: a bug of ours at " in line and __file__ in line


async def test_a_reader_that_fails_while_tokens_are_gathered_is_logged_with_its_place(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken_once(self: MessageReader, *args: Any) -> Any:
        monkeypatch.undo()
        raise IndexError("a bug of ours")

    async with talking(slots=2, tokens_per_s=100) as r:
        _, reader = await ask(r, coalesce_ms=20)
        monkeypatch.setattr(MessageReader, "take", broken_once)
        assert isinstance((await read_all(reader))[-1][1], Failed)
        assert isinstance((await read_all((await ask(r))[1]))[-1][1], Ended)
    (line,) = [OneLine(traces=False).format(record) for record in caplog.records if record.levelno == logging.ERROR]
    assert "IndexError: a bug of ours at " in line and __file__ in line
