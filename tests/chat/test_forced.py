"""A call that must be made: what its grammar allows, for any tools; and how it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenflow.api import Grammars
from tokenflow.chat.forced import call_grammar, is_forced
from tokenflow.chat.model import ChatModel
from tokenflow.core.types import ChatPrompt, Delta, Message, Tools

END = 256
ADDRESS = {
    "type": "object",
    "properties": {"town": {"$ref": "#/$defs/town"}, "next": {"$ref": "#"}},
    "required": ["town"],
    "additionalProperties": False,
    "$defs": {"town": {"enum": ["Oslo", "Bergen"]}},
}
COUNT = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/town"}},
    "required": ["n"],
    "$defs": {"town": {"type": "integer"}},
}
UNTYPED = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}


def tools(choice: Any, **parameters: Any) -> Tools:
    functions = [
        {"name": name} | ({} if schema is None else {"parameters": schema}) for name, schema in parameters.items()
    ]
    return Tools(functions=tuple({"type": "function", "function": f} for f in functions), choice=choice)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    return Grammars(tokens, ends=[END], specials=[END], tokenize=lambda text: list(text.encode()))


async def allowed(grammars: Grammars, tools: Tools, text: str) -> bool:
    """Whether the grammar lets the text be written, and end."""
    async with grammars:
        matcher = await grammars.matcher(call_grammar(tools))
    for byte in text.encode():
        if matcher.ended or not matcher.mask()[byte]:
            return False
        matcher.accept(byte)
    return matcher.ended or bool(matcher.mask()[END])


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ('{"name": "address", "arguments": {"town": "Oslo"}}', True),
        ('{"name": "address", "arguments": {"town": "Oslo", "next": {"town": "Bergen"}}}', True),
        ('{"name": "address", "arguments": {"town": "Paris"}}', False),
        ('{"name": "count", "arguments": {"n": 12}}', True),
        ('{"name": "count", "arguments": {"n": "Oslo"}}', False),
        ('{"name": "anything", "arguments": {"a": [1]}}', True),
        ('{"name": "untyped", "arguments": {"n": 1}}', True),
        ('{"name": "untyped", "arguments": "n"}', False),
        ('{"name": "told", "arguments": 1}', False),
        ('{"name": "nobody", "arguments": {}}', False),
        ('{"name": "count"}', False),
        ("I would rather not.", False),
        ("", False),
    ],
)
async def test_it_is_one_call_of_a_tool_with_arguments_of_its_schema(grammars: Grammars, text: str, may: bool) -> None:
    given = tools("required", address=ADDRESS, count=COUNT, anything=None, untyped=UNTYPED, told={"description": "-"})
    assert await allowed(grammars, given, text) is may


@pytest.mark.parametrize(("choice", "forced"), [("auto", False), ("none", False), ("required", True), ("named", True)])
def test_which_choices_force_a_call(choice: Any, forced: bool) -> None:
    assert is_forced(tools(choice, f=None)) is forced
    assert not is_forced(None)


@pytest.mark.parametrize(("template", "chars"), [("<tool_call></think><think>", 29), ("[TOOL_CALLS]", 9)])
def test_it_is_read_as_a_call_whatever_the_model(template: str, chars: int) -> None:
    given = tools("named", f=None)
    reader = ChatModel({"default": template}).reader(ChatPrompt(messages=(), tools=given), [], "seed")
    assert reader is not None
    message = Message()
    for char in '{"name": "f", "arguments": {"a": "<think>"}}':
        if (delta := reader.take(Delta(char))) is not None:
            message.add(delta)
    assert reader.finish("stop") == (None, "tool_calls")
    [call] = message.calls
    assert (call.name, json.loads(call.arguments), len(call.id)) == ("f", {"a": "<think>"}, chars)
