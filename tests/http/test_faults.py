"""Whose fault it is: what a tokenizer refuses is the client's; any other ValueError is ours, and is not told."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.service.conftest import open_rig
from tokenflow.api import EngineInfo, EngineStats, Grammar, Send, SequenceRequest
from tokenflow.cli.logs import OneLine
from tokenflow.config.model import ChatConfig
from tokenflow.http.app import create_app

MESSAGES = [{"role": "user", "content": "bad"}]


class Picky:
    """An engine that refuses the text `bad`, and has a fault in its `compile`."""

    info = EngineInfo(model="m", context_length=100, slots=1, capabilities=frozenset({"grammar"}))

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        if text == "bad":
            raise ValueError("bad is no text")
        return [1]

    async def compile(self, grammar: Grammar, *, budget_s: float) -> None:
        raise ValueError("a fault")

    async def generate(self, request: SequenceRequest, send: Send) -> None: ...

    async def detokenize(self, tokens: list[int]) -> str:
        return ""

    async def stats(self) -> EngineStats:
        return EngineStats()


async def post(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    @asynccontextmanager
    async def open_engine(config: object) -> AsyncIterator[Picky]:
        yield Picky()

    chat = ChatConfig(template="{{ messages[0].content }}")
    async with open_rig(open_engine=open_engine, chat=chat) as r:
        answer = await create_app(r.service).test_client().post(path, json=body)
        return answer.status_code, (await answer.get_json())["error"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/tokenize", "prompt", "bad"),
        ("/v1/tokenize", "messages", MESSAGES),
        ("/v1/completions", "prompt", "bad"),
        ("/v1/chat/completions", "messages", MESSAGES),
    ],
)
async def test_what_a_tokenizer_refuses(path: str, field: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    status, error = await post(path, {field: value})
    assert (status, error["message"], error["param"]) == (400, "bad is no text", field)
    assert all(record.levelno < logging.ERROR for record in caplog.records)


async def test_any_other_value_error(caplog: pytest.LogCaptureFixture) -> None:
    status, error = await post("/v1/completions", {"prompt": "good", "guided_regex": "a"})
    assert (status, error["code"]) == (500, "internal_error") and "a fault" not in error["message"]
    (line,) = [OneLine(traces=False).format(record) for record in caplog.records if record.levelno == logging.ERROR]
    assert "(ValueError: a fault at " in line and __file__ in line
