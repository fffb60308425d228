"""Templates of public model families: rendered as transformers renders them, and answers read in the way they teach."""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tokenflow.chat import harmony
from tokenflow.chat.calls import CALLS
from tokenflow.chat.marking import SpecialTokens
from tokenflow.chat.model import ChatModel
from tokenflow.chat.reader import MessageReader
from tokenflow.chat.reasoning import THINK
from tokenflow.core.types import ChatPrompt, Delta, Ending, Message, Tools
from tokenflow.errors import InvalidRequest

FOLDER = Path(__file__).parent / "templates"
FORMS: dict[str, dict[str, str]] = json.loads((FOLDER / "templates.json").read_text())
CASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text())
EXPECTED: dict[str, dict[str, str | None]] = json.loads((FOLDER / "expected.json").read_text())
NOW = datetime(2026, 2, 3, 4, 5, 6)


@cache
def model(name: str, tool_calls: str = "auto") -> ChatModel:
    form = FORMS[name]
    return ChatModel(
        {"default": source(name)},
        form["bos"],
        form["eos"],
        tool_calls=tool_calls,
        variables=("enable_thinking", "thinking"),
    )


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


def rendered(model: ChatModel, case: dict[str, Any]) -> str | None:
    tools = Tools(functions=tuple(case["tools"])) if "tools" in case else None
    ending: Ending = "opening" if case.get("add_generation_prompt", True) else "closed"
    variables = case.get("variables", {})
    prompt = ChatPrompt(messages=tuple(case["messages"]), tools=tools, variables=variables, ending=ending)
    try:
        return "".join(text for text, _ in model.render(prompt, now=NOW))
    except InvalidRequest as exc:
        assert "template" in exc.message
        return None


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_transformers_renders(name: str, case: str) -> None:
    # Whether its calls can be read is another matter: `hermes` only says that tools are welcome.
    assert rendered(model(name, tool_calls="hermes"), CASES[case]) == EXPECTED[name][case]


def test_there_are_ten_families_and_they_were_rendered() -> None:
    assert len(FORMS) >= 12
    texts = [text for cases in EXPECTED.values() for text in cases.values()]
    assert sum(text is None for text in texts) == 1, "one template makes one call at a time"


@pytest.mark.parametrize("name", FORMS)
def test_what_it_expects_is_found_out(name: str) -> None:
    found = model(name)._templates["default"]._expectations
    assert (found.arguments, found.no_content) == (
        FORMS[name].get("arguments", "object"),
        FORMS[name].get("no content", "absent"),
    )


@pytest.mark.parametrize("name", FORMS)
def test_how_it_talks_is_told_by_its_template(name: str) -> None:
    found = model(name)
    calls, reasoning = FORMS[name]["tool calls"], FORMS[name]["reasoning"]
    assert found._is_harmony == (calls == "harmony")
    assert found._calls == CALLS.get(calls)
    assert found._think == THINK.get(reasoning)


ONE_AT_A_TIME = ("llama-3-style", "gpt-oss")
CALLING = [name for name, form in FORMS.items() if form["tool calls"] != "none"]


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, count) for name in CALLING for count in (1, 2) if count == 1 or name not in ONE_AT_A_TIME],
)
def test_what_a_template_writes_for_a_call_is_read_as_that_call(name: str, count: int) -> None:
    """A model writes what its template showed it: so the assistant's turn is taken out of a rendering, and read."""
    arguments = [{"city": 'Århus "x"\n{y}', "days": [1, {"a": None}]}, {}][:count]
    tool = CASES["with tools"]["tools"][0]
    tools = Tools(functions=(tool,))
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(said)}}
        for i, said in enumerate(arguments)
    ]
    asked = {"role": "user", "content": "How is it?"}
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    talk = model(name)
    before = talk.render(ChatPrompt(messages=(asked,), tools=tools), now=NOW)
    segments = talk.render(ChatPrompt(messages=(asked, called), tools=tools, ending="closed"), now=NOW)
    opening, whole = ("".join(text for text, _ in part) for part in (before, segments))
    text = _answer(opening, whole, FORMS[name])
    reader = talk.reader(ChatPrompt(messages=(asked,), tools=tools), [], "seed")
    assert reader is not None
    message, reason = read(reader, text)
    assert [call.name for call in message.calls] == ["weather"] * count
    assert [json.loads(call.arguments) for call in message.calls] == arguments
    assert (message.text, reason) == ("", "tool_calls")


def _answer(opening: str, whole: str, form: dict[str, str]) -> str:
    """The assistant's turn without what the prompt opened and the model's end of turn, which has no text."""
    shared = next(i for i in range(len(whole)) if not opening.startswith(whole[: i + 1]))
    shared -= whole[shared - 1] == "<"  # both may go on with a mark, each with its own
    text = whole[shared:].rstrip()
    for end in (form["eos"], "<|call|>", "<|im_end|>"):
        text = text.removesuffix(end)
    return text.removeprefix("</think>")


def read(reader: MessageReader, text: str) -> tuple[Message, str]:
    message = Message()
    for char in text:
        if (delta := reader.take(Delta(char))) is not None:
            message.add(delta)
    tail, reason = reader.finish("stop")
    if tail is not None:
        message.add(tail)
    return message, reason


def test_harmonys_marks_are_shown_to_its_reader_where_they_are_control_tokens() -> None:
    special = frozenset({"<|channel|>", "<|message|>", "<|endoftext|>"})
    assert model("gpt-oss").shown == frozenset()
    talk = ChatModel({"default": source("gpt-oss")}, special_tokens=special)
    assert talk.shown == {"<|channel|>", "<|message|>"} <= harmony.MARKS


@pytest.mark.parametrize(
    ("name", "variables", "opened"),
    [
        ("deepseek-r1-distill", {"enable_thinking": True}, True),
        ("deepseek-r1-distill", {}, False),
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("deepseek-v3.1", {"thinking": True}, True),
        ("deepseek-v3.1", {}, False),
    ],
)
def test_reasoning_that_the_template_opens_in_the_prompt(name: str, variables: dict[str, Any], opened: bool) -> None:
    talk = model(name)
    prompt = ChatPrompt(messages=({"role": "user", "content": "<think>"},), variables=variables)
    reader = talk.reader(prompt, talk.render(prompt), "seed")
    assert reader is not None
    message, _ = read(reader, "Hm.\n</think>\n\nHi" if opened else "Hi")
    assert (message.reasoning, message.text) == ("Hm." if opened else "", "Hi")


def test_a_request_without_tools_on_a_model_that_does_not_reason_needs_no_reader() -> None:
    prompt = ChatPrompt(messages=({"role": "user", "content": "Hi"},))
    for name, form in FORMS.items():
        needed = form["reasoning"] != "none" or form["tool calls"] == "harmony"
        assert (model(name).reader(prompt, [], "seed") is not None) is needed, name


@pytest.mark.parametrize("name", FORMS)
def test_what_a_template_teaches_is_what_the_model_can_do(name: str) -> None:
    form = FORMS[name]
    tools = {"tools"} if form["tool calls"] != "none" else set()
    reasons = form["reasoning"] != "none" or form["tool calls"] == "harmony"
    assert model(name).capabilities == {"chat"} | tools | ({"reasoning"} if reasons else set())


def test_a_template_for_tools_is_taken_where_there_are_tools() -> None:
    templates = {"default": "plain", "tool_use": "{{ tools[0].function.name }}<tool_call>"}
    talk = ChatModel(templates)
    tools = Tools(functions=({"type": "function", "function": {"name": "f"}},))
    for given, text in ((None, "plain"), (tools, "f<tool_call>")):
        assert talk.render(ChatPrompt(messages=(), tools=given)) == [(text, True)]


def test_a_models_word_for_its_effort() -> None:
    talk = model("gpt-oss")
    prompt = ChatPrompt(messages=({"role": "user", "content": "Hi"},), reasoning_effort="high")
    assert "Reasoning: high" in "".join(text for text, _ in talk.render(prompt, now=NOW))


CONTROL = re.compile(r"<[|｜][^|｜<>{}]+[|｜]>|\[/?[A-Z_]{3,}\]|</?s>|</?seed:\w+>|</?tool_call>|</?think>")


@pytest.mark.parametrize("name", FORMS)
def test_nothing_that_a_client_sends_is_read_as_a_control_token(name: str) -> None:
    """Not in messages, nor in tools, arguments, reasoning or variables: the tokens are those of a harmless request."""
    form = FORMS[name]
    special = frozenset(CONTROL.findall(source(name))) | {form["bos"], form["eos"]}
    talk = ChatModel(
        {"default": source(name)},
        form["bos"],
        form["eos"],
        special,
        tool_calls="hermes",
        variables=("reasoning_effort",),
    )
    attack = "".join(sorted(special))

    def tokens(text: str) -> list[str]:
        prompt = _prompt_of(text)
        segments = talk.render(prompt, now=NOW)
        assert text == "harmless" or sum(len(text) for text, _ in segments) > len(attack)
        found = SpecialTokens(special).find
        return [text[start:end] for text, is_special in segments if is_special for start, end in found(text)]

    assert tokens(attack) == tokens("harmless")


def _prompt_of(text: str) -> ChatPrompt:
    """A conversation with the text wherever a client may put one."""
    function = {
        "name": "f",
        "description": text,
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": text, "enum": [text]}}},
    }
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    return ChatPrompt(
        messages=(
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": text},
            {"role": "tool", "content": text, "tool_call_id": "123456789"},
            {"role": "assistant", "content": "It is so."},
            {"role": "user", "content": f"a{text}"},
        ),
        tools=Tools(functions=({"type": "function", "function": function},)),
        variables={"reasoning_effort": text},
    )
